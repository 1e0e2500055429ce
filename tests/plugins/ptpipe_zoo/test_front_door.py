from __future__ import annotations

import hashlib
import re
import subprocess
import sys

import pytest

import ptpipe_zoo
from ptpipe import ManifestError, Stage, load_plan
from ptpipe.plan.bind import config_problems
from ptpipe_zoo import extras, names


def test_importing_it_imports_neither_torch_nor_numpy():
    code = """
import sys, ptpipe_zoo
ptpipe_zoo.TorchvisionConfig(name="resnet18")
print([name for name in ("torch", "torchvision", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_offers_its_kinds_with_help():
    stages = {stage.kind: stage for stage in ptpipe_zoo.ptpipe_stages()}
    kinds = [
        "dynamic_shapes",
        "mlp",
        "onnx",
        "python",
        "small_cnn",
        "small_unet",
        "text_lstm",
        "text_transformer",
        "timm",
        "torch",
        "torchvision",
        "transformers",
    ]
    assert sorted(stages) == [f"model.{kind}" for kind in kinds]
    for stage in stages.values():
        assert stage.help.endswith(".")
        assert all(field.description for field in stage.config_type.model_fields.values())


def problems(stage: Stage, **options: object) -> list[tuple[str, str | None]]:
    return [(message, suggestion) for _, message, suggestion, _ in config_problems(stage, options)[1]]


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (ptpipe_zoo.mlp, {"hidden": [8, 0]}, r"hidden.1: .*1.*not 0"),
        (ptpipe_zoo.mlp, {"dropout": 1}, "dropout: .*less than 1"),
        (ptpipe_zoo.small_cnn, {"width": 0}, "width: .*not 0"),
        (ptpipe_zoo.small_cnn, {"widht": 8}, "widht"),
        (ptpipe_zoo.text_transformer, {"dim": 130}, "dim 130 is not a multiple of num_heads 4"),
        (ptpipe_zoo.text_transformer, {"causal": True, "pooling": "first"}, "use pooling mean"),
        (ptpipe_zoo.text_transformer, {"dropout": 1}, "dropout: .*less than 1"),
        (ptpipe_zoo.text_lstm, {"pooling": "first"}, "pooling: .*'mean' or 'last'"),
        (ptpipe_zoo.text_lstm, {"bidirectional": True}, "bidirectional"),
        (ptpipe_zoo.torchvision, {}, "'name'"),
        (ptpipe_zoo.timm, {"name": "resnet18", "weights": "a1_in1k", "weights_file": "w.pth"}, "not both"),
        (ptpipe_zoo.timm, {"name": "resnet18", "weights_entry": "ema"}, "weights_entry is an entry of weights_file"),
        (ptpipe_zoo.torchvision, {"name": "resnet18", "weights_entry": "ema"}, "weights_entry is an entry of weig"),
        (
            ptpipe_zoo.python_model,
            {"file": "m.py", "function": "f", "weights_entry": "ema"},
            "weights_entry is an entr",
        ),
        (ptpipe_zoo.timm, {"name": "resnet18", "arguments": {"pretrained": True}}, "pretrained can't be given"),
        (ptpipe_zoo.transformers, {}, "give config or folder, one of them"),
        (ptpipe_zoo.transformers, {"config": {"hidden_size": 8}}, "config has no model_type"),
        (
            ptpipe_zoo.transformers,
            {"config": {"model_type": "bert", "auto_map": {}}},
            "config: auto_map can't be given",
        ),
        (ptpipe_zoo.timm, {"name": "resnet18", "weights": "../../x"}, "weights"),
        (
            ptpipe_zoo.torchvision,
            {"name": "resnet18", "weights": "DEFAULT", "weights_file": "w.pth"},
            "give weights or weights_file, not both",
        ),
    ],
)
def test_wrong_options_are_found_before_any_work(stage, options, message):
    ((text, _),) = problems(stage, **options)
    assert re.search(message, text)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("resnet81", "resnet18"), ("ViT_b_16", "vit_b_16"), ("deeplabv3_resnet5", "deeplabv3_resnet50"), ("zzz", None)],
)
def test_an_unknown_network_gets_the_nearest_name(name, suggestion):
    ((message, nearest),) = problems(ptpipe_zoo.torchvision, name=name)
    assert "must name one of torchvision's networks for classification or segmentation" in message
    assert nearest == suggestion


@pytest.mark.skipif(extras.missing_extra("timm") is not None, reason="needs ptpipe[timm]")
@pytest.mark.parametrize(
    ("name", "suggestion"), [("resnet81", "resnet18"), ("vit_tiny_patch16_242", "vit_tiny_patch16_224")]
)
def test_an_unknown_network_of_timm_gets_the_nearest_name(name, suggestion):
    ((message, nearest),) = problems(ptpipe_zoo.timm, name=name)
    assert "must name one of timm's networks" in message
    assert nearest == suggestion


@pytest.mark.parametrize(
    ("library", "options"), [("timm", "name: resnet18"), ("transformers", "config: {model_type: bert}")]
)
def test_a_missing_library_is_found_when_the_manifest_is_read(tmp_path, monkeypatch, library, options):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    (tmp_path / "m.yaml").write_text(
        "version: 1\nname: m\nseed: 1\nstages:\n  data: {uses: data.digits}\n"
        f"  net: {{uses: model.{library}, with: {{{options}}}}}\n"
    )
    with pytest.raises(
        ManifestError, match=rf"net: model.{library} needs {library}: pip install 'ptpipe\[{library}\]'"
    ):
        load_plan(tmp_path / "m.yaml")


def test_the_names_read_from_the_source_are_those_that_torchvision_registers():
    from ptpipe_zoo import torchvision_models, torchvision_segmentation

    assert list(names.classifier_names()) == torchvision_models.list_classifiers()
    assert list(names.segmenter_names()) == sorted(torchvision_segmentation.list_segmenters())
    assert "fcn_resnet50" in names.segmenter_names()


def test_the_published_weights_read_from_the_source_are_torchvisions():
    from ptpipe_zoo import torchvision_models

    for name in ("resnet50", *names.segmenter_names()):
        assert names.weight_urls(name) == torchvision_models.weight_urls(name) != {}


def test_reads_the_names_of_every_form_of_registration(monkeypatch):
    source = (
        '@register_model()\n@handle(\n    weights=("a", None),\n)\ndef one(*, weights=None):\n    ...\n'
        '@register_model(name="two")\ndef build_two():\n    ...\n@register_model("three")\ndef build_three(): ...\n'
        "def helper(): ...\n"
    )
    monkeypatch.setattr(names, "_sources", lambda subfolder: [source])
    assert names._names_in("") == ("one", "three", "two")


def test_without_torchvision_any_name_may_be_planned(monkeypatch):
    for known in ("classifier_names", "segmenter_names"):
        monkeypatch.setattr(names, known, lambda: ())
    assert problems(ptpipe_zoo.torchvision, name="resnet18000") == []


def test_the_content_of_a_weights_file_enters_the_key(tmp_path):
    fingerprint = ptpipe_zoo.torchvision.fingerprint
    file = tmp_path / "w.pth"
    config = ptpipe_zoo.TorchvisionConfig(name="resnet18", weights_file=str(file))
    assert fingerprint(config) is None
    file.write_bytes(b"weights")
    assert fingerprint(config) == hashlib.sha256(b"weights").hexdigest()
    assert fingerprint(ptpipe_zoo.TorchvisionConfig(name="resnet18")) is None


def test_the_preflight_reports_every_reason(tmp_path, monkeypatch):
    def reasons(**options: str) -> list[str]:
        return list(ptpipe_zoo.torchvision.preflight(ptpipe_zoo.TorchvisionConfig(**options)))

    monkeypatch.setattr("ptpipe_zoo.published.fetch", lambda url: None)
    assert reasons(name="resnet18", weights="DEFAULT") == []
    assert reasons(name="resnet18", weights="IMAGENET") == [
        "resnet18 has no published weights 'IMAGENET'; available: IMAGENET1K_V1, DEFAULT"
    ]
    missing = tmp_path / "w.pth"
    assert reasons(name="resnet18", weights_file=str(missing)) == [f"weights file {missing} does not exist"]
    for known in ("classifier_names", "segmenter_names"):
        monkeypatch.setattr(names, known, lambda: ())
    (line,) = reasons(name="resnet81")
    assert line == "the installed torchvision has no network 'resnet81' (did you mean 'resnet18'?)"
