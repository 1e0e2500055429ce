"""Give layers of any type another forward pass, in place."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def mix_in(layer: nn.Module, mixin: type) -> None:
    """Make a layer one of a subclass of `mixin` and its own type: state and hooks stay.

    The subclass has the name of the layer's type, by which options find layers.
    """
    own_type: Any = type(layer)
    layer.__class__ = _subclass(mixin, own_type)


@cache
def _subclass(mixin: type, type_: Any) -> Any:
    return type(type_.__name__, (mixin, type_), {"__module__": type_.__module__})
