"""Every option of a training gives on a CUDA device what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import FunctionRef, Model, builder

from .conftest import NUM_CLASSES, SIDE, Lab, Trained, assert_same_bits, max_difference
from .device_nets import NETWORKS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BACKENDS = ["fbgemm", "qnnpack"]
EXACT = {"epochs": 2, "lr": 0.05, "precision": "fp32", "memory_format": "contiguous"}


@builder
def attending_net() -> nn.Module:
    """Rows of a picture, put in relation by attention and by an LSTM."""
    return AttendingNet()


class AttendingNet(nn.Module):
    """An encoder layer, an LSTM, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(SIDE, 2, 16, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(SIDE, 12, batch_first=True)
        self.head = nn.Linear(12, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows, _ = self.lstm(self.encoder(images.squeeze(1)))
        logits: torch.Tensor = self.head(rows.mean(1))
        return logits


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def on_both(lab: Lab, model: Model, teacher: Model | None = None, **options: Any) -> tuple[Trained, Trained]:
    """Train with the options on the device and on the CPU."""
    data = lab.make_data(100, num_val=20)
    cuda, cpu = (lab.train_afresh(model, data, teacher, device=device, **EXACT | options) for device in ("cuda", "cpu"))
    assert cuda.metrics["device"] == "cuda"
    assert all(tensor.device.type == "cpu" for tensor in cuda.model.tensors.values())
    return cuda, cpu


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "adamw", "lr": 0.001, "weight_decay": 0.1},
        {"nesterov": True, "clip_grad_norm": 0.5},
        {"accumulate": 3},
        {"ema": {"decay": 0.9}},
        {"mixup_alpha": 0.4, "cutmix_alpha": 0.4, "label_smoothing": 0.1},
        {"pruning": {"amount": 0.5, "begin": 0, "end": 5, "every": 1}},
        {"gradient_checkpointing": ["Linear"]},
        {"freeze": ["0.*"], "lr_factors": {"6.*": 0.5}},
        {"memory_format": "channels_last"},
        {"memory_format": "auto"},
        {"profile": {"steps": 2}},
        {"compile": True},
    ],
    ids=str,
)
def test_an_option_gives_what_it_gives_on_the_cpu(lab: Lab, options: dict[str, Any]) -> None:
    cuda, cpu = on_both(lab, lab.make_model(norm=True), **options)
    assert max_difference(cuda.model, cpu.model) < 1e-4
    assert cuda.metrics["val_loss"] == pytest.approx(cpu.metrics["val_loss"], rel=1e-4)


def test_a_teacher_gives_what_it_gives_on_the_cpu(lab: Lab) -> None:
    options = {"features": {"6": "6"}, "weight": 0.5}
    teacher = lab.train_afresh(lab.make_model(norm=True), lab.make_data(100), device="cpu", **EXACT).model
    cuda, cpu = on_both(lab, lab.make_model(norm=True), teacher, distillation=options, lr=0.01)
    assert max_difference(cuda.model, cpu.model) < 1e-4


def test_attention_and_an_lstm_train_as_on_the_cpu(lab: Lab) -> None:
    cuda, cpu = on_both(lab, lab.make_model(FunctionRef.to(attending_net)))
    assert max_difference(cuda.model, cpu.model) < 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("build", NETWORKS)
def test_a_network_trains_as_on_the_cpu(lab: Lab, build: Any, optimizer: str) -> None:
    cuda, cpu = on_both(lab, lab.make_model(FunctionRef.to(build)), optimizer=optimizer, lr=0.002)
    assert max_difference(cuda.model, cpu.model) < 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", NETWORKS)
def test_a_network_s_quantization_aware_training_converts(lab: Lab, build: Any, precision: str) -> None:
    model = lab.make_model(FunctionRef.to(build))
    prepared = prepare_qat(PrepareQatConfig(), lab.context(), model)
    cuda, cpu = on_both(lab, prepared, precision=precision, lr=0.002)
    assert max_difference(cuda.model, cpu.model) < (0.1 if precision == "bf16" else 0.02)
    assert convert(ConvertConfig(), lab.context(), cuda.model).tensors.keys()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_norm": "fold"}, {"freeze_at": 0.5}, {"learned_step_size": True}, {"weights": "per_tensor"}],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_quantization_aware_training_converts_to_what_the_cpu_s_does(
    lab: Lab, options: dict[str, Any], backend: str, precision: str
) -> None:
    data = lab.make_data(100, num_val=20)
    trained = lab.train_afresh(lab.make_model(norm=True), data, device="cpu", **EXACT | {"epochs": 3}).model
    prepared = prepare_qat(PrepareQatConfig.model_validate({"backend": backend, **options}), lab.context(), trained)
    cuda, cpu = on_both(lab, prepared, precision=precision, lr=0.005)
    # Values on the edge of a step fall either way, and gradients follow. What a learned range is multiplied by is a sum
    # of rounding errors, which has no digit in common; the ranges themselves do.
    compared = {name: tensor for name, tensor in cuda.model.tensors.items() if not name.endswith("log_part")}
    tolerance = 0.1 if precision == "bf16" or "learned_step_size" in options else 0.02
    assert max_difference(Model(cuda.model.recipe, compared), cpu.model) < tolerance
    assert convert(ConvertConfig(), lab.context(), cuda.model).tensors.keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "auto"])
def test_the_same_training_gives_the_same_bits(lab: Lab, precision: str) -> None:
    data, model = lab.make_data(100, num_val=20), lab.make_model(norm=True, dropout=0.3)
    options = {**EXACT, "precision": precision, "device": "cuda", "memory_format": "auto"}
    one = lab.train_afresh(model, data, **options)
    if precision == "auto":  # what it measures may differ from run to run
        options["precision"] = one.metrics["precision"]
    assert_same_bits(one.model, lab.train_afresh(model, data, **options).model)


def test_a_full_device_names_the_options_to_change(lab: Lab) -> None:
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with pytest.raises(StageError, match="the device's memory is full: use a smaller batch_size"):
            lab.train(lab.make_model(), lab.make_data(4096, batch_size=4096), device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
