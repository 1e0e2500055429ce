"""export.executorch: the program, its comparison with the torch model, its errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import Context, IntegrityError, StageError, run
from ptpipe.events import LogLine
from ptpipe_executorch import ExecuTorchConfig, ExecuTorchModel, export_executorch
from ptpipe_torch import Data, FunctionRef, Model, Recipe
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.model.function_ref import builder

from ...signatures import classifier
from ..ptpipe_onnx.conftest import SHAPE_CHW, RecordedEvents, to_int8, with_observers

pytest.importorskip("executorch", reason="ExecuTorch is not installed: pip install 'ptpipe[executorch]'")

ALL_INT8 = {"cnn": "2 of 2 convolutions, 2 of 2 linear layers", "residual": "3 of 3 convolutions, 1 of 1 linear layers"}
MANIFEST = """
version: 1
name: mobile
seed: 7
stages:
  data:       {uses: data.synthetic}
  net:        {uses: model.small_cnn}
  pretrain:   {uses: train.supervised, with: {epochs: 1, lr: 0.05}}
  observed:   {uses: quant.prepare, needs: {model: pretrain}, with: {backend: qnnpack}}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  static:     {uses: quant.convert, needs: {model: calibrated}}
  mobile:     {uses: export.executorch, needs: {model: static}}
  examined:   {uses: eval.predict, needs: {model: mobile}}
  compare:
    uses: eval.compare
    needs: {models: [pretrain, static, mobile]}
    with: {baseline: pretrain, batch_sizes: [1], threads: [one], budget_s: 1}
  accuracy:   {uses: gate.accuracy, needs: {comparison: compare}, with: {candidate: mobile, max_drop: 0.05}}
