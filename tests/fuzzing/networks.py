"""Random networks as data: a short list of steps, from which the source of a module is written.

The source is what users write, in-place operators and aliases included; it is compiled as it is printed.
Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from ptpipe_torch import ArrayColumn, Data, FunctionRef, LoaderOptions, Model, Recipe, Split
from ptpipe_torch.model.function_ref import builder
from ptpipe_torch.runtime import seeded

from ..datasets import image_info, image_split
from ..signatures import classifier
from .steps import (
    IMAGE_STEPS,
    TO_TOKENS,
    TO_VECTORS,
    TOKEN_STEPS,
    TOKENS_TO_VECTORS,
    VECTOR_STEPS,
    write_head,
    write_neck,
)
from .writer import NAMES, Inapplicable, StepWriter, Writer

Step: TypeAlias = tuple[str, int, int]
"""Name of a step, and two numbers that choose its spelling."""
FIRST_STEPS = ("convolution", "unit", "sequential")
"""None of them changes its input, the images, in place."""


class InvalidNetwork(Exception):  # the drawn steps are at fault
    """The steps make no network that torch itself can run or train."""


@dataclass(frozen=True)
class Network:
    """The steps of a network. Steps that do not fit where they stand are left out."""

    shape_CHW: tuple[int, int, int]
    num_classes: int
    image_steps: tuple[Step, ...]
    neck: int
    token_steps: tuple[Step, ...] = ()
    vector_steps: tuple[Step, ...] = ()
    head: int = 0
    seed: int = 0
    """Of weights and data."""

    @cached_property
    def source(self) -> str:
        """The class `Network`, for `NAMES`."""
        writer = Writer(self.shape_CHW)
        with seeded(0):
            self._write(writer, IMAGE_STEPS, self.image_steps)
            if self.token_steps:
                write_neck(writer, TO_TOKENS, self.neck)
                self._write(writer, TOKEN_STEPS, self.token_steps)
                write_neck(writer, TOKENS_TO_VECTORS, self.neck // 5)
            else:
                try:
                    write_neck(writer, TO_VECTORS, self.neck)
                except (Inapplicable, RuntimeError, IndexError):
                    write_neck(writer, TO_VECTORS, 0)
            self._write(writer, VECTOR_STEPS, self.vector_steps)
            return writer.source(write_head(writer, self.num_classes, self.head))

    @staticmethod
    def _write(writer: Writer, registry: dict[str, StepWriter], steps: tuple[Step, ...]) -> None:
        for name, *numbers in steps:
            with writer.attempt():
                registry[name](writer, *numbers)

    def model(self) -> Model:
        """Return the network as a float model, with batch norm statistics of a few images."""
        with seeded(self.seed):
            module = from_source(source=self.source)
            _initialize(module)
            try:
                with torch.no_grad():
                    module.train()(torch.rand(32, *self.shape_CHW) * 2 - 1)
            except (RuntimeError, ValueError) as error:
                raise InvalidNetwork(str(error)) from error
        reference = FunctionRef.to(from_source, source=self.source)
        return Model.from_module(Recipe(reference, classifier(self.shape_CHW, self.num_classes)), module)

    def check_trains(self) -> None:
        """Raise InvalidNetwork if autograd refuses the network: an in-place operator changed what it had kept."""
        with seeded(self.seed):
            module = from_source(source=self.source).train()
        try:
            module(torch.randn(4, *self.shape_CHW)).sum().backward()
        except RuntimeError as error:
            raise InvalidNetwork(str(error)) from error

    def data(self) -> Data:
        """Return noise whose brightness is the class."""
        rng = np.random.default_rng(self.seed)
        channels, height, width = self.shape_CHW

        def split(name: str, num: int) -> Split:
            labels_N = rng.integers(0, self.num_classes, num)
            pixels_NHWC = rng.integers(0, 160, (num, height, width, channels), dtype=np.uint8)
            pixels_NHWC += (90 * labels_N // self.num_classes).astype(np.uint8).reshape(-1, 1, 1, 1)
            return image_split(
                np.array([f"{name}/{n}" for n in range(num)], dtype=np.str_), labels_N, ArrayColumn(pixels_NHWC)
            )

        sizes = {"train": 24, "calibration": 24, "test": 12}
        names = tuple(f"class {n}" for n in range(self.num_classes))
        info = image_info("noise", names, self.shape_CHW, (0.5,) * channels, (0.25,) * channels)
        return Data(info, {name: split(name, num) for name, num in sizes.items()}, LoaderOptions(batch_size=8))

    def __repr__(self) -> str:
        return f"seed {self.seed}, images {self.shape_CHW}\n{self.source}"


def _initialize(module: nn.Module) -> None:
    """Widen torch's initial weights, so that deep layers still differ from image to image; vary batch norms."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
                layer.weight.uniform_(0.5, 1.5)
                layer.weight[0].neg_()
                layer.bias.uniform_(-0.5, 0.5)


def frequent(registry: Mapping[str, StepWriter], **weights: int) -> list[str]:
    """The names of steps, as often as they should occur; every fourth is none."""
    names = [name for name in registry for _ in range(weights.get(name, 1))]
    return [*[""] * (len(names) // 3), *names]


@builder
def from_source(*, source: str) -> nn.Module:
    """Compile a network's source; errors show its lines."""
    path = f"<network {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    names: dict[str, Any] = {**NAMES, "__name__": "generated"}
    exec(compile(source, path, "exec"), names)
    network: nn.Module = names["Network"]()
    return network


_IMAGE_NAMES = frequent(
    IMAGE_STEPS, unit=4, activation=4, relu=3, residual=3, merge=4, save=2, pool=2, convolution=2,
    repeated_convolution=2, concatenate=2,
)  # fmt: skip
_TOKEN_NAMES = frequent(TOKEN_STEPS, attention=3, linear=2)
_VECTOR_NAMES = frequent(VECTOR_STEPS, dense=2, linear=2)
_NUM_IMAGE_STEPS, _NUM_TOKEN_STEPS, _NUM_VECTOR_STEPS = 7, 3, 3
NUM_BYTES = 9 + 2 + 3 * (_NUM_IMAGE_STEPS + _NUM_TOKEN_STEPS + _NUM_VECTOR_STEPS)


def decode(numbers: Iterator[int]) -> Network:
    """Return the network that `NUM_BYTES` bytes choose; zeros choose the smallest.

    One draw of all bytes: of many draws hypothesis would repeat parts, and nearly all networks would be alike.
    """

    def steps(names: Sequence[str], num: int) -> tuple[Step, ...]:
        drawn = [(next(numbers), next(numbers) % 12, next(numbers) % 12) for _ in range(num)]
        return tuple((names[number % len(names)], a, b) for number, a, b in drawn if names[number % len(names)])

    channels, height, width = (1 + next(numbers) % 3, 5 + next(numbers) % 16, 5 + next(numbers) % 16)
    first = (FIRST_STEPS[next(numbers) % 3], next(numbers) % 12, next(numbers) % 12)
    has_tokens = next(numbers) % 4 == 3
    image_steps = (first, *steps(_IMAGE_NAMES, _NUM_IMAGE_STEPS))
    token_steps, vector_steps = steps(_TOKEN_NAMES, _NUM_TOKEN_STEPS), steps(_VECTOR_NAMES, _NUM_VECTOR_STEPS)
    return Network(
        (channels, height, width),
        num_classes=2 + next(numbers) % 9,
        image_steps=image_steps,
        neck=next(numbers),
        token_steps=token_steps if has_tokens else (),
        vector_steps=vector_steps,
        head=next(numbers),
        seed=next(numbers),
    )
