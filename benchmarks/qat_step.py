"""What a step of quantization-aware training costs, beside a float step of the same network and memory layout.

A step is zero_grad, forward under autocast where said, cross-entropy, backward, SGD; the batch stands ready in
memory. Network: model.small_cnn at 28x28, channels last. Rows: the float network; ours with batch norm folded (the
default of quant.prepare_qat), watching ranges and with ranges frozen; ours with batch norm trained; and torch's own
`prepare_qat_fx`, as it comes (under bf16 it does not run). All are run in turn, in changing order, in one process;
the figure is the ratio of medians to the float row of the same precision.

    python benchmarks/qat_step.py [--rounds 60] [--batch 128] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ptpipe_quant.transforms import prepare_qat
from ptpipe_torch import TrainingCallback
from ptpipe_torch.runtime import freed_memory_kept, torch_threads
from ptpipe_zoo.nets import small_cnn

TARGET = 1.5
FLOAT, STOCK = "float", "torch's own prepare_qat_fx"
Step = Callable[[], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return small_cnn(shape_CHW=(1, 28, 28), num_classes=10, width=32)


def ours(batch_norm: str) -> nn.Module:
    return prepare_qat(
        network().eval(), backend="fbgemm", weights="per_channel", reduce_range=False, skip=(), batch_norm=batch_norm,
        freeze_at=0.75,
    )  # fmt: skip


def torchs_own() -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    with warnings.catch_warnings(action="ignore"):
        mapping = get_default_qat_qconfig_mapping("fbgemm")
        return prepare_qat_fx(network().train(), mapping, (torch.zeros(1, 1, 28, 28),))


def make_step(module: nn.Module, batch_size: int, *, bf16: bool, fraction: float = 0.0) -> Step:
    module = module.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.005, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    images_NCHW = torch.randn(batch_size, 1, 28, 28, generator=generator).contiguous(memory_format=torch.channels_last)
    labels_N = torch.randint(0, 10, (batch_size,), generator=generator)
    listeners: list[Any] = [layer for layer in module.modules() if isinstance(layer, TrainingCallback)]

    def step(share: float = fraction) -> None:
        for listener in listeners:
            listener.on_progress(share)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_NK = module(images_NCHW)
        cross_entropy(logits_NK.float(), labels_N).backward()
        optimizer.step()

    step(0.0)  # a range must be seen before it can be frozen
    return step


def race(steps: dict[str, Step], num_rounds: int) -> dict[str, float]:
    """Median seconds of each, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in range(num_rounds + 3):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            steps[name]()
            if round_ >= 3:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def make_steps(batch_size: int, *, bf16: bool) -> tuple[dict[str, Step], dict[str, str]]:
    """The rows, and why a row is missing."""
    steps = {
        FLOAT: make_step(network(), batch_size, bf16=bf16),
        "ours, batch norm folded": make_step(ours("fold"), batch_size, bf16=bf16),
        "ours, folded, ranges frozen": make_step(ours("fold"), batch_size, bf16=bf16, fraction=0.9),
        "ours, batch norm trained": make_step(ours("train"), batch_size, bf16=bf16),
    }
    try:
        return steps | {STOCK: make_step(torchs_own(), batch_size, bf16=bf16)}, {}
    except RuntimeError as error:  # torch 2.13's fused fake quantization takes float32 alone
        return steps, {STOCK: f"does not run: {str(error).splitlines()[0]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("--rounds", 60), ("--batch", 128), ("--threads", 2)):
        parser.add_argument(option, type=int, default=default)
    arguments = parser.parse_args()
    with torch_threads(arguments.threads), freed_memory_kept():
        for bf16 in (False, True):
            steps, missing = make_steps(arguments.batch, bf16=bf16)
            medians = race(steps, arguments.rounds)
            print(
                f"\n{'bf16 autocast' if bf16 else 'float32':32} ms/step  images/s  of float (target: at most {TARGET})"
            )
            for name, median in medians.items():
                print(f"{name:32} {1e3 * median:7.1f} {arguments.batch / median:9.0f}  {median / medians[FLOAT]:.2f}")
            for name, reason in missing.items():
                print(f"{name:32} {reason}")


if __name__ == "__main__":
    main()
