"""Write the source of a network statement by statement, running each one: every variable's shape is known.

Shape legend: N images, C channels, H height, W width, L tokens, D features.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

F = nn.functional
NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
"""What the source of a network may use."""
MAX_VALUES = 3000
"""Values of one sample's tensor: networks stay quick."""


class Inapplicable(Exception):  # not an error: the step is left out
    """A step does not fit the tensors that there are."""


class Writer:
    """The source so far, and the tensors that it computes from two images."""

    def __init__(self, shape_CHW: tuple[int, int, int]) -> None:
        self.layers: list[str] = []
        self.statements: list[str] = []
        self.saved: list[str] = []
        self.convolutions: list[str] = []
        self.linears: list[str] = []
        self.norms: list[str] = []
        self._num_names = 0
        self._variables: dict[str, Any] = {**NAMES, "self": nn.Module(), "x": torch.randn(2, *shape_CHW)}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `x`, without N."""
        return tuple(self._variables["x"].shape[1:])

    def shape_of(self, variable: str) -> tuple[int, ...]:
        return tuple(self._variables[variable].shape[1:])

    def layer_named(self, name: str) -> Any:
        """The layer of `self.conv1`."""
        return getattr(self._variables["self"], name.removeprefix("self."))

    def new_name(self, stem: str) -> str:
        self._num_names += 1
        return f"{stem}{self._num_names}"

    def layer(self, stem: str, code: str) -> str:
        """Add a layer or parameter, `conv` made by `nn.Conv2d(...)`; return how to refer to it: `self.conv1`."""
        return self._set(f"self.{self.new_name(stem)}", code)

    def shared_layer(self, name: str, code: str) -> str:
        """The layer of this name, which is added at the first use."""
        if not hasattr(self._variables["self"], name):
            self._set(f"self.{name}", code)
        return f"self.{name}"

    def _set(self, target: str, code: str) -> str:
        statement = f"{target} = {code}"
        with torch.random.fork_rng(devices=[]):
            exec(statement, self._variables)
        value = self.layer_named(target)
        if isinstance(value, nn.Module):
            value.eval()
            for registry, types in (
                (self.convolutions, nn.modules.conv._ConvNd),
                (self.linears, nn.Linear),
                (self.norms, nn.modules.batchnorm._BatchNorm),
            ):
                if isinstance(value, types):
                    registry.append(target)
        self.layers.append(statement)
        return target

    def do(self, statement: str) -> None:
        """Add a statement of `forward`. Raises what it raises, and Inapplicable where `x` becomes too large."""
        with torch.no_grad():
            exec(statement, self._variables)
        self.statements.append(statement)
        if self._variables["x"][0].numel() > MAX_VALUES:
            raise Inapplicable("too large")

    def save(self, stem: str = "skip") -> str:
        """`skip1 = x`, the same tensor under a second name."""
        name = self.new_name(stem)
        self.do(f"{name} = x")
        self.saved.append(name)
        return name

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Leave out all that is written inside if it can't be run."""
        lists = (self.layers, self.statements, self.saved, self.convolutions, self.linears, self.norms)
        lengths, variables = [len(items) for items in lists], dict(self._variables)
        copies = {name: value.clone() for name, value in variables.items() if isinstance(value, torch.Tensor)}
        try:
            yield
        except (Inapplicable, RuntimeError, ValueError, IndexError):  # torch's own refusals of a shape
            for items, length in zip(lists, lengths, strict=True):
                del items[length:]
            self._variables = {**variables, **copies}
            kept = {line.partition(" = ")[0] for line in self.layers}
            module = self._variables["self"]
            for name in [*module._modules, *module._parameters]:
                if f"self.{name}" not in kept:
                    delattr(module, name)

    def source(self, result: str) -> str:
        """The whole class; `result` is what it returns."""
        init = ["super().__init__()", *self.layers]
        forward = [*self.statements, f"return {result}"]
        return (
            "class Network(nn.Module):\n    def __init__(self):\n"
            + textwrap.indent("\n".join(init), " " * 8)
            + "\n\n    def forward(self, x):\n"
            + textwrap.indent("\n".join(forward), " " * 8)
            + "\n"
        )


StepWriter: TypeAlias = Callable[[Writer, int, int], None]
"""Writes a step, which two whole numbers choose among its spellings. Raises Inapplicable."""
