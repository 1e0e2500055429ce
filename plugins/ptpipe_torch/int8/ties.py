"""Means and products of quantized tensors, whose ties are rounded as ONNX Runtime's kernels round them.

The mean of 4 or 16 integers is often halfway between two others, and so is a product with a gate if its output has the
scale of its input. Products become the even integer, means the one that is an even number of steps from zero. Where the
zero point is odd, as it may be behind a SiLU or HardSwish, these differ: in a quarter of 2 x 2 means. torch's kernels
(2.13) for products count the steps; fbgemm's for means do either, by operator, memory format and place in a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

F = nn.functional
_LARGEST_PRODUCT = 2**16
"""Of two integers, rounded up to a power of two. Unless the scales' ratio is a multiple of one part of so many, as with
a gate whose output has the scale of its input, no product is a tie."""
_FUNCTIONS = (
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    torch.mean,
)
_LAYERS = (
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)


def round_ties(converted: GraphModule, backend: str) -> None:
    """Let an int8 network round products so and, unless it is qnnpack's, means, in place."""
    replacements = _PRODUCT_BY_KERNEL if backend == "qnnpack" else _PRODUCT_BY_KERNEL | _MEAN_BY_TARGET
    for node in converted.graph.nodes:
        if node.op in ("call_function", "call_method") and node.target in replacements:
            node.op, node.target = "call_function", replacements[node.target]
        elif node.op == "call_module" and backend != "qnnpack":
            _replace_pooling(converted, str(node.target))
    converted.recompile()


def _replace_pooling(converted: GraphModule, name: str) -> None:
    if isinstance(layer := converted.get_submodule(name), _LAYERS):
        converted.set_submodule(name, _MeanOfSteps(layer))


def mul(x: torch.Tensor, y: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Multiply two quint8 tensors; the product is quint8 too."""
    return _product(x, y, scale, zero_point, torch.ops.quantized.mul, least=0)


def mul_relu(x: torch.Tensor, y: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Multiply two quint8 tensors as `mul` does, and set negative products to zero."""
    return _product(x, y, scale, zero_point, torch.ops.quantized.mul_relu, least=zero_point)


def _product(
    x: torch.Tensor, y: torch.Tensor, scale: float, zero_point: int, kernel: Any, *, least: int
) -> torch.Tensor:
    ratio = x.q_scale() * y.q_scale() / scale
    if zero_point % 2 == 0 or ratio * _LARGEST_PRODUCT % 1:  # no ties, or all kernels agree
        product: torch.Tensor = kernel(x, y, scale, zero_point)
        return product
    rounded = (_steps(x) * _steps(y) * ratio).add_(zero_point).round_().clamp_(least, 255)
    return torch._make_per_tensor_quantized_tensor(rounded.to(torch.uint8), scale, zero_point)


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Return how many steps from zero each value is: exact, and in a sixth of the time of `int_repr`."""
    return x.dequantize().div_(x.q_scale()).round_()


class _MeanOfSteps(nn.Module):
    """An average pooling of quantized tensors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _mean_of_steps(self.layer, x)


def _mean_of_steps(mean: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what `mean` computes of a tensor, quint8 with one scale or float."""
    if not x.is_quantized or (mean is not torch.mean and x.q_zero_point() % 2 == 0):  # where all kernels agree
        return mean(x, *args, **kwargs)
    zero_point = x.q_zero_point()
    integers = mean(_steps(x), *args, **kwargs).round_().add_(zero_point)
    return torch._make_per_tensor_quantized_tensor(integers.to(torch.uint8), x.q_scale(), zero_point)


def _on_quantized(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def mean_of_steps(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _mean_of_steps(function, x, *args, **kwargs)

    mean_of_steps.__name__ = f"{function.__name__}_of_steps"  # in the code of graphs
    return mean_of_steps


_MEAN_BY_TARGET: dict[Any, Any] = {function: _on_quantized(function) for function in _FUNCTIONS}
_MEAN_BY_TARGET["mean"] = _MEAN_BY_TARGET[torch.mean]  # a method
_PRODUCT_BY_KERNEL: dict[Any, Any] = {torch.ops.quantized.mul: mul, torch.ops.quantized.mul_relu: mul_relu}
PRODUCTS = tuple(_PRODUCT_BY_KERNEL.values())
