"""Straight-through gradients, against finite differences in float64 and what torch's own operators give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptpipe_torch.int8.straight_through import FoldedWeights, Grid, LearnedRange, StraightThrough

F64 = torch.float64


def apply(x: torch.Tensor, low: Any, high: Any, maximum: int = 255, factor: float = 1.0) -> torch.Tensor:
    """Round to the grid of a range, whose zero point is exact if low is a multiple of the step."""
    scale = ((high - low) / maximum).detach()
    zero_point = int((-low / scale).round().max())
    grid = Grid(1 / scale, scale, -zero_point, maximum - zero_point)
    return LearnedRange.apply(x, low, high, grid, torch.tensor(factor, dtype=x.dtype))


def surrogate(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The function whose true gradient the straight-through one is: rounding errors, in steps, stay as they are."""
    inside = x + (high - low) / 255 * errors
    return torch.where(errors.isneginf(), low, torch.where(errors.isposinf(), high, inside))


def errors_of(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    scale = (high - low) / 255
    steps = x / scale
    clipped = torch.where(steps.round() < round(low / scale), -torch.inf, torch.inf)
    inside = (steps.round() >= round(low / scale)) & (steps.round() <= round(high / scale))
    return torch.where(inside, steps.round() - steps, clipped)


@pytest.mark.parametrize("divided", [True, False])
def test_folded_weights_are_the_product_rounded_and_divided(divided: bool) -> None:
    random = torch.Generator().manual_seed(0)
    weight, seeds = (torch.randn(5, 3, 3, 3, dtype=F64, generator=random) for _ in range(2))
    factor, divisor = (torch.rand(5, 1, 1, 1, dtype=F64, generator=random) + 0.5 for _ in range(2))
    grid = Grid(50.0, 0.02, -64, 63)  # to 1.28, beyond which some are clipped

    def folded(weight: Any, factor: Any, divisor: Any) -> torch.Tensor:
        return FoldedWeights.apply(weight, factor, divisor, (weight * factor).detach(), grid)

    def composed(weight: Any, factor: Any, divisor: Any) -> torch.Tensor:
        scaled = StraightThrough.apply(weight * factor, grid)
        return scaled if divisor is None else scaled / divisor

    results = []
    for function in (folded, composed):
        values = [value.clone().requires_grad_() for value in (weight, factor, divisor)]
        result = function(*values[:2], values[2] if divided else None)
        (result * seeds).sum().backward()
        results.append([result, *(value.grad for value in values)])
    assert ((weight * factor).abs() > 1.3).any()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(-51 / 255, 204 / 255), (0.0, 3.0), (-2.0, 0.0)])
def test_gradients_are_finite_differences_in_float64(low: float, high: float) -> None:
    x = torch.linspace(1.5 * low - 0.1, 1.5 * high + 0.1, 1001, dtype=F64)
    weights = torch.sin(torch.arange(1001.0, dtype=F64))
    ends = torch.tensor([low, high], dtype=F64, requires_grad=True)
    value = x.clone().requires_grad_()
    (apply(value, *ends) * weights).sum().backward()
    errors, delta = errors_of(x, low, high), 1e-6
    for end, step in enumerate(torch.eye(2, dtype=F64) * delta):
        more, less = (surrogate(x, *(ends.detach() + sign * step), errors) for sign in (1, -1))
        assert ends.grad[end].item() == pytest.approx(((more - less) * weights).sum().item() / (2 * delta), rel=1e-7)
    more, less = (surrogate(x + sign * delta, *ends.detach(), errors) for sign in (1, -1))
    torch.testing.assert_close(value.grad, (more - less) * weights / (2 * delta), rtol=1e-7, atol=1e-9)
    assert errors.isneginf().any() == (low < 0) or low == 0.0
    assert errors.isposinf().any()


def test_they_are_torchs_own_of_step_and_offset() -> None:
    """By the chain rule: low = -z * s, high = (255 - z) * s."""
    scale, zero_point, factor = 0.03125, 40.0, 0.5  # a power of two: both round alike
    x = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)) * 5
    step, offset = torch.tensor([scale]).requires_grad_(), torch.tensor([zero_point]).requires_grad_()
    theirs = torch._fake_quantize_learnable_per_tensor_affine(x, step, offset, 0, 255, factor)
    ends = torch.tensor([-zero_point * scale, (255 - zero_point) * scale]).requires_grad_()
    ours = apply(x, *ends, factor=factor)
    assert torch.equal(ours, theirs)
    weights = torch.cos(torch.arange(2000.0)).view_as(x)
    for y in (ours, theirs):
        (y * weights).sum().backward()
    low, high = ends.grad
    assert (-zero_point * low + (255 - zero_point) * high).item() == pytest.approx(step.grad.item(), rel=1e-4)
    assert (-scale * (low + high)).item() == pytest.approx(offset.grad.item(), rel=1e-4)


def test_each_channel_has_its_own() -> None:
    x = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    limit = (torch.arange(1.0, 6) / 4).reshape(5, 1, 1, 1)
    scale = torch.full((5, 1, 1, 1), 2.0) * limit / 255

    def run(values: torch.Tensor, limits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ends = limits.clone().requires_grad_()
        y = LearnedRange.apply(values, -ends, ends, Grid(1 / scales, scales, -128, 127), torch.tensor(2.0))
        (y * torch.sin(values * 100)).sum().backward()
        assert ends.grad is not None
        return ends.grad

    whole = run(x, limit, scale)
    assert whole.shape == limit.shape
    for number in range(5):
        part = slice(number, number + 1)
        torch.testing.assert_close(run(x[part], limit[part], scale[part]), whole[part], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_ranges_have_float32_gradients(dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 9, 4001).to(dtype)
    gradients = []
    for x in (values, values.float()):
        ends = torch.tensor([-1.0, 4.0]).requires_grad_()
        y = apply(x, *ends)
        (y.float() * torch.cos(x.float())).sum().backward()
        gradients.append(ends.grad)
        assert y.dtype is x.dtype
    assert gradients[0].dtype is torch.float32
    torch.testing.assert_close(*gradients, rtol=0.02, atol=1.0)  # of thousands of values; gradients have 8 bits


def test_what_is_frozen_has_no_gradient() -> None:
    x = torch.randn(9).requires_grad_()
    ends = torch.tensor([-1.0, 1.0])
    apply(x, *ends).sum().backward()
    assert ends.grad is None
    assert x.grad is not None
