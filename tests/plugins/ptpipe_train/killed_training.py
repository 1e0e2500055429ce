"""Train in child processes, killing them (SIGKILL) at random moments until one comes to the end.

Usage: killed_training.py FOLDER. Writes there the tensors of that training and of one that was left alone, and the
newest checkpoint's step at each kill.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from ptpipe import Context
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    FunctionRef,
    ImageInfo,
    LoaderOptions,
    Model,
    Recipe,
    Split,
    builder,
)
from ptpipe_train import TrainConfig, train
from ptpipe_train.config import EarlyStopping, Pruning, Schedule

NUM_KILLS, STEPS_BETWEEN = 8, 10
CONFIG = TrainConfig(
    epochs=8,
    precision="bf16",
    accumulate=2,
    schedule=Schedule(name="one_cycle"),
    early_stopping=EarlyStopping(patience=8),
    pruning=Pruning(amount=0.8, every=3),
    checkpoint_every_s=0.01,
    num_threads=2,
)


@builder
def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def make_data() -> Data:
    rng = np.random.default_rng(0)
    pixels_NHWC = rng.integers(0, 256, (840, 8, 8, 1), dtype=np.uint8)
    labels_N = pixels_NHWC.reshape(840, -1).mean(1).astype(np.int64) % 10
    ids = np.array([str(number) for number in range(840)])
    every = Split(ids, {"images": ArrayColumn(pixels_NHWC)}, {"labels": ArrayColumn(labels_N)})
    splits = {"train": every.subset(np.arange(640)), "val": every.subset(np.arange(640, 840))}
    image = ImageInfo(shape_CHW=(1, 8, 8), mean=(0.5,), std=(0.3,))
    info = DatasetInfo("digits", {"images": image}, Classification(class_names=tuple("0123456789")))
    return Data(info, splits, LoaderOptions(batch_size=32))


def train_once(scratch: Path, output: Path) -> None:
    """In a child: it must not return."""
    torch.manual_seed(0)
    data = make_data()
    model = Model.from_module(Recipe(FunctionRef.to(network), data.info.signature), network())
    trained = train(CONFIG, Context("t", "train.supervised", 7, scratch), model, data)
    save_file({name: tensor.contiguous() for name, tensor in trained.tensors.items()}, output)


def in_child(scratch: Path, output: Path) -> int:
    """Start a training. This process has run no torch operator on several threads: forking it is safe."""
    scratch.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train_once(scratch, output)
            code = 0
        finally:
            os._exit(code)
    return child


def newest_step(scratch: Path) -> int:
    """Of the checkpoints that are whole."""
    return max((int(file.stem.removeprefix("step-")) for file in scratch.glob("checkpoints/step-*.json")), default=0)


def ended(child: int, *, wait: bool) -> bool:
    """Return whether the child has completed; an error in it ends this process."""
    pid, status = os.waitpid(child, 0 if wait else os.WNOHANG)
    if pid and status and not os.WIFSIGNALED(status):
        raise SystemExit("the training failed")
    return pid != 0 and status == 0


def train_and_kill(scratch: Path, output: Path, rng: random.Random) -> bool:
    """Kill a training at a random moment, some steps on from where it starts; whether it came to its end before."""
    target = newest_step(scratch) + rng.randrange(STEPS_BETWEEN)
    child = in_child(scratch, output)
    while newest_step(scratch) < target:
        if ended(child, wait=False):
            return True
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    return ended(child, wait=True)


def main(folder: Path) -> None:
    torch.optim.SGD([torch.zeros(1)])  # torch imports much for its first optimizer: once, for all children
    ended(in_child(folder / "undisturbed", folder / "undisturbed.safetensors"), wait=True)
    scratch, output, rng = folder / "killed", folder / "killed.safetensors", random.Random(3)
    moments: list[str] = []
    while len(moments) < NUM_KILLS and not train_and_kill(scratch, output, rng):
        moments.append(str(newest_step(scratch)))
    if not output.exists():
        ended(in_child(scratch, output), wait=True)
    (folder / "moments.txt").write_text("\n".join(moments), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
