"""Rounding to an int8 grid in training, with straight-through gradients: of the values, and of a learned range.

Formulas: Y. Bengio et al., arXiv 1308.3432, section 4 (values); S. Esser et al., Learned Step Size Quantization, ICLR
2020, equations 2 and 3 (step); Y. Bhalgat et al., LSQ+, CVPR workshops 2020, equations 2 to 6 (step and offset).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

_hardtanh_backward = torch.ops.aten.hardtanh_backward  # the gradient strictly between two limits, else 0


class Grid(NamedTuple):
    """The integers of a tensor: x is stored as `clamp(round(x * inverse), minimum, maximum)`, which means that * scale.

    `minimum` and `maximum` are the integer range shifted by the zero point. `inverse` is 1 / `scale` rounded to
    float32: x is multiplied by it, as in torch's int8 kernels. Both are numbers, or tensors that broadcast. For a
    learned range the limits may be float32 tensors of one value, which need not be read back from an accelerator.
    """

    inverse: float | torch.Tensor
    scale: float | torch.Tensor
    minimum: int | torch.Tensor
    maximum: int | torch.Tensor

    @property
    def limits(self) -> tuple[Any, Any]:
        """The smallest and the largest integer, both numbers or both tensors."""
        return self.minimum, self.maximum

    @property
    def unclipped(self) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        """Limits of the rounded numbers that aren't clipped."""
        return self.minimum - 0.5, self.maximum + 0.5


class StraightThrough(torch.autograd.Function):
    """Rounding to a grid, whose gradient is 1 where nothing was clipped, else 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        # A parameter stays where it is until the backward pass: it is rounded once more there, to keep no copy of it.
        ctx.grid, ctx.is_parameter = grid, x.is_leaf
        result, rounded = _round(x, grid, keep=not ctx.is_parameter)
        ctx.save_for_backward(x if ctx.is_parameter else rounded)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        limits = ctx.grid.unclipped
        if not ctx.is_parameter:
            return _hardtanh_backward(gradient, kept, *limits), None
        rounded = _rounded(kept, ctx.grid).to(gradient.dtype)
        return _hardtanh_backward.grad_input(gradient, rounded, *limits, grad_input=rounded), None


class FoldedWeights(torch.autograd.Function):
    """Weights times a factor, rounded to a grid with straight-through gradients, and divided.

    `scaled`: `weight` * `factor`, which the caller needs for the grid. `factor` and `divisor` broadcast to `weight`;
    without `divisor` nothing is divided. Beside `weight`, the backward pass needs the result alone, which the layer
    that takes it keeps in any case: operators of torch would keep two copies more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        factor: torch.Tensor,
        divisor: torch.Tensor | None,
        scaled: torch.Tensor,
        grid: Grid,
    ) -> torch.Tensor:
        result, _ = _round(scaled, grid, keep=False)
        ctx.grid = grid
        if divisor is None:
            ctx.save_for_backward(weight, factor)
        else:
            ctx.save_for_backward(weight, factor, divisor, result.div_(divisor))
        return result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, None]:
        weight, factor, *divided = ctx.saved_tensors
        by_divisor, by_scaled = None, 1.0 if not divided else divided[0].reciprocal()
        if divided:
            by_divisor = -_sum(gradient * divided[1], factor.shape) * by_scaled
        rounded = _rounded(weight * factor, ctx.grid).to(gradient.dtype)
        unclipped = _hardtanh_backward.grad_input(gradient, rounded, *ctx.grid.unclipped, grad_input=rounded)
        by_factor = _sum(unclipped * weight, factor.shape) * by_scaled
        return unclipped.mul_(factor * by_scaled), by_factor, by_divisor, None, None


class LearnedRange(torch.autograd.Function):
    """Rounding to the grid of the range `low` to `high`, with gradients of both ends as well.

    With n = `maximum` - `minimum`, the step is s = (high - low) / n. A value in the range becomes x + s * e, where e is
    its rounding error in steps, a value below it becomes low, and one above it high. So the derivatives by (low, high)
    are (-e / n, e / n), (1, 0) and (0, 1): those of LSQ+ by step and offset, in other coordinates. That the zero point
    is an integer is neglected, as the rounding of x is.

    `low` and `high` are of one shape, which broadcasts to that of x. Their gradients are multiplied by `factor`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, grid: Grid, factor: float | torch.Tensor
    ) -> torch.Tensor:
        result, rounded = _round(x, grid, keep=True)
        ctx.save_for_backward(x, rounded)
        ctx.grid, ctx.factor, ctx.shape = grid, factor, low.shape
        return result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, rounded = ctx.saved_tensors
        grid: Grid = ctx.grid
        lower, upper = grid.unclipped
        inside = _between(gradient, rounded, lower, upper)
        if not any(ctx.needs_input_grad[1:3]):
            return inside, None, None, None, None
        errors = rounded - (x if _is_exact(x) else x.float()) * grid.inverse
        stretch = _sum(errors.mul_(inside), ctx.shape) / (grid.maximum - grid.minimum)
        below = _sum(_between(gradient, rounded, -torch.inf, lower), ctx.shape)
        above = _sum(_between(gradient, rounded, upper, torch.inf), ctx.shape)
        return inside, (below - stretch) * ctx.factor, (above + stretch) * ctx.factor, None, None


def _between(
    gradient: torch.Tensor, values: torch.Tensor, low: float | torch.Tensor, high: float | torch.Tensor
) -> torch.Tensor:
    """Return the gradient where a value lies strictly between two limits, else 0."""
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor):
        return _hardtanh_backward(gradient, values, low, high)  # type: ignore[no-any-return]
    return torch.where((values > low) & (values < high), gradient, 0)


def _round(x: torch.Tensor, grid: Grid, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the grid, of x's type, and the integers before they were clipped, if they are to be kept.

    All arithmetic is float32, or x's.
    """
    rounded, limits = _rounded(x, grid), grid.limits
    if _is_exact(x):
        out = torch.empty_like(x) if keep else rounded
        return torch.clamp(rounded, *limits, out=out).mul_(grid.scale), rounded
    # bfloat16 represents every integer to 256, and rounding larger ones moves none across the limits.
    kept = torch.empty_like(x).copy_(rounded) if keep else rounded
    return torch.empty_like(x).copy_(rounded.clamp_(*limits).mul_(grid.scale)), kept


def _rounded(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the integers of a grid, not clipped."""
    # empty_like keeps the strides also for a single channel, whose layout is ambiguous: the next convolution would
    # otherwise fall back to the slower layout.
    rounded = torch.empty_like(x, dtype=x.dtype if _is_exact(x) else torch.float32)
    if _is_exact(x):
        return torch.mul(x, grid.inverse, out=rounded).round_()
    return rounded.copy_(x).mul_(grid.inverse).round_()


def _is_exact(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)


def _sum(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the sum over all axes along which `shape` broadcasts, at least float32."""
    return (values if _is_exact(values) else values.float()).sum_to_size(shape)
