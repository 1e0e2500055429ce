"""Quantized engines of torch (fbgemm, x86, onednn, qnnpack): which ones run on this machine, and selecting one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ptpipe import StageError, host

if TYPE_CHECKING:
    from torch import nn

PROBE_STEP = 8.0
"""Output scale of the probe's convolution, whose sums lie within -74 and 32."""

_NUM_FILLERS, _NUM_UNPACKED = 16, 3


@contextmanager
def deprecations_silenced() -> Iterator[None]:
    """Silence torch's warnings that `torch.ao` and quantized tensors will be removed, inside the `with`.

    And one for all of oneDNN without VNNI: stages compare what a layer computes with its formula.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*oneDNN backend with reduce_range of false", UserWarning)
        warnings.filterwarnings("ignore", r".*quantized tensor creation functions", UserWarning)
        warnings.filterwarnings("ignore", r"(?s).*torch\.ao\.quantization is deprecated", DeprecationWarning)
        yield


def supported_engines() -> tuple[str, ...]:
    """Return the names of the quantized engines that this build of torch supports on this machine, sorted."""
    import torch

    listed = set(torch.backends.quantized.supported_engines) - {"none"}
    return tuple(sorted(engine for engine in listed if not is_for_another_processor(engine)))


def is_for_another_processor(engine: str) -> bool:
    """Return whether an engine has kernels for x86 processors alone, and this is none.

    torch 2.11 to 2.13 lists these on ARM, too, where all their operators fail:
    https://github.com/pytorch/pytorch/pull/180679
    """
    return engine in ("fbgemm", "x86") and not host.is_x86()


def unsupported_engine(backend: str) -> str | None:
    """Return an error message if `backend` can't be used on this machine, else None."""
    supported = supported_engines()
    if backend in supported:
        return None
    return (
        f"torch does not support int8 backend {backend} on this machine (supported: {', '.join(supported) or 'none'})"
    )


@contextmanager
def quantized_engine(backend: str | None) -> Iterator[None]:
    """Select `backend`, an engine of torch's int8 operators, inside the `with`; None keeps the current one.

    Raises StageError if this build of torch or this machine does not support it.
    """
    if backend is None:
        yield
        return
    import torch

    if (message := unsupported_engine(backend)) is not None:
        raise StageError(message)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = backend
    try:
        with warnings.catch_warnings():
            # Sigmoid has a grid of its own, and is put on that of the tensor it is joined to: see fixed_ranges.
            warnings.filterwarnings("ignore", ".*cat operator must share the same quantization param", UserWarning)
            yield
    finally:
        torch.backends.quantized.engine = before


def probe_error(backend: str) -> float:
    """Return the largest difference between a small convolution in int8 on this engine and in float32.

    Rounding explains half of `PROBE_STEP`.
    """
    import torch

    images_NCHW = torch.arange(2 * 16, dtype=torch.float32).reshape(1, 2, 4, 4)
    weights_OIHW = torch.arange(3 * 2 * 9, dtype=torch.float32).reshape(3, 2, 3, 3) % 7 - 3
    expected = torch.nn.functional.conv2d(images_NCHW, weights_OIHW)
    with quantized_engine(backend), warnings.catch_warnings(action="ignore"):
        images = torch.quantize_per_tensor(images_NCHW, 1.0, 0, torch.quint8)
        weights = torch.quantize_per_tensor(weights_OIHW, 1.0, 0, torch.qint8)
        packed = torch.ops.quantized.conv2d_prepack(weights, torch.zeros(3), [1, 1], [0, 0], [1, 1], 1)
        found = torch.ops.quantized.conv2d(images, packed, PROBE_STEP, 128).dequantize()
    return float((found - expected).abs().max())


def transposed_convolution_error(
    layer: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, backend: str
) -> float:
    """Return by how many steps this engine's kernel for such a transposed convolution is off, at most.

    One is rounding. Infinite if the engine refuses the layer, or does not return the weights that it was given, which
    could not be stored. It depends on the kernel's size, stride and padding: fbgemm (torch 2.13) computes another
    function for 2x2 with stride 2, and of 2x2 it returns uninitialized memory for weights. Inputs have 7 bits, so that
    no sum saturates.
    """
    import torch

    random = torch.Generator().manual_seed(0)
    num_spatial = layer.weight.dim() - 2
    inputs = torch.randint(0, 128, (1, layer.in_channels, *[5] * num_spatial), generator=random).float()
    weights = torch.randint(-127, 128, layer.weight.shape, generator=random).float()
    lists = [list(value) for value in (layer.stride, layer.padding, layer.output_padding)]
    arguments = (*lists, layer.groups, list(layer.dilation))  # of the function; those of the operator: dilation first
    expected = getattr(torch.nn.functional, f"conv_transpose{num_spatial}d")(inputs, weights, None, *arguments)
    scale = max(expected.abs().max().item() / 127, 1.0)
    operators = torch.ops.quantized
    try:
        with quantized_engine(backend), deprecations_silenced():
            quantized = torch.quantize_per_tensor(inputs, 1.0, 0, torch.quint8)
            quantized_weights = torch.quantize_per_tensor(weights, 1.0, 0, torch.qint8)
            prepack = getattr(operators, f"conv_transpose{num_spatial}d_prepack")
            packed = prepack(quantized_weights, None, *lists, list(layer.dilation), layer.groups)
            # Uninitialized memory is often what was freed last: the weights themselves, unless all of that is taken.
            integers, taken = quantized_weights.int_repr(), list[torch.Tensor]()
            for _ in range(_NUM_UNPACKED):
                taken += [torch.zeros_like(integers) for _ in range(_NUM_FILLERS)]
                unpacked, _ = getattr(operators, f"conv_transpose{num_spatial}d_unpack")(packed)
                taken.append(unpacked)
                if not torch.equal(unpacked.int_repr(), integers):
                    return float("inf")
            found = getattr(operators, f"conv_transpose{num_spatial}d")(quantized, packed, scale, 128).dequantize()
    except (RuntimeError, NotImplementedError):
        return float("inf")
    return float((found - expected).abs().max() / scale)
