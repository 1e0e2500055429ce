"""`int(x.shape[0] / 4)` for a batch of any size, as Swin's code counts the images that windows belong to.

`int` returns a number, whatever it is given, so that a tracer would make a constant of the size. And the quotient is a
floating-point number, of which torch can't show that it is whole. In its place stands `x.shape[0] // 4`, which is the
same number, since sizes are not negative.

Other built-in functions are replaced for all (`answering_builtins`). `int` is a type, with which torch compares others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_OPERANDS = "_operands_of_quotient"
"""Attribute of a symbolic quotient."""
_NOT_OF_USERS = re.compile(r"^(builtins|torch|torchvision|ptpipe\w*)$")


@contextmanager
def own_int(network: nn.Module, convert: Callable[[Any], Any]) -> Iterator[None]:
    """Let `int` in the modules that define a network return `convert(value)`, where that is not None.

    Modules are those of the packages that the classes of its layers come from.
    """
    packages = {type(layer).__module__.partition(".")[0] for layer in network.modules()}
    own = {name for name in packages if not _NOT_OF_USERS.match(name)}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in own]
    function = _Int("int", (), {"convert": staticmethod(convert)})
    with ExitStack() as restored:
        for module in modules:
            names = getattr(module, "__dict__", {})
            if "int" not in names:
                names["int"] = function
                restored.callback(names.pop, "int", None)
        yield


class _Int(type):
    """A class that stands for `int` in `isinstance`, too."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        converted = cls.convert(*args) if len(args) == 1 and not kwargs else None
        return int(*args, **kwargs) if converted is None else converted

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, int)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, int)

    def __getattr__(cls, name: str) -> Any:
        return getattr(int, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is int

    def __hash__(cls) -> int:
        return hash(int)


@contextmanager
def symbolic_quotients(network: nn.Module) -> Iterator[None]:
    """Keep the sizes symbolic that a network, while torch.export runs it, divides and takes the whole number of."""
    original = torch.SymInt.__truediv__

    def divide(size: Any, divisor: Any) -> Any:
        quotient = original(size, divisor)  # type: ignore[no-untyped-call]
        if type(quotient) is torch.SymFloat and is_whole(divisor):
            setattr(quotient, _OPERANDS, (size, int(divisor)))
        return quotient

    torch.SymInt.__truediv__ = divide  # type: ignore[method-assign]
    try:
        with own_int(network, _symbolic_int):
            yield
    finally:
        torch.SymInt.__truediv__ = original  # type: ignore[method-assign]


def is_whole(divisor: Any) -> bool:
    """Return whether a divisor is a positive whole number."""
    return isinstance(divisor, int | float) and divisor > 0 and int(divisor) == divisor


def _symbolic_int(value: Any) -> Any:
    if type(value) is torch.SymInt:
        return value
    operands = getattr(value, _OPERANDS, None) if type(value) is torch.SymFloat else None
    return None if operands is None else operands[0] // operands[1]
