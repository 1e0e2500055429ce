"""Fake quantization against torch's own, bit for bit, and when it observes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe_quant.fake_quant import ActivationFakeQuant, StraightThrough, WeightFakeQuant, qat_qconfig
from ptpipe_torch import TrainingCallback
from ptpipe_torch.int8.observers import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver


def activation(**options: bool | float) -> ActivationFakeQuant:
    return qat_qconfig(**{"per_channel": True, "reduce_range": False, "freeze_at": 1.0, **options}).activation()


def weight(*, per_channel: bool, narrow: bool = False) -> WeightFakeQuant:
    return qat_qconfig(per_channel=per_channel, reduce_range=False, freeze_at=1.0, narrow_weights=narrow).weight()


def reference(x, scale, zero_point, maximum):
    """Values and gradient of torch's own operator."""
    x = x.detach().clone().requires_grad_()
    y = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, maximum)
    y.backward(torch.arange(1.0, y.numel() + 1).view_as(y))
    return y.detach(), x.grad


def ours(x, scale, zero_point, maximum):
    x = x.detach().clone().requires_grad_()
    scale_1 = torch.tensor(scale)
    inverse = scale_1.reciprocal().item()
    y = StraightThrough.apply(x, inverse, scale_1.item(), -zero_point, maximum - zero_point)
    y.backward(torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y))
    return y.detach(), x.grad


@settings(deadline=None, max_examples=200)
@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=60),
    scale=st.floats(0.0009765625, 4, width=32),
    zero_point=st.integers(0, 255),
    maximum=st.sampled_from([127, 255]),
)
def test_values_and_gradients_are_torchs_own(values, scale, zero_point, maximum) -> None:
    zero_point = min(zero_point, maximum)
    x = torch.tensor(values, dtype=torch.float32)
    for mine, theirs in zip(ours(x, scale, zero_point, maximum), reference(x, scale, zero_point, maximum), strict=True):
        assert torch.equal(mine, theirs)


def test_ties_and_both_ends_of_the_range_are_torchs_own() -> None:
    steps = torch.arange(-20, 600) / 2  # every half step, in front of 0 and behind 255
    for scale, zero_point in itertools.product((1.0, 0.1, 0.0625), (0, 3, 128)):
        x = (steps - zero_point) * scale
        mine, theirs = ours(x, scale, zero_point, 255), reference(x, scale, zero_point, 255)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
        assert 0 < (mine[1] == 0).sum() < len(x)  # some clipped, some not


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_arithmetic_is_float32(dtype) -> None:
    x = torch.linspace(-3, 9, 4001).to(dtype)
    for scale, zero_point in ((0.02, 10), (1 / 3, 128)):
        values, gradient = ours(x, scale, zero_point, 255)
        exact_values, exact_gradient = reference(x.float(), scale, zero_point, 255)
        assert torch.equal(values, exact_values.to(dtype))
        assert torch.equal(gradient == 0, exact_gradient == 0)
        assert gradient.dtype is dtype


def test_not_a_number_stays_one() -> None:
    y = StraightThrough.apply(torch.tensor([float("nan"), 1.0]), 10.0, 0.1, 0, 255)
    assert y[0].isnan()
    assert y[1] == 1.0


def test_the_layout_of_one_channel_images_is_kept() -> None:
    x = torch.randn(4, 1, 5, 5).to(memory_format=torch.channels_last)
    assert x.stride() == (25, 1, 5, 1)
    assert StraightThrough.apply(x, 10.0, 0.1, 0, 255).stride() == (25, 1, 5, 1)
    assert StraightThrough.apply(x.bfloat16(), 10.0, 0.1, 0, 255).stride() == (25, 1, 5, 1)


class TestWeights:
    @pytest.mark.parametrize("shape", [(8, 3, 3, 3), (8, 1, 3, 3), (5, 7), (4, 2, 3)])
    @pytest.mark.parametrize("per_channel", [True, False])
    @pytest.mark.parametrize(("narrow", "limits"), [(False, (-128, 127)), (True, (-64, 64))])
    def test_values_gradients_and_scales_are_torchs_own(self, shape, per_channel, narrow, limits) -> None:
        theirs = FusedMovingAvgObsFakeQuantize(
            observer=type(weight(per_channel=per_channel).activation_post_process),
            quant_min=limits[0],
            quant_max=limits[1],
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        )
        mine = weight(per_channel=per_channel, narrow=narrow)
        first, second = (
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in (1, 1)
        )
        theirs.activation_post_process(
            first
        )  # by torch's Python, whose scales its own kernels round a little otherwise
        scale, zero_point = theirs.activation_post_process.calculate_qparams()
        if per_channel:
            expected = torch.fake_quantize_per_channel_affine(first, scale, zero_point.float(), 0, *limits)
        else:
            expected = torch.fake_quantize_per_tensor_affine(first, scale, zero_point.int(), *limits)
        result = mine(second)
        assert torch.equal(result, expected)
        for y, x in ((result, second), (expected, first)):
            (y * torch.arange(y.numel()).view_as(y)).sum().backward()
            assert x.grad is not None
        assert torch.equal(second.grad, first.grad)
        for kept, found in zip(mine.calculate_qparams(), (scale, zero_point), strict=True):
            assert torch.equal(kept, found)
        assert torch.equal(mine.scale, scale)

    def test_the_range_follows_the_weights_in_eval_mode_as_well(self) -> None:
        fake_quant = weight(per_channel=True).eval()
        for factor in (1.0, 7.0, 0.5):
            fake_quant(torch.ones(3, 4) * factor)
            assert torch.equal(fake_quant.scale, torch.full((3,), factor) / 127.5)

    def test_weights_of_nothing_stay_nothing(self) -> None:
        assert torch.equal(weight(per_channel=True)(torch.zeros(3, 4)), torch.zeros(3, 4))


