"""Small networks with what quantization must cope with, handwritten digits, and a plain training loop.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from ptpipe import JSON, Context
from ptpipe.events import Event, Metric
from ptpipe_torch import (
    ArrayColumn,
    Data,
    FunctionRef,
    LoaderOptions,
    Model,
    Recipe,
    Split,
    TrainingCallback,
    builder,
    epoch_order,
)
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.runtime import seeded, torch_threads

from ...datasets import image_info, image_split
from ...signatures import classifier, logits_from

BACKENDS = supported_engines()
NUM_CLASSES = 10


@builder
def small_net(*, width: int = 8, dropout: float = 0.0) -> nn.Module:
    """Two convolutions with batch norm, pooling, two linear layers: the CNN of the project at 8x8."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4, 32),
        nn.ReLU(),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(32, NUM_CLASSES),
    )


class Mixed(nn.Module):
    """Residual adds, ReLU6, hard-swish, concatenation, functions and methods in place of modules, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.block = nn.ModuleDict(
            {"conv": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), "norm": nn.BatchNorm2d(8)}
        )
        self.relu = nn.ReLU()
        self.wide = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.left, self.right = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.lone_norm = nn.BatchNorm2d(16)
        self.hidden, self.head = nn.Linear(16, 24), nn.Linear(24, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.relu(self.block["norm"](self.block["conv"](x)) + x)
        x = F.max_pool2d(self.wide(self.relu(x)), 2)
        x = torch.cat([torch.relu(self.left(x)), self.right(x).relu()], 1)
        x = F.relu(self.lone_norm(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        x = F.dropout(torch.relu(self.hidden(x)), 0.2, training=self.training)
        logits_NK: torch.Tensor = self.head(x)
        return logits_NK


@builder
def mixed_net() -> nn.Module:
    """What `Mixed` says."""
    return Mixed()


@builder
def convolution_only() -> nn.Module:
    """No linear layer."""
    return nn.Sequential(nn.Conv2d(1, NUM_CLASSES, 8), nn.Flatten())


@builder
def normalized_by_batch() -> nn.Module:
    """Fails for a batch of one image."""
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), norm, nn.Flatten(), nn.Linear(8, NUM_CLASSES))


@builder
def activated(*, name: str) -> nn.Module:
    """Has an activation with an int8 form of its own."""
    return nn.Sequential(nn.Conv2d(1, 8, 3), getattr(nn, name)(), nn.Flatten(), nn.Linear(8 * 36, NUM_CLASSES))


@builder
def nothing_to_quantize() -> nn.Module:
    """No layer that has an int8 form."""
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(NUM_CLASSES))


def make_model(build: Callable[..., nn.Module], seed: int = 0, **arguments: JSON) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model.from_module(
            Recipe(FunctionRef.to(build, **arguments), classifier((1, 8, 8), NUM_CLASSES)), build(**arguments)
        )


def make_digits() -> Data:
    digits = load_digits()
    pixels_NHWC = (digits.images * 15).astype(np.uint8)[..., None]
    order_N = np.random.default_rng(0).permutation(len(pixels_NHWC))

    def split(name: str, indices: np.ndarray) -> Split:
        ids = np.array([f"{name}/{index:04d}" for index in indices])
        return image_split(ids, digits.target[indices].astype(np.int64), ArrayColumn(pixels_NHWC[indices]))

    splits = {
        "train": split("digits", order_N[:1200]),
        "calibration": split("digits", order_N[:256]),
        "test": split("digits", order_N[1200:]),
    }
    info = image_info("digits", tuple(map(str, range(10))), (1, 8, 8), (0.3,), (0.35,))
    return Data(info, splits, LoaderOptions(batch_size=64))


def train(model: Model, data: Data, *, lr: float, epochs: int = 1, bf16: bool = False) -> Model:
    """What a trainer does to a model, in the fewest lines: callbacks called, a step per batch.

    Dropout draws from a stream of its own: what other tests drew before must not decide on the network.
    """
    with seeded(7):
        return _train(model, data, lr=lr, epochs=epochs, bf16=bf16)


def _train(model: Model, data: Data, *, lr: float, epochs: int, bf16: bool) -> Model:
    module = model.build_prepared().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(module.parameters(), lr, momentum=0.9)
    callbacks = [layer for layer in module.modules() if isinstance(layer, TrainingCallback)]
    num_samples, size = len(data.splits["train"]), data.loader.batch_size
    num_steps, step = epochs * -(-num_samples // size), 0
    for epoch in range(epochs):
        for batch in data.batches("train", order_N=epoch_order(num_samples, 7, epoch), channels_last=True):
            for callback in callbacks:
                callback.on_progress(step / num_steps)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits_NK = module(batch.inputs["images"])
            F.cross_entropy(logits_NK.float(), batch.targets["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model.with_state_dict_of(module)


def logits_of(model: Model, data: Data, num_samples: int | None = None) -> np.ndarray:
    order_N = np.arange(len(data.splits["test"]))[:num_samples]
    with model.predictor(2) as predict:
        batches = data.batches("test", order_N=order_N, batch_size=250)
        return np.concatenate([logits_from(predict, batch.inputs["images"].numpy()) for batch in batches])


def accuracy(logits_NK: np.ndarray, data: Data) -> float:
    labels_N = data.splits["test"].targets["labels"].values()[: len(logits_NK)]
    return float((logits_NK.argmax(1) == labels_N).mean())


@pytest.fixture(scope="session")
def digits() -> Data:
    return make_digits()


@pytest.fixture(scope="session")
def trained(digits: Data) -> Model:
    """The small network, trained to some 97 % on the digits."""
    with torch_threads(1):
        return train(make_model(small_net), digits, lr=0.05, epochs=4)


@pytest.fixture(scope="session")
def trained_mixed(digits: Data) -> Model:
    with torch_threads(1):
        return train(make_model(mixed_net), digits, lr=0.05, epochs=4)


@pytest.fixture
def events() -> list[Event]:
    """Events of the stage."""
    return []


@pytest.fixture
def ctx(tmp_path: Path, events: list[Event]) -> Context:
    return Context(stage_id="int8", kind="quant.test", seed=7, scratch=tmp_path, _tell=events.append)


@pytest.fixture
def metrics(events: list[Event]) -> Callable[[], dict[str, JSON]]:
    return lambda: {event.name: event.value for event in events if isinstance(event, Metric)}
