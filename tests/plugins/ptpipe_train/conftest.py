"""A small network and small data, and a call that trains one on the other.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import JSON, Context
from ptpipe.events import Event, LogLine, Metric, Notice, Progress
from ptpipe_torch import ArrayColumn, Data, FunctionRef, LoaderOptions, Model, Recipe, Split, builder
from ptpipe_torch.runtime import torch_threads
from ptpipe_train import TrainConfig, train

from ...datasets import image_info, image_split
from ...signatures import classifier

SIDE, NUM_CLASSES = 8, 4


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


@builder
def small_net(*, norm: bool, dropout: float, num_classes: int = NUM_CLASSES) -> nn.Module:
    """One convolution (with batch norm), dropout, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=not norm),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * SIDE * SIDE // 4, 16),
        nn.ReLU(),
        nn.Linear(16, num_classes),
    )


def make_model(ref: FunctionRef | None = None, **arguments: JSON) -> Model:
    ref = ref or FunctionRef.to(small_net, **({"norm": False, "dropout": 0.0} | arguments))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = ref.resolve("builder")(**ref.arguments)
    return Model.from_module(Recipe(ref, classifier((1, SIDE, SIDE), NUM_CLASSES)), module)


def make_split(name: str, num_images: int, seed: int, images: type[ArrayColumn] = ArrayColumn) -> Split:
    """Noise with a bright quadrant, whose place is the class."""
    rng = np.random.default_rng(seed)
    labels_N = rng.integers(0, NUM_CLASSES, num_images)
    pixels_NHWC = rng.integers(0, 120, (num_images, SIDE, SIDE, 1), dtype=np.uint8)
    half = SIDE // 2
    for pixels_HWC, label in zip(pixels_NHWC, labels_N, strict=True):
        row, column = half * (label // 2), half * (label % 2)
        pixels_HWC[row : row + half, column : column + half] += 60
    return image_split(
        np.array([f"{name}/{n}" for n in range(num_images)], dtype=np.str_), labels_N, images(pixels_NHWC)
    )


def make_data(
    num_train: int = 100, num_val: int = 0, batch_size: int = 16, augment: Sequence[str] = (), **splits: Split
) -> Data:
    info = image_info("quadrants", tuple("abcd"), (1, SIDE, SIDE), (0.3,), (0.2,))
    made = {"train": make_split("train", num_train, 1), "val": make_split("val", num_val, 2)}
    return Data(info, made | splits, LoaderOptions(batch_size=batch_size, augment=tuple(augment)))


@dataclass
class Trained:
    model: Model
    events: list[Event]

    @property
    def metrics(self) -> dict[str, Any]:
        return {event.name: event.value for event in self.events if isinstance(event, Metric)}

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]

    @property
    def log(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, LogLine)]

    @property
    def progress(self) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress)]


@dataclass
class Lab:
    """Trains in one scratch folder."""

    scratch: Path
    seed: int = 7
    events: list[Event] = field(default_factory=list)

    make_model = staticmethod(make_model)
    make_data = staticmethod(make_data)
    make_split = staticmethod(make_split)

    def context(self) -> Context:
        return Context("t", "train.supervised", self.seed, self.scratch, _tell=self.events.append)

    def train(self, model: Model, data: Data, teacher: Model | None = None, **options: Any) -> Trained:
        """Train with options as a manifest gives them."""
        self.events.clear()
        config = TrainConfig.model_validate_json(json.dumps({"num_threads": 1} | options), strict=True)
        return Trained(train(config, self.context(), model, data, teacher), list(self.events))

    def train_afresh(self, model: Model, data: Data, teacher: Model | None = None, **options: Any) -> Trained:
        """Train in a new scratch folder."""
        folder = self.scratch / f"fresh-{len(list(self.scratch.iterdir()))}"
        folder.mkdir()
        return Lab(folder, self.seed).train(model, data, teacher, **options)


def assert_same_bits(one: Model, other: Model) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def max_difference(one: Model, other: Model) -> float:
    """Return the maximum difference, relative to the maximum of each tensor."""
    assert all(tensor.isfinite().all() for model in (one, other) for tensor in model.tensors.values())
    return max(
        ((tensor - other.tensors[name]).abs().max() / tensor.abs().max().clamp_min(1e-12)).item()
        for name, tensor in one.tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # For nets this small several threads only wait for each other. Killed trainings take two.
    with torch_threads(1):
        yield


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)