"""


@builder
def wide() -> nn.Module:
    convolutions = [nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 36, 10))


@pytest.fixture
def run_export(digits: Data, tmp_path: Path, events: RecordedEvents) -> Callable[..., ExecuTorchModel]:
    def run(model: Model, data: Data = digits, **options: Any) -> ExecuTorchModel:
        ctx = Context("mobile", "export.executorch", 7, tmp_path, _tell=events.append)
        return export_executorch(ExecuTorchConfig.model_validate(options), ctx, model, data)

    return run


def logits(model: Any, data: Data, batch_size: int = 300) -> np.ndarray:
    with model.predictor(1) as predict:
        found = [predict(batch.input_arrays())["logits"] for batch in data.batches("test", batch_size=batch_size)]
    return np.concatenate(found)


def lines(events: RecordedEvents) -> list[str]:
    return [event.text for event in events if isinstance(event, LogLine)]


def test_a_float_network_computes_as_in_torch(float_model, run_export, digits, events) -> None:
    model = float_model("residual")
    file = run_export(model)
    assert (file.format, file.signature) == ("executorch float32", model.signature)
    assert np.allclose(logits(file, digits, batch_size=7), logits(model, digits), atol=1e-4)
    metrics = events.metrics
    assert metrics["delegation"] == ALL_INT8["residual"] and metrics["num_delegates"] == 1
    assert metrics["num_samples"] == 300 and metrics["top1_agreement"] == 1
    assert metrics["size_bytes"] == file.size_bytes


@pytest.mark.parametrize(
    ("name", "backend", "qat"),
    [("cnn", "fbgemm", False), ("residual", "qnnpack", False), ("cnn", "qnnpack", True), ("residual", "fbgemm", True)],
)
def test_an_int8_network_computes_in_integers(name, backend, qat, int8_model, run_export, digits, events) -> None:
    model = int8_model(name, backend, qat=qat)
    file = run_export(model)
    assert file.format == "executorch int8"
    assert events.metrics["integer_coverage"] == events.metrics["delegation"] == ALL_INT8[name]
    assert (events.metrics["num_delegates"], events.metrics["num_portable_operators"]) == (1, 0)
    assert "XNNPACK computes in float: nothing" in lines(events)
    difference_steps = events.metrics["max_logit_difference_steps"]
    assert isinstance(difference_steps, float) and difference_steps <= 2.01
    expected_NK, found_NK = logits(model, digits), logits(file, digits)
    assert np.mean(expected_NK.argmax(1) == found_NK.argmax(1)) >= 0.99


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_int8_weights_are_stored_as_int8(backend, run_export, digits) -> None:
    torch.manual_seed(0)
    signature = classifier(SHAPE_CHW, 10)
    float_model = Model.from_module(Recipe(FunctionRef.to(wide), signature), wide())
    prepare = FunctionRef.to(with_observers, backend=backend, qat=False, narrow=False, skip="none")
    with quantized_engine(backend), torch.no_grad():
        prepared = prepare.resolve("transform")(float_model.build(), **prepare.arguments)
        for batch in digits.batches("calibration"):
            prepared(batch.inputs["images"])
    recipe = Recipe(FunctionRef.to(wide), signature, (prepare,), (FunctionRef.to(to_int8),), backend)
    sizes = [run_export(model).size_bytes for model in (float_model, Model.from_module(recipe, prepared))]
    num_weights = 64 * 9 + 64 * 64 * 9 + 64 * 36 * 10
    assert sizes[0] > 4 * num_weights and sizes[1] < 1.1 * num_weights + 8192
    assert sizes[1] < 0.3 * sizes[0]


def test_a_dynamic_network(dynamic_model, run_export, digits, events) -> None:
    file = run_export(dynamic_model("cnn", "fbgemm", per_channel=True))
    assert file.format == "executorch int8 dynamic"
    assert events.metrics["integer_coverage"] == "0 of 2 convolutions, 2 of 2 linear layers"
    assert events.metrics["top1_agreement"] >= 0.99


def test_batches_are_predicted_in_pieces(int8_model, run_export, digits, tmp_path) -> None:
    model = int8_model("cnn", "qnnpack")
    whole_NK = logits(run_export(model), digits)
    single = run_export(model, max_batch_size=1)
    assert single.max_batch_size == 1
    assert np.array_equal(logits(single, digits), whole_NK)


def test_what_xnnpack_does_not_take_is_named(float_model, run_export, events) -> None:
    run_export(float_model("rows"))
    assert events.metrics["num_portable_operators"] == events.metrics["num_delegates"] == 1
    assert any(re.search(r"\(squeeze_copy\) is not given to XNNPACK: \w+", line) for line in lines(events))


def test_save_and_load(int8_model, run_export, digits, tmp_path) -> None:
    model = run_export(int8_model("cnn", "fbgemm"), num_samples=10)
    folder = tmp_path / "stored"
    folder.mkdir()
    model.save(folder)
    loaded = ExecuTorchModel.load(folder)
    assert (loaded.format, loaded.signature, loaded.size_bytes) == (model.format, model.signature, model.size_bytes)
    assert (loaded.outputs, loaded.max_batch_size) == (model.outputs, model.max_batch_size)
    assert np.array_equal(logits(loaded, digits), logits(model, digits))
    assert ExecuTorchModel.deliverables(folder) == ("model.pte",)
    (folder / "info.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"info\.json can't be read"):
        ExecuTorchModel.load(folder)


def test_another_function_is_refused(int8_model, run_export, monkeypatch) -> None:
    """XNNPACK gets other weights than those of the model that the program is compared with."""
    from ptpipe_executorch import export

    def damaged(network: nn.Module, *arguments: Any) -> Any:
        weight = max((own for name, own in network.named_buffers() if "integers" in name), key=torch.numel)
        weight.neg_()
        return lower(network, *arguments)

    lower = export.lower
    monkeypatch.setattr(export, "lower", damaged)
    with pytest.raises(StageError, match=r"^ExecuTorch program and torch model disagree: logits differ by \(rms\)"):
        run_export(int8_model("cnn", "qnnpack"))


def test_a_damaged_program_is_an_error_of_one_line(float_model, run_export, digits) -> None:
    model = run_export(float_model("cnn"), num_samples=10)
    model.path.write_bytes(model.path.read_bytes()[:1000])
    with pytest.raises(StageError, match=r"^ExecuTorch can't run model\.pte: [^\n]+$"):
        logits(model, digits)


def test_a_split_without_samples_is_refused(float_model, run_export, digits) -> None:
    empty = Data(digits.info, {**digits.splits, "val": digits.splits["test"].subset(np.arange(0))})
    with pytest.raises(StageError, match=r"no samples in val .*: choose another `split`"):
        run_export(float_model("cnn"), empty, split="val")


@pytest.mark.slow
def test_a_manifest_from_training_to_the_gate(tmp_path) -> None:
    manifest = tmp_path / "mobile.yaml"
    manifest.write_text(MANIFEST, encoding="utf-8")
    result = run(manifest, artifacts=tmp_path / "artifacts")
    assert {stage: str(event.outcome) for stage, event in result.stages.items()} == dict.fromkeys(result.stages, "done")
