from __future__ import annotations

import hashlib
import re
import subprocess
import sys

import pytest

import ptpipe_zoo
from ptpipe import Stage
from ptpipe.plan.bind import config_problems
from ptpipe_zoo import names


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
    kinds = ["mlp", "onnx", "python", "small_cnn", "small_unet", "text_lstm", "text_transformer", "torchvision"]
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


@pytest.mark.parametrize(("name", "suggestion"), [("resnet81", "resnet18"), ("ViT_b_16", "vit_b_16"), ("zzz", None)])
def test_an_unknown_network_gets_the_nearest_name(name, suggestion):
    ((message, nearest),) = problems(ptpipe_zoo.torchvision, name=name)
    assert "must name one of torchvision's classification networks" in message
    assert nearest == suggestion


def test_the_names_read_from_the_source_are_those_that_torchvision_registers():
    from ptpipe_zoo import torchvision_models

    assert list(names.classifier_names()) == torchvision_models.list_classifiers()
    assert "fcn_resnet50" not in names.classifier_names()


def test_reads_the_names_of_every_form_of_registration(tmp_path):
    (tmp_path / "nets.py").write_text(
        '@register_model()\n@handle(weights=("a", None))\ndef one(*, weights=None):\n    ...\n'
        '@register_model(name="two")\ndef build_two():\n    ...\n@register_model("three")\ndef build_three(): ...\n'
        "def helper(): ...\n"
    )
    assert names._names_in(tmp_path) == {"one", "two", "three"}


def test_without_torchvision_any_name_may_be_planned(monkeypatch):
    monkeypatch.setattr(names, "classifier_names", lambda: ())
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
    monkeypatch.setattr(names, "classifier_names", lambda: ())
    (line,) = reasons(name="resnet81")
    assert line == "the installed torchvision has no classifier 'resnet81' (did you mean 'resnet18'?)"
