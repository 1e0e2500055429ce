"""What an unknown kind or option may have meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from ptpipe import Context, StageConfig, stage
from ptpipe.plan.hints import beside_manifest_hint, kind_hint, option_hint, same_name_hint

from ..toy import Number


class TrainConfig(StageConfig):
    lr: float = Field(0.1, description="peak learning rate; null: 0.05")
    schedule: str = Field("auto", description="learning-rate schedule")
    name: str = Field("", description="a network, such as resnet18")


def make(kind: str, help_: str = "Do it.", config_type: type[StageConfig] = StageConfig) -> Any:
    def function(config: Any, ctx: Any) -> Any: ...

    function.__annotations__ = {"config": config_type, "ctx": Context, "return": Number}
    function.__doc__ = help_
    return stage(kind)(function)


KINDS = [
    ("data.mnist", "MNIST: handwritten digits.\n\nNo CSV."),
    ("data.table", "A table in a CSV or Parquet file."),
    ("data.text", "Texts in a CSV file."),
    ("quant.prepare", "Insert observers."),
    ("quant.prepare_qat", "Insert fake quantization."),
    ("export.onnx", "Export."),
    ("model.small_unet", "Build a U-Net."),
    ("model.text_lstm", "Build an LSTM."),
    ("model.transformers", "Build a network of Hugging Face's library."),
]
STAGES = {kind: make(kind, help_) for kind, help_ in KINDS}
STAGES["model.torchvision"] = make("model.torchvision", "Build one of torchvision's.", TrainConfig)
OF_MODELS = "; `ptpipe stages model` lists this family"


@pytest.mark.parametrize(
    ("kind", "suggestion", "more"),
    [
        ("quant.qat", "quant.prepare_qat", ""),
        ("model.lstm", "model.text_lstm", ""),
        ("onnx.export", "export.onnx", ""),
        ("data.csv", None, "; see data.table, data.text"),
        ("data.parquet", "data.table", ""),
        ("model.huggingface", "model.transformers", ""),
        ("model.hugging_face", "model.transformers", ""),
        ("model.resnet18", "model.torchvision", ""),
        ("quant.prepar", "quant.prepare", ""),
        ("modle.text_lstm", "model.text_lstm", ""),
        ("model.vit", None, OF_MODELS),
        ("model.a", None, OF_MODELS),
        ("model.", None, OF_MODELS),
        ("zebra.stripe", None, ""),
    ],
)
def test_kinds(kind: str, suggestion: str | None, more: str) -> None:
    assert kind_hint(kind, STAGES) == (suggestion, more)


@pytest.mark.parametrize(
    ("option", "suggestion"),
    [("learning_rate", "lr"), ("learningRate", "lr"), ("shedule", "schedule"), ("rates", None), ("network", "name")],
)
def test_options(option: str, suggestion: str | None) -> None:
    assert option_hint(option, TrainConfig) == suggestion


def test_a_class_of_the_same_name_is_explained():
    other = type("Number", (), {})
    assert same_name_hint(Number, [str, Number]) == same_name_hint(Number, []) == ""
    places = f"module {__name__} and of module {Number.__module__}"
    expected = f"; there are two classes Number, of {places}: define it in one module that both import"
    assert same_name_hint(Number, [str, other]) == expected


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("data/t.csv", "{wanted} does not exist"),
        ("../data/t.csv", "{wanted} and /x/t.csv do not exist"),
        ("data/t.csv", "there is no file {wanted}"),
        ("data/t.csv", "weights file data/t.csv does not exist"),
        ("data/t.csv", "can't read data/t.csv"),
        (["here.csv", "data/t.csv"], "{wanted} does not exist"),
    ],
)
def test_a_missing_file_that_lies_beside_the_manifest(tmp_path: Path, monkeypatch, path, says: str) -> None:
    for folder in ("manifests/data", "data", "project/here"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "t.csv").touch()
    monkeypatch.chdir(tmp_path / "project" / "here")
    file, folder = path[-1] if isinstance(path, list) else path, "../../manifests"
    message = says.format(wanted=Path(file).absolute())
    hint = f"; it lies beside the manifest: run ptpipe in {folder}, or name it {folder}/{file}"
    assert beside_manifest_hint(Path(folder, "m.yaml"), {"rows": 3, "path": path}, message) == hint


def test_other_messages_name_nothing_beside_the_manifest(tmp_path: Path, monkeypatch) -> None:
    for place in (tmp_path, tmp_path / "project"):
        place.mkdir(exist_ok=True)
        (place / "t.csv").touch()
    (tmp_path / "t").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    for options, message in (
        ({"path": "t.csv"}, f"{tmp_path}/project/t.csv has no rows"),
        ({"path": "t.csv", "text": "t"}, f"{tmp_path}/project/t.csv does not exist"),
        ({"path": "t.csv"}, "not.csv does not exist"),
        ({"split": "t"}, "split t has no samples"),
        ({"path": "u.csv"}, f"{tmp_path}/project/u.csv does not exist"),
        ({"path": "x" * 5000}, f"{tmp_path}/project/{'x' * 5000} does not exist"),
        ({"path": "a\0b"}, f"{tmp_path}/project/a\0b does not exist"),
    ):
        assert not beside_manifest_hint(tmp_path / "m.yaml", options, message), message
