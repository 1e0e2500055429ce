"""An int8 model's state dict as plain tensors, and back.

torch keeps int8 weights as quantized tensors, which carry their scales inside and fit no plain tensor file. Here
each becomes four entries: the integers, scales, zero points and channel axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_INTEGERS, _SCALES, _ZEROS, _AXIS = ":int8", ":scales", ":zero_points", ":axis"
_PER_TENSOR = -1


def pack_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Flatten a converted module's state dict into plain tensors; entries that hold nothing are left out."""
    raise NotImplementedError


def unpack_state(packed: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Inverse of `pack_state`: what `load_state_dict` of the converted module takes."""
    raise NotImplementedError
