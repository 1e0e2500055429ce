"""Convert an int8 model's state dict to plain tensors, and back.

torch keeps int8 weights as quantized tensors, which carry their scales inside, and those of linear layers as a tuple
with the bias: neither fits a plain tensor file. Here each quantized tensor becomes up to four entries: integers,
scales, zero points (omitted if all are 0) and, with one scale per channel, the channel axis. A tensor that is float
when it is used may be stored that way as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ptpipe import IntegrityError, StageError

if TYPE_CHECKING:
    import torch

_INTEGERS, _SCALES, _ZEROS, _AXIS = ":int8", ":scales", ":zero_points", ":axis"
_BIAS = ":bias"


def pack_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Flatten a converted module's state dict into plain tensors; None entries are omitted.

    Raises StageError, naming the entry, for one that can't be stored as plain tensors.
    """
    import torch

    packed: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, tuple) and len(value) == 2:
            packed |= _pack(name, value[0])
            if value[1] is not None:
                packed[name + _BIAS] = value[1].detach().clone()
        elif isinstance(value, torch.Tensor):
            packed |= _pack(name, value)
        elif value is not None and not isinstance(value, torch.dtype):
            raise StageError(f"{name} ({type(value).__name__}) can't be stored as plain tensors: leave its layer float")
    return packed


def unpack_state(packed: Mapping[str, torch.Tensor], like: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `pack_state`. `like`: the state dict of a converted module of the same architecture.

    Raises IntegrityError if names, shapes or dtypes differ from those of `like`.
    """
    unused = dict(packed)
    state = {name: _unpack_entry(name, present, unused) for name, present in like.items()}
    if unused:
        raise IntegrityError(f"int8 tensors without a layer: {', '.join(sorted(unused)[:5])}")
    return state


def stored_as_int8(packed: Mapping[str, torch.Tensor], like: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return as quantized tensors, by name, the entries that are float in `like` and int8 in the file."""
    return {
        name: _unpack(name, present, dict(packed))
        for name, present in like.items()
        if name + _INTEGERS in packed and not isinstance(present, tuple) and not present.is_quantized
    }


def is_quantized(value: object) -> bool:
    """Return whether a value is a tensor of torch's eager int8 API: integers that carry their scales inside."""
    import torch

    return isinstance(value, torch.Tensor) and value.is_quantized


def _pack(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    import torch

    if not tensor.is_quantized:
        return {name: tensor.detach().clone()}
    entries = {name + _INTEGERS: tensor.int_repr()}
    if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        entries[name + _AXIS] = torch.tensor(tensor.q_per_channel_axis())
    elif tensor.qscheme() is not torch.per_tensor_affine:
        raise StageError(f"{name} ({tensor.qscheme()}) can't be stored as plain tensors: leave its layer float")
    else:
        scales = torch.tensor([tensor.q_scale()], dtype=torch.float64)
        zeros = torch.tensor([tensor.q_zero_point()])
    exact = torch.equal(scales.float().double(), scales.double())
    entries[name + _SCALES] = scales.float() if exact else scales
    if zeros.any():
        entries[name + _ZEROS] = zeros.to(torch.int32)
    return entries


def _unpack_entry(name: str, present: Any, unused: dict[str, torch.Tensor]) -> Any:
    import torch

    if isinstance(present, tuple):
        bias = None if present[1] is None else _take(name + _BIAS, present[1], unused)
        return _unpack(name, present[0], unused), bias
    if not isinstance(present, torch.Tensor):
        return present
    if name + _INTEGERS not in unused:
        return _take(name, present, unused)
    stored = _unpack(name, present, unused)
    return stored if present.is_quantized else stored.dequantize()


def _unpack(name: str, like: torch.Tensor, unused: dict[str, torch.Tensor]) -> torch.Tensor:
    import torch

    integers = _take(name + _INTEGERS, like.int_repr() if like.is_quantized else like.to(torch.int8), unused)
    scales, zeros, axis = (unused.pop(name + suffix, None) for suffix in (_SCALES, _ZEROS, _AXIS))
    num_scales = 1 if axis is None else integers.shape[_checked_axis(name, axis, integers.dim())]
    if scales is None or scales.shape != (num_scales,) or not (scales.isfinite() & (scales > 0)).all():
        raise IntegrityError(f"{name} has no valid scales")
    if zeros is None:
        zeros = torch.zeros(num_scales, dtype=torch.int64)
    if zeros.shape != (num_scales,) or zeros.is_floating_point() or zeros.abs().max() > 255:
        raise IntegrityError(f"{name} has no valid zero points")
    if like.is_quantized and (axis is not None) is (like.qscheme() is torch.per_tensor_affine):
        raise IntegrityError(f"{name} has scales per {'tensor' if axis is None else 'channel'}, unlike its layer")
    # torch's only way to a quantized tensor from the integers themselves, without rounding anything.
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(integers, scales.item(), int(zeros.item()))
    return torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros.long(), int(axis.item()))


def _checked_axis(name: str, axis: torch.Tensor, num_axes: int) -> int:
    if axis.numel() != 1 or not 0 <= int(axis.item()) < num_axes:
        raise IntegrityError(f"{name} has no valid channel axis")
    return int(axis.item())


def _take(name: str, like: torch.Tensor, unused: dict[str, torch.Tensor]) -> torch.Tensor:
    found = unused.pop(name, None)
    if found is None:
        raise IntegrityError(f"{name} is missing from the int8 tensors")
    if found.shape != like.shape or found.dtype != like.dtype:
        raise IntegrityError(
            f"{name} is {found.dtype} {tuple(found.shape)}, its layer has {like.dtype} {tuple(like.shape)}"
        )
    return found
