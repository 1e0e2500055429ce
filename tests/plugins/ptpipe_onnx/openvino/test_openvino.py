"""export.openvino: the model, its comparison with the ONNX file, its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from ptpipe import Context, IntegrityError, StageError
from ptpipe.events import LogLine
from ptpipe_onnx import ExportConfig, OpenVinoConfig, OpenVinoModel, export_onnx, export_openvino
from ptpipe_onnx.openvino import export
from ptpipe_onnx.quantization.agreement import join_rows
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, prepare
from ptpipe_quant import convert as quantize
from ptpipe_torch import (
    Data,
    DatasetInfo,
    FunctionRef,
    Model,
    OnnxFile,
    Recipe,
    Resizing,
    TokensInfo,
    builder,
)
from ptpipe_torch.runtime import seeded

from ....texts import TAGS
from ..conftest import NARROW, Exported, RecordedEvents
from ..test_resizing import with_resizing

pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def files(
    exported: Callable[..., Exported],
    dynamic_model: Callable[..., Model],
    digits: Data,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, OnnxFile]:
    """The `cnn` of digits, in all precisions."""
    ctx = Context("onnx", "export.onnx", 7, tmp_path_factory.mktemp("onnx"))
    return {
        "float32": exported("cnn").file,
        "int8": exported("cnn", "fbgemm").file,
        "int8 dynamic": export_onnx(ExportConfig(), ctx, dynamic_model("cnn", "fbgemm", per_channel=True), digits),
    }


@pytest.fixture
def convert(digits: Data, tmp_path: Path, events: RecordedEvents) -> Callable[..., OpenVinoModel]:
    def run(file: OnnxFile, data: Data = digits, **options: Any) -> OpenVinoModel:
        ctx = Context("vino", "export.openvino", 7, tmp_path, _tell=events.append)
        return export_openvino(OpenVinoConfig.model_validate(options), ctx, file, data)

    return run


def logits(model: Any, data: Data, batch_size: int = 300) -> np.ndarray:
    with model.predictor(1) as predict:
        found = [predict(batch.input_arrays())["logits"] for batch in data.batches("test", batch_size=batch_size)]
    return np.concatenate(found)


@pytest.mark.parametrize("precision", ["float32", "int8", "int8 dynamic"])
def test_it_computes_what_the_file_does(precision, files, convert, digits, events) -> None:
    file = files[precision]
    model = convert(file)
    assert model.format == f"openvino {precision}" and model.signature == file.signature
    expected_NK, found_NK = logits(file, digits), logits(model, digits, batch_size=7)
    assert np.mean(expected_NK.argmax(1) == found_NK.argmax(1)) >= 0.99
    assert np.abs(found_NK - expected_NK).max() <= (1e-4 if precision == "float32" else 0.1) * np.ptp(expected_NK)
    metrics = events.metrics
    assert metrics["num_samples"] == 300 and metrics["top1_agreement"] >= 0.99
    assert metrics["size_bytes"] == model.size_bytes


def test_an_int8_file_computes_in_integers(files, convert, events) -> None:
    model = convert(files["int8"], num_samples=10)
    counts = model.operators()
    assert counts["Convolution", True] == 2 and counts["FullyConnected", True] == 2
    assert not counts["Convolution", False] and not counts["FullyConnected", False]
    (line,) = [event.text for event in events if isinstance(event, LogLine) and "in int8" in event.text]
    assert "2 Convolution" in line and "2 FullyConnected" in line
    assert (model.folder / "model.bin").stat().st_size < 0.5 * convert(files["float32"]).size_bytes


def test_linear_layers_on_sequences_are_products_again(exported, convert, digits, tmp_path) -> None:
    """The file has them as convolutions, for ONNX Runtime."""
    file = exported("attention", "fbgemm").file
    assert [node.op_type for node in onnx.load(file.path).graph.node].count("Conv") == 3
    model = convert(file)
    counts = model.operators()
    assert counts["FullyConnected", True] == 4
    assert not counts["Convolution", True] + counts["Convolution", False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.bin", "model.xml"]


def test_depthwise_convolutions_have_their_own_channels_again(exported, convert, digits, tmp_path) -> None:
    file = exported("depthwise", "fbgemm").file
    assert [node.op_type for node in onnx.load(file.path).graph.node].count("Pad") == 2, "the stem's, and its own"
    model = convert(file)
    assert (tmp_path / "model.xml").read_text().count('type="Pad"') == 1
    assert model.operators()["Convolution", True] == 2


class Recurrent(nn.Module):
    """Two recurrent layers, which are float in static int8 networks, over the rows of an image."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(12, 40, num_layers=2, batch_first=True, **options)
        self.stem, self.head = nn.Linear(16, 12), nn.Linear(16 * options.get("proj_size", 40), 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        states_NLH, _ = self.recurrent(torch.relu(self.stem(images_NCHW.squeeze(1))))
        return self.head(states_NLH.flatten(1))


@builder
def recurrent(kind: str, options: dict[str, Any]) -> nn.Module:
    return Recurrent(kind, options)


def recurrent_file(kind: str, options: dict[str, Any], digits: Data, folder: Path) -> OnnxFile:
    """A static int8 file whose recurrent layers are float, with weights that are stored as int8."""
    ctx = Context("int8", "quant", 7, folder)
    reference = FunctionRef.to(recurrent, kind=kind, options=options)
    with seeded(0):
        model = Model.from_module(Recipe(reference, digits.info.signature), recurrent(**reference.arguments))
    prepared = prepare(PrepareConfig.model_validate({"reduce_range": NARROW}), ctx, model)
    int8 = quantize(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    return export_onnx(ExportConfig(), ctx, int8, digits)


@pytest.mark.parametrize(("kind", "options"), [("LSTM", {}), ("GRU", {}), ("RNN", {}), ("LSTM", {"proj_size": 8})])
def test_recurrent_layers_of_int8_files(kind, options, convert, digits, tmp_path) -> None:
    """OpenVINO takes no weights of recurrent layers that are stored as int8."""
    file = recurrent_file(kind, options, digits, tmp_path)
    model = convert(file)
    assert model.format == "openvino int8"
    assert not (tmp_path / "source.onnx").exists()


def test_what_openvino_cannot_read_is_an_error_of_one_line(files, convert, tmp_path) -> None:
    path = tmp_path / "unknown.onnx"
    content = onnx.load(files["float32"].path)
    next(node for node in content.graph.node if node.op_type == "Relu").domain = "com.example"
    onnx.save(content, path)
    with pytest.raises(StageError, match=r"^OpenVINO can't convert unknown\.onnx: .*com\.example.*$"):
        convert(OnnxFile(path, files["float32"].signature, "float32"))


def test_save_and_load(files, convert, digits, tmp_path) -> None:
    model = convert(files["int8"], num_samples=10)
    folder = tmp_path / "stored"
    folder.mkdir()
    model.save(folder)
    loaded = OpenVinoModel.load(folder)
    assert (loaded.format, loaded.signature, loaded.size_bytes) == (model.format, model.signature, model.size_bytes)
    assert np.array_equal(logits(loaded, digits), logits(model, digits))
    assert OpenVinoModel.deliverables(folder) == ("model.xml", "model.bin")
    (folder / "info.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"info\.json can't be read"):
        OpenVinoModel.load(folder)


@pytest.mark.parametrize(("precision", "measure"), [("float32", "maximum"), ("int8", "rms")])
def test_another_function_is_refused(precision, measure, files, convert, tmp_path, monkeypatch) -> None:
    """OpenVINO gets a file with other weights than the one that it is compared with."""
    damaged = tmp_path / "damaged.onnx"
    content = onnx.load(files[precision].path)
    weights = max(content.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weights.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weights), weights.name))
    onnx.save(content, damaged)
    runtime = export.import_openvino()

    class Core(runtime.Core):
        def read_model(self, path: str) -> Any:
            return super().read_model(str(damaged))

    monkeypatch.setattr(runtime, "Core", Core)
    expected = rf"logits differs from ONNX Runtime's by [\d.]+ \({measure} over 300 rows\), where [\d.e-]+ is allowed"
    with pytest.raises(StageError, match=expected):
        convert(files[precision])


def test_an_int8_file_of_unknown_error_is_recorded_alone(files, convert, events) -> None:
    convert(OnnxFile(files["int8"].path, files["int8"].signature, "int8"), num_samples=20)
    assert events.metrics["top1_agreement"] >= 0.9
    assert any(isinstance(event, LogLine) and "recorded, not judged" in event.text for event in events)


@pytest.mark.parametrize("is_padding_other", [False, True])
def test_tolerances_hold_for_padding_too(is_padding_other, tmp_path) -> None:
    """As the error of quantization that `export.onnx` recorded is of all rows: here of one token and three others."""
    info = DatasetInfo("texts", {"tokens": TokensInfo(vocabulary_size=9, max_length=4)}, TAGS)
    expected = np.random.default_rng(0).normal(size=(8, 4, 5)).astype(np.float32)
    found, tokens = expected.copy(), np.tile([5, 0, 0, 0], (8, 1))
    found[:, slice(1, None) if is_padding_other else slice(1)] += 1
    pair = join_rows(info, ["logits"], [({"tokens": tokens}, {"logits": expected}, {"logits": found})])["logits"]
    file = OnnxFile(tmp_path / "int8.onnx", info.signature, "int8")
    check = partial(export._check, Context("vino", "export.openvino", 7, tmp_path), file, "logits", pair)
    check(0.7 if is_padding_other else 0.5)
    with pytest.raises(StageError, match=r"\(rms over 32 rows\)"):
        check(0.5 if is_padding_other else 0.3)


def test_operators_that_openvino_lacks_are_named(files, convert, tmp_path) -> None:
    content = onnx.load(files["float32"].path)
    content.opset_import.append(onnx.helper.make_opsetid("acme", 1))
    content.graph.node[0].domain, content.graph.node[0].op_type = "acme", "Strange"
    path = tmp_path / "strange.onnx"
    onnx.save(content, path)
    file = OnnxFile(path, files["float32"].signature)
    with pytest.raises(StageError, match=r"OpenVINO can't convert strange\.onnx: .*acme\.Strange$"):
        convert(file)


def test_a_damaged_model_is_an_error_of_one_line(files, convert, digits, tmp_path) -> None:
    model = convert(files["float32"], num_samples=10)
    graph = model.folder / "model.xml"
    graph.write_bytes(graph.read_bytes()[:1000])
    with pytest.raises(StageError, match=r"^OpenVINO can't run the model: [^\n]+$"):
        logits(model, digits)


def test_a_file_that_takes_bytes(int8_model, digits, convert, tmp_path, events) -> None:
    ctx = Context("onnx", "export.onnx", 7, tmp_path)
    file = export_onnx(ExportConfig(preprocessing="nhwc", postprocessing=True), ctx, int8_model("cnn"), digits)
    model = convert(file)
    assert model.input_form == "nhwc" and events.metrics["top1_agreement"] >= 0.99
    with model.predictor(1) as predict:
        (batch,) = digits.batches("test", batch_size=300, input_form="nhwc")
        assert batch.input_arrays()["images"].dtype == np.uint8
        assert predict(batch.input_arrays()).keys() == {"logits"}


@pytest.mark.parametrize(("layout", "shorter_side"), [("nhwc", 19), ("nchw", None)])
def test_it_resizes_as_the_file_does(layout, shorter_side, float_model, digits, run_export, convert) -> None:
    """OpenVINO reads neither `antialias` nor float64 arithmetic of sizes as ONNX means them."""
    data = with_resizing(digits, Resizing(shorter_side=shorter_side))
    file = run_export(float_model("cnn"), data, preprocessing=layout, resize=True, num_samples=20)
    model = convert(file, data, num_samples=20)
    random = np.random.default_rng(0)
    with file.predictor(1) as expect, model.predictor(1) as predict:
        for height, width in ((16, 16), (70, 45), (30, 64), (9, 7)):
            images = random.integers(0, 256, (2, height, width, 1), dtype=np.uint8)
            given = {"images": images if layout == "nhwc" else images.transpose(0, 3, 1, 2)}
            expected_NK, found_NK = expect(given)["logits"], predict(given)["logits"]
            assert np.abs(found_NK - expected_NK).max() <= 0.02 * np.abs(expected_NK).max(), (height, width)


def test_another_resizing_is_refused(float_model, digits, run_export, convert, monkeypatch) -> None:
    data = with_resizing(digits, Resizing())
    file = run_export(float_model("cnn"), data, preprocessing="nhwc", resize=True, num_samples=20)
    monkeypatch.setattr(export, "use_pillows", lambda runtime, model: True)
    with pytest.raises(StageError, match=r"has to resize \(8x37x27x1\), logits differs .* `resize: false`"):
        convert(file, data, num_samples=20)


def test_a_file_of_one_batch_size_is_predicted_in_pieces(files, convert, digits, tmp_path) -> None:
    content = onnx.load(files["float32"].path)
    content.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    del content.graph.value_info[:]
    path = tmp_path / "fixed.onnx"
    onnx.save(content, path)
    file = OnnxFile(path, files["float32"].signature)
    model = convert(file, num_samples=10)
    assert np.allclose(logits(model, digits, batch_size=7), logits(file, digits), atol=1e-4)


def test_a_split_without_samples_is_refused(files, convert, digits) -> None:
    empty = Data(digits.info, {**digits.splits, "val": digits.splits["test"].subset(np.arange(0))})
    with pytest.raises(StageError, match=r"no samples in val: choose another `split`"):
        convert(files["float32"], empty, split="val")


def test_openvino_is_imported_without_its_telemetry(tmp_path: Path) -> None:
    code = (
        "import sys; from ptpipe_onnx.openvino.model import import_openvino; "
        "import_openvino().Core(); print('openvino_telemetry' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in {"CI", "GITHUB_ACTIONS"}}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.strip() == "False"
    assert list(tmp_path.iterdir()) == []