class TestObserving:
    def test_the_range_is_a_moving_average_in_training_only(self) -> None:
        fake_quant, expected = activation(), MovingAverageMinMaxObserver()
        for scale in (1.0, 3.0, 0.2):
            x = torch.randn(50) * scale
            fake_quant.train()(x)
            expected(x)
            fake_quant.eval()(x * 100)
            assert fake_quant.activation_post_process.min_val == expected.min_val
            assert fake_quant.activation_post_process.max_val == expected.max_val
        assert [value.item() for value in expected.calculate_qparams()] == pytest.approx(
            [fake_quant.scale.item(), fake_quant.zero_point.item()], abs=0
        )

    def test_several_calls_in_one_pass_count_as_one(self) -> None:
        fake_quant = activation().train()
        before = torch.tensor([-1.0, 2.0])
        fake_quant(before)
        fake_quant(torch.tensor([-3.0, 0.0]), first=True)
        fake_quant(torch.tensor([0.0, 8.0]), first=False)
        fake_quant(torch.tensor([-2.0, 1.0]), first=False)
        observer = fake_quant.activation_post_process
        assert observer.min_val.item() == pytest.approx(-1 + 0.01 * (-3 + 1))
        assert observer.max_val.item() == pytest.approx(2 + 0.01 * (8 - 2))

    def test_the_first_batch_of_several_calls_is_seen_whole(self) -> None:
        fake_quant = activation().train()
        fake_quant(torch.tensor([-3.0, 0.0]), first=True)
        fake_quant(torch.tensor([0.0, 8.0]), first=False)
        observer = fake_quant.activation_post_process
        assert (observer.min_val, observer.max_val) == (-3, 8)

    def test_before_anything_was_seen_values_go_through(self) -> None:
        x = torch.tensor([0.123, 4.567])
        assert torch.equal(activation().eval()(x), x)

    def test_from_freeze_at_on_the_range_stays(self) -> None:
        fake_quant = activation(freeze_at=0.5).train()
        assert isinstance(fake_quant, TrainingCallback)
        for fraction, maximum, expected in ((0.0, 1.0, 1.0), (0.49, 2.0, 1.01), (0.5, 50.0, 1.01), (0.9, 50.0, 1.01)):
            fake_quant.on_progress(fraction)
            fake_quant(torch.tensor([0.0, maximum]))
            assert fake_quant.activation_post_process.max_val.item() == pytest.approx(expected)
        again = activation(freeze_at=0.5).train()
        again.load_state_dict(fake_quant.state_dict())
        again(torch.tensor([0.0, 50.0]))  # frozen by its state alone
        assert again.activation_post_process.max_val.item() == pytest.approx(1.01)

    def test_reduced_range_ends_at_127(self) -> None:
        fake_quant = activation(reduce_range=True).train()
        y = fake_quant(torch.linspace(0, 10, 1000))
        assert len(y.unique()) == 128
        assert fake_quant.scale.item() == pytest.approx(10 / 127)

    def test_the_kernel_for_accelerators_gives_the_same(self) -> None:
        # No accelerator is needed to run it: torch's fused operator is there on every device.
        torch.manual_seed(0)
        fused, plain = activation().train(), activation().train()
        for scale in (1.0, 2.0, 0.3):
            x = torch.randn(200) * scale
            one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, z = fused._forward_in_one_kernel(one), plain(other)
            torch.testing.assert_close(y, z)
            (y.sum() + z.sum()).backward()
            assert torch.equal(one.grad, other.grad)
        state = {name: value.float() for name, value in fused.state_dict().items()}
        torch.testing.assert_close(state, {name: value.float() for name, value in plain.state_dict().items()})
        before = {name: value.clone() for name, value in fused.state_dict().items()}
        fused.eval()._forward_in_one_kernel(torch.randn(9) * 100)
        assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())

    def test_the_state_has_torchs_own_names(self) -> None:
        stock = FusedMovingAvgObsFakeQuantize(quant_min=0, quant_max=255)
        assert list(activation().state_dict()) == list(stock.state_dict())
