"""Choice of the precision: a few training steps are timed in fp32 and in bf16.

Shape legend: N samples of a batch, K classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ptpipe import Context
from ptpipe_torch import Batch, Model, Task
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_torch.runtime import seeded
from ptpipe_train.cuda_graphs import PASSES_TO_CAPTURE, CudaGraphs, Passes
from ptpipe_train.device import DeviceSettings
from ptpipe_train.losses import backward, float_outputs
from ptpipe_train.measured_once import measure_once

if TYPE_CHECKING:
    from ptpipe_train.config import Precision, PrecisionOption

_CANDIDATES: tuple[Precision, Precision] = ("fp32", "bf16")
_FILE = "precision.json"
_ROUNDS, _ROUNDS_TO_WARN = 5, 2
"""Timed steps in each precision: to choose one, and to warn of a slow one."""
_NUM_WARMUPS = 1
"""Steps that include allocations and the selection of kernels."""
_BUDGET_S = 2.0
"""No further round is begun after so long."""
_NOTABLE_RATIO = 1.05
"""Smaller differences are within the error of so few steps."""
_MIN_BATCHES_TO_WARN = 200
"""In shorter trainings the warning would cost more than 3 % of the time."""


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision to train in, and what was measured for it."""

    precision: Precision
    step_ms: Mapping[Precision, float]
    """Milliseconds of a forward and backward pass in each precision; empty where nothing was measured."""


def choose_precision(
    option: PrecisionOption,
    device: torch.device,
    ctx: Context,
    workers: WorkerGroup,
    num_batches: int,
    measure: Callable[[int], list[float]],
) -> PrecisionChoice:
    """Resolve `auto` to the faster precision, and warn of a precision that is slow on this device.

    `num_batches`: length of the training. `measure(num_rounds)` returns the milliseconds of a step in fp32 and in bf16
    (`measure_step_ms`). It is called once, by rank 0; all ranks and a restart use its result. Every rank must call
    this.
    """
    on_cpu = device.type == "cpu"
    if option == "fp16" and on_cpu:
        # Measured on one that has fp16 instructions: small_cnn takes 150 times as long as in bf16.
        ctx.notice("precision fp16: torch's CPU kernels are very slow in fp16; bf16 is much faster")
    if option == "bf16" and not on_cpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        ctx.notice("precision bf16: this device has no bf16 instructions; fp32 may be faster")
    if option != "auto" and not (option == "bf16" and on_cpu and num_batches >= _MIN_BATCHES_TO_WARN):
        return PrecisionChoice(option, {})
    num_rounds = _ROUNDS if option == "auto" else _ROUNDS_TO_WARN
    values = measure_once(
        ctx.scratch / _FILE, workers, len(_CANDIDATES), lambda: measure(num_rounds), lambda kept: min(kept) > 0
    )
    step_ms = dict(zip(_CANDIDATES, values, strict=True))
    if option == "auto":
        return PrecisionChoice(min(_CANDIDATES, key=lambda precision: step_ms[precision]), step_ms)
    ratio = step_ms["bf16"] / step_ms["fp32"]
    if ratio > _NOTABLE_RATIO:
        ctx.notice(
            f"precision bf16: a step takes {ratio:.2f}x as long as in fp32 on this CPU ({step_ms['bf16']:.3g} ms, "
            f"{step_ms['fp32']:.3g} ms); fp32 is faster, and precision auto takes the faster one"
        )
    return PrecisionChoice("bf16", step_ms)


def measure_step_ms(
    model: Model, task: Task, batch: Batch, settings: DeviceSettings, num_rounds: int, *, cuda_graphs: bool = False
) -> list[float]:
    """Return the milliseconds of a forward and backward pass in fp32 and in bf16, each the minimum of `num_rounds`.

    Runs on a second build of the network and restores the random streams: weights, statistics and observers of the
    network that is trained don't change. The optimizer's step is left out, as it is the same in both precisions.
    `cuda_graphs`: the passes are to be captured as CUDA graphs, which hide what Python takes to submit kernels.
    """
    with seeded(0, settings.device):
        # Placed for bf16, whose preparation changes nothing in fp32.
        module = replace(settings, precision="bf16").place(model.build_prepared()).train()
        candidates: list[Passes] = [
            partial(_forward_backward, module, task, replace(settings, precision=precision))
            for precision in _CANDIDATES
        ]
        if cuda_graphs:
            with suppress(torch.OutOfMemoryError):  # two graphs hold the memory of all their activations
                return _time_captured(module, candidates, batch, num_rounds)
        return _time_in_turn(module, candidates, batch, _NUM_WARMUPS, num_rounds)


def _forward_backward(module: nn.Module, task: Task, settings: DeviceSettings, batch: Batch) -> torch.Tensor:
    with settings.autocast():
        returned = module(*batch.args)
    loss = task.losses(float_outputs(returned, task.outputs), batch.targets).mean()
    backward(loss)
    return loss.detach()


def _captured(module: nn.Module, passes: Passes) -> Passes:
    """Return passes that are captured as a training captures them."""
    graphs = CudaGraphs(module, lambda reason: None)
    return lambda batch: graphs.run(passes, batch, len(batch), last=True)


def _time_captured(module: nn.Module, candidates: Sequence[Passes], batch: Batch, num_rounds: int) -> list[float]:
    try:
        captured = [_captured(module, passes) for passes in candidates]
        return _time_in_turn(module, captured, batch, PASSES_TO_CAPTURE, num_rounds)
    finally:
        captured = []
        torch.cuda.empty_cache()  # a capture can't free the blocks that these graphs leave in the cache


def _time_in_turn(
    module: nn.Module, candidates: Sequence[Passes], batch: Batch, num_warmups: int, num_rounds: int
) -> list[float]:
    """Return the milliseconds of each of these passes, the minimum of `num_rounds`."""
    seconds: list[list[float]] = [[] for _ in candidates]
    begin_s = time.perf_counter()
    for round_ in range(-num_warmups, num_rounds):
        for times, passes in zip(seconds, candidates, strict=True):
            step_s = _time_passes(module, passes, batch)
            if round_ >= 0:
                times.append(step_s)
        if round_ >= 0 and time.perf_counter() - begin_s > _BUDGET_S:
            break
    return [1000 * min(times) for times in seconds]


def _time_passes(module: nn.Module, passes: Passes, batch: Batch) -> float:
    device = batch.args[0].device
    _synchronize(device)
    begin_s = time.perf_counter()
    passes(batch)
    _synchronize(device)
    step_s = time.perf_counter() - begin_s
    module.zero_grad()
    return step_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
