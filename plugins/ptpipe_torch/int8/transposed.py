"""Transposed convolutions of 2 x 2 with stride 2, in a form that fbgemm computes.

Of kernels of 2 x 2 it returns uninitialized memory for weights, and computes another function (torch 2.13). With a row
and a column of zeros in front, and the output cropped by them, the kernel has 3 x 3 taps, and the sums are the same.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_NARROW = {"stride": (2, 2), "padding": (0, 0), "output_padding": (0, 0), "kernel_size": (2, 2), "dilation": (1, 1)}
_WIDE = {"padding": (1, 1), "output_padding": (1, 1), "kernel_size": (3, 3)}


def computed_form(layer: Any, backend: str) -> Any:
    """Return a transposed convolution as the int8 network of a backend has it: a copy if that is another one."""
    return _widened(copy.deepcopy(layer)) if _is_widened(layer, backend) else layer


def use_computed_forms(network: nn.Module, backend: str) -> None:
    """Give all transposed convolutions of a network that form, in place."""
    for layer in network.modules():
        if _is_widened(layer, backend):
            _widened(layer)


def copy_form(layer: Any, other: Any) -> None:
    """Give a transposed convolution the form of another one, but its weight, in place."""
    for name in _WIDE if isinstance(layer, nn.ConvTranspose2d) else ():
        setattr(layer, name, getattr(other, name))


def _is_widened(layer: Any, backend: str) -> bool:
    is_narrow = isinstance(layer, nn.ConvTranspose2d) and all(getattr(layer, key) == _NARROW[key] for key in _NARROW)
    return backend == "fbgemm" and is_narrow


def _widened(layer: Any) -> Any:
    weight = nn.functional.pad(layer.weight.detach(), (1, 0, 1, 0))
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    for name, value in _WIDE.items():
        setattr(layer, name, value)
    return layer
