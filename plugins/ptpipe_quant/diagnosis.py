"""Whether the int8 engines that torch lists do compute here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import get_args

import torch

from ptpipe import Check
from ptpipe_quant.backends import offered_backends
from ptpipe_quant.cpu import Backend, wants_reduced_range
from ptpipe_torch.runtime import quantized_engine

_STEP = 8.0
"""Of the probe's output scale: its sums lie within -74 and 32."""


def findings() -> Iterator[Check]:
    """Run a small int8 convolution on every engine that torch offers."""
    offered = offered_backends()
    names: tuple[Backend, ...] = get_args(Backend)
    if not set(names) & set(offered):
        remedy = "install a build of torch with int8 engines: pip install --force-reinstall torch"
        yield Check.fail("int8 engines", "torch has none here", remedy)
        return
    for name in names:
        if name in offered:
            yield _probed(name)
        else:
            yield Check.warn(f"int8 {name}", "not offered by torch here", "choose another `backend`")


def _probed(backend: Backend) -> Check:
    subject = f"int8 {backend}"
    remedy = "choose another `backend` in the manifest"
    try:
        error = _largest_error(backend)
    except Exception as failure:  # noqa: BLE001  # an engine may raise anything
        return Check.fail(subject, f"listed, but fails: {str(failure).strip().partition(chr(10))[0]}", remedy)
    if error > _STEP / 2:
        return Check.fail(subject, f"a convolution is wrong by {error:g}, where rounding explains 4", remedy)
    is_reduced, reason = wants_reduced_range(backend)
    if is_reduced:
        return Check.warn(subject, f"a convolution runs; activations keep to 7 bits: {reason}")
    return Check.ok(subject, f"a convolution runs; activations of 8 bits: {reason}")


def _largest_error(backend: str) -> float:
    """How far a convolution in int8 is from the same in float; half a step is rounding."""
    images_NCHW = torch.arange(2 * 16, dtype=torch.float32).reshape(1, 2, 4, 4)
    weights_OIHW = torch.arange(3 * 2 * 9, dtype=torch.float32).reshape(3, 2, 3, 3) % 7 - 3
    right = torch.nn.functional.conv2d(images_NCHW, weights_OIHW)
    with quantized_engine(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are said to go away one day
        images = torch.quantize_per_tensor(images_NCHW, 1.0, 0, torch.quint8)
        weights = torch.quantize_per_tensor(weights_OIHW, 1.0, 0, torch.qint8)
        packed = torch.ops.quantized.conv2d_prepack(weights, torch.zeros(3), [1, 1], [0, 0], [1, 1], 1)
        found = torch.ops.quantized.conv2d(images, packed, _STEP, 128).dequantize()
    return float((found - right).abs().max())
