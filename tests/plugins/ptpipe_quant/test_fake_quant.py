"""Fake quantization against torch's own, bit for bit, and when it observes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe_quant.fake_quant import (
    ActivationFakeQuant,
    FixedFakeQuant,
    LearnedActivationFakeQuant,
    LearnedWeightFakeQuant,
    WeightFakeQuant,
    qat_qconfig,
    use_fixed_grids,
)
from ptpipe_torch import TrainingCallback, Undecayed
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.observers import FusedMovingAvgObsFakeQuantize
from ptpipe_torch.int8.straight_through import Grid, StraightThrough

with deprecations_silenced():
    from torch.ao.quantization import fake_quantize


def activation(**options: bool | float) -> ActivationFakeQuant:
    return qat_qconfig(**{"per_channel": True, "freeze_at": 1.0, **options}).activation()


def weight(*, per_channel: bool, narrow: bool = False) -> WeightFakeQuant:
    return qat_qconfig(per_channel=per_channel, freeze_at=1.0, narrow_weights=narrow).weight()


def reference(x, scale, zero_point, maximum):
    """Values and gradient of torch's own operator."""
    x = x.detach().clone().requires_grad_()
    y = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, maximum)
    y.backward(torch.arange(1.0, y.numel() + 1).view_as(y))
    return y.detach(), x.grad


def ours(x, scale, zero_point, maximum):
    """Values and gradient of ours: the same for a parameter and for a result of other operators."""
    scale_1 = torch.tensor(scale)
    grid = Grid(scale_1.reciprocal().item(), scale_1.item(), -zero_point, maximum - zero_point)
    found = []
    for is_parameter in (True, False):
        x = x.detach().clone().requires_grad_()
        y = StraightThrough.apply(x if is_parameter else x.clone(), grid)
        y.backward(torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y))
        found.append((y.detach(), x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    return found[0]


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


def test_no_copy_of_a_parameter_is_kept() -> None:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        for x in (parameter := torch.ones(3, requires_grad=True), parameter * 2):
            StraightThrough.apply(x, Grid(10.0, 0.1, 0, 255))
    addresses = [tensor.data_ptr() == parameter.data_ptr() for tensor in kept if tensor.shape == (3,)]
    assert addresses == [True, False]


def test_not_a_number_stays_one() -> None:
    y = StraightThrough.apply(torch.tensor([float("nan"), 1.0]), Grid(10.0, 0.1, 0, 255))
    assert y[0].isnan()
    assert y[1] == 1.0


def test_the_layout_of_one_channel_images_is_kept() -> None:
    x = torch.randn(4, 1, 5, 5).to(memory_format=torch.channels_last)
    assert x.stride() == (25, 1, 5, 1)
    assert StraightThrough.apply(x, Grid(10.0, 0.1, 0, 255)).stride() == (25, 1, 5, 1)
    assert StraightThrough.apply(x.bfloat16(), Grid(10.0, 0.1, 0, 255)).stride() == (25, 1, 5, 1)


class TestWeights:
    @pytest.mark.parametrize("shape", [(8, 3, 3, 3), (8, 1, 3, 3), (5, 7), (4, 2, 3)])
    @pytest.mark.parametrize("per_channel", [True, False])
    @pytest.mark.parametrize(("narrow", "limits"), [(False, (-127, 127)), (True, (-64, 64))])
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
            assert torch.equal(fake_quant.scale, torch.full((3,), factor) / 127)

    def test_weights_of_nothing_stay_nothing(self) -> None:
        assert torch.equal(weight(per_channel=True)(torch.zeros(3, 4)), torch.zeros(3, 4))


class TestObserving:
    def test_the_range_grows_at_once_and_shrinks_slowly_in_training_only(self) -> None:
        fake_quant = activation().train()
        observer = fake_quant.activation_post_process
        for batch, expected in (
            *(((-1.0, 2.0), (-1.0, 2.0)), ((-0.5, 8.0), (-0.995, 8.0)), ((-3.0, 4.0), (-3.0, 7.96))),
            *(((-1.0, 1.0), (-2.98, 7.8904)), ((1.0, 20.0), (-2.9402, 20.0))),
        ):
            x = torch.tensor(batch)
            assert (fake_quant.train()(x) - x).abs().max() <= 0.501 * fake_quant.scale  # nothing is cut off
            fake_quant.eval()(x * 100)
            assert (observer.min_val.item(), observer.max_val.item()) == pytest.approx(expected)
            scale, zero_point = observer.calculate_qparams()
            assert (fake_quant.scale, fake_quant.zero_point) == (scale, zero_point)

    def test_several_calls_in_one_pass_count_as_one(self) -> None:
        fake_quant = activation().train()
        fake_quant(torch.tensor([-4.0, 2.0]))
        fake_quant(torch.tensor([-3.0, 0.0]), first=True)
        fake_quant(torch.tensor([0.0, 8.0]), first=False)
        fake_quant(torch.tensor([-2.0, 1.0]), first=False)
        observer = fake_quant.activation_post_process
        assert observer.min_val.item() == pytest.approx(-4 + 0.01 * (-3 + 4))
        assert observer.max_val.item() == 8

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
        for fraction, maximum, expected in ((0.0, 2.0, 2.0), (0.49, 1.0, 1.99), (0.5, 50.0, 1.99), (0.9, 50.0, 1.99)):
            fake_quant.on_progress(fraction)
            fake_quant(torch.tensor([0.0, maximum]))
            assert fake_quant.activation_post_process.max_val.item() == pytest.approx(expected)
        again = activation(freeze_at=0.5).train()
        again.load_state_dict(fake_quant.state_dict())
        again(torch.tensor([0.0, 50.0]))  # frozen by its state alone
        assert again.activation_post_process.max_val.item() == pytest.approx(1.99)

    @pytest.mark.parametrize("calls", [[None], [True, False, False]], ids=["one call", "several calls"])
    def test_on_an_accelerator_it_gives_the_same(self, calls: list[bool | None]) -> None:
        # No accelerator is needed to run it: torch's fused operator is there on every device.
        torch.manual_seed(0)
        fused, plain = (activation(freeze_at=0.5).train() for _ in range(2))
        for fraction, scale in ((0.0, 1.0), (0.2, 2.0), (0.4, 0.3), (0.6, 100.0)):
            fused.on_progress(fraction)
            plain.on_progress(fraction)
            for first in calls:
                x = torch.randn(200) * scale
                one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
                y, z = fused._forward_without_waiting(one, first), plain(other, first)
                torch.testing.assert_close(y, z)
                (y.sum() + z.sum()).backward()
                assert torch.equal(one.grad, other.grad)
        state = {name: value.float() for name, value in fused.state_dict().items()}
        torch.testing.assert_close(state, {name: value.float() for name, value in plain.state_dict().items()})
        before = {name: value.clone() for name, value in fused.state_dict().items()}
        fused.eval()._forward_without_waiting(torch.randn(9) * 100, calls[0])
        assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())

    def test_on_an_accelerator_the_range_is_that_of_all_workers(self) -> None:
        fake_quant = activation().train()
        fake_quant.all_reduce_range = lambda low, high: (low * 2, high * 3)
        fake_quant._forward_without_waiting(torch.tensor([-1.0, 1.0]), None)
        assert (fake_quant.activation_post_process.min_val, fake_quant.activation_post_process.max_val) == (-2, 3)
        assert fake_quant.scale.item() == pytest.approx(5 / 255)

    def test_the_state_has_torchs_own_names(self) -> None:
        stock = FusedMovingAvgObsFakeQuantize(quant_min=0, quant_max=255)
        assert list(activation().state_dict()) == list(stock.state_dict())


class TestFixed:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("limits", ["range_0to1", "range_neg1to1"])
    def test_it_has_the_bits_of_torchs_own(self, limits, dtype: torch.dtype) -> None:
        x = torch.linspace(-1.5, 1.5, 5000).to(dtype)
        with deprecations_silenced():
            factory = getattr(fake_quantize, f"default_fixed_qparams_{limits}_fake_quant")
            stock, fixed = factory(), factory()
            use_fixed_grids(torch.nn.Sequential(fixed))
        assert isinstance(fixed, FixedFakeQuant)
        for is_enabled in (True, False):
            results = []
            for fake_quant in (stock, fixed):
                fake_quant.enable_fake_quant(is_enabled)
                values = x.clone().requires_grad_()
                y = fake_quant(values)
                y.backward(x)
                results.append((y, values.grad))
            assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
            assert len(results[1][0].unique()) == (256 if is_enabled else len(x.unique()))


LEARNED = {"freeze_at": 1.0, "learned_step_size": True}


def learned_activation(*batches: torch.Tensor) -> LearnedActivationFakeQuant:
    """One that has observed these batches, in eval mode."""
    fake_quant = qat_qconfig(per_channel=True, **LEARNED).activation().train()
    for batch in batches:
        fake_quant(batch)
    return fake_quant.eval()


def learned_weight(like: torch.Tensor, *, per_channel: bool) -> LearnedWeightFakeQuant:
    fake_quant = qat_qconfig(per_channel=per_channel, **LEARNED).weight()
    fake_quant.fit(like)
    return fake_quant


def set_parts(fake_quant, *parts: float) -> None:
    with torch.no_grad():
        fake_quant.log_part.copy_(torch.tensor(parts).log())


def backward(y: torch.Tensor) -> None:
    (y * torch.cos(torch.arange(y.numel()).view_as(y) / 7)).sum().backward()


class TestLearned:
    x = torch.randn(40, 25, generator=torch.Generator().manual_seed(3))

    @pytest.mark.parametrize("which", ["activation", "per channel", "per tensor"])
    def test_at_first_it_is_the_observed_range(self, which) -> None:
        if which == "activation":
            mine, other = learned_activation(self.x), activation().train()
        else:
            mine = learned_weight(self.x, per_channel=which == "per channel")
            other = weight(per_channel=which == "per channel")
        other(self.x)
        one, two = self.x.clone().requires_grad_(), self.x.clone().requires_grad_()
        ours, theirs = mine(one), other.eval()(two)
        backward(ours)
        backward(theirs)
        assert torch.equal(ours, theirs)
        assert torch.equal(one.grad, two.grad)
        assert mine.log_part.grad.shape == ((2,) if which == "activation" else (40,) if "channel" in which else (1,))
        assert mine.log_part.grad.abs().min() > 0
        for kept, found in zip(mine.calculate_qparams(), other.calculate_qparams(), strict=True):
            assert torch.equal(kept, found)

    @pytest.mark.parametrize("parts", [(0.9, 0.4), (0.3, 1.0), (1 / 8, 1 / 8), (5.0, 0.001)])
    def test_activations_are_rounded_to_the_grid_that_is_converted(self, parts) -> None:
        fake_quant = learned_activation(self.x)
        set_parts(fake_quant, *parts)
        scale, zero_point = fake_quant.calculate_qparams()
        low, high = (min(max(part, 1 / 8), 1) * end.item() for part, end in zip(parts, self.x.aminmax(), strict=True))
        assert scale.dtype is torch.float32
        assert scale.item() == pytest.approx((high - low) / 255)
        assert zero_point.item() == pytest.approx(-low / scale.item(), abs=0.51)
        expected = torch.fake_quantize_per_tensor_affine(self.x, scale.item(), int(zero_point.item()), 0, 255)
        assert torch.equal(fake_quant(self.x), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("calls", [[None], [True, False, False]], ids=["one call", "several calls"])
    def test_on_an_accelerator_it_has_the_same_bits(self, calls: list[bool | None], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        waiting, other = (learned_activation().train() for _ in range(2))
        other._grid = lambda *recorded: other._grid_on_device(2)
        for step, scale in enumerate((1.0, 2.0, 0.3, 100.0)):
            for fake_quant in (waiting, other):
                fake_quant.on_progress(step / 4)
                set_parts(fake_quant, 1 - 0.1 * step, 1 - 0.3 * step)
            for first in calls:
                x, seeds = (torch.randn(3, 77).to(dtype) * scale for _ in range(2))
                results = []
                for fake_quant, forward in ((waiting, waiting.forward), (other, other._forward_without_waiting)):
                    values = x.clone().requires_grad_()
                    y = forward(values, first)
                    (y * seeds).sum().backward()
                    results.append([y, values.grad, fake_quant.log_part.grad, *fake_quant.state_dict().values()])
                assert all(torch.equal(one, same) for one, same in zip(*results, strict=True))

    def test_on_an_accelerator_values_pass_until_there_is_a_range(self) -> None:
        fake_quant = learned_activation()
        x = self.x.clone().requires_grad_()
        y = fake_quant._forward_without_waiting(x, None)
        y.sum().backward()
        assert torch.equal(y, x)
        assert torch.equal(x.grad, torch.ones_like(x))
        assert not fake_quant.log_part.grad.any()

    @pytest.mark.parametrize("per_channel", [True, False])
    def test_weights_are_rounded_to_the_grid_that_is_converted(self, per_channel) -> None:
        fake_quant = learned_weight(self.x, per_channel=per_channel)
        parts = torch.linspace(0.2, 1, 40 if per_channel else 1)
        set_parts(fake_quant, *parts.tolist())
        y = fake_quant(self.x)
        scales, zero_points = fake_quant.calculate_qparams()
        torch.testing.assert_close(scales, (self.x.abs().amax([1] if per_channel else [0, 1]) * parts / 127))
        assert not zero_points.any()
        assert torch.equal(fake_quant.scale, scales)
        limits = 127 * scales.reshape(-1, 1)
        clipped = self.x.clamp(-limits, limits)  # by conversion: integers of torch's types begin at -128
        with deprecations_silenced():
            if per_channel:
                int8 = torch.quantize_per_channel(clipped, scales, zero_points, 0, torch.qint8)
            else:
                int8 = torch.quantize_per_tensor(clipped, scales.item(), 0, torch.qint8)
            assert torch.equal(y, int8.dequantize())

    def test_a_range_from_zero_keeps_its_zero_point(self) -> None:
        fake_quant = learned_activation(self.x.relu())
        backward(fake_quant(self.x.relu()))
        assert fake_quant.log_part.grad[0] == 0 != fake_quant.log_part.grad[1]
        set_parts(fake_quant, 0.3, 0.6)
        assert fake_quant.calculate_qparams()[1].item() == 0

    def test_a_step_of_sgd_is_that_of_lsq(self) -> None:
        """By torch's own learnable operator, with the gradient scale of the paper."""
        x, lr, part = self.x.abs(), 1e-5, 0.8
        fake_quant = learned_activation(x)
        set_parts(fake_quant, part, part)
        before = fake_quant.calculate_qparams()[0]
        step, offset = before.clone().requires_grad_(), torch.zeros(1)
        g = 1 / math.sqrt(25 * 255)
        backward(torch._fake_quantize_learnable_per_tensor_affine(x, step, offset, 0, 255, g))
        backward(fake_quant(x))
        torch.optim.SGD([fake_quant.log_part], lr).step()
        change = (fake_quant.calculate_qparams()[0] - before).item()
        assert change == pytest.approx(-lr * step.grad.item(), rel=0.01)
        assert change != 0

    def test_so_it_is_for_each_channel_of_weights(self) -> None:
        lr = 1e-5
        fake_quant = learned_weight(self.x, per_channel=True)
        set_parts(fake_quant, *[0.7] * 40)
        backward(fake_quant(self.x))
        before = fake_quant.scale.clone()
        step, offset = before.clone().requires_grad_(), torch.zeros(40)
        g = 1 / math.sqrt(25 * 127)
        backward(torch._fake_quantize_learnable_per_channel_affine(self.x, step, offset, 0, -127, 127, g))
        torch.optim.SGD([fake_quant.log_part], lr).step()
        fake_quant(self.x)
        torch.testing.assert_close(fake_quant.scale - before, -lr * step.grad, rtol=0.02, atol=1e-8)

    def test_the_optimizers_steps_end_at_the_limits(self) -> None:
        for fake_quant in (learned_activation(self.x), learned_weight(self.x, per_channel=True)):
            assert isinstance(fake_quant, TrainingCallback)
            with torch.no_grad():
                fake_quant.log_part.copy_(torch.linspace(-9, 9, fake_quant.log_part.numel()))
            fake_quant.on_progress(0.5)
            ends = fake_quant.log_part.exp()
            assert (ends.min().item(), ends.max().item()) == (pytest.approx(1 / 8), 1.0)
            backward(fake_quant(self.x))
            assert (fake_quant.log_part.grad != 0).all()  # also at the limits: it can leave them

    def test_dead_channels_do_no_harm(self) -> None:
        x = self.x.clone()
        x[0], x[1] = 0, x[1] * 1e-6
        fake_quant = learned_weight(x, per_channel=True)
        set_parts(fake_quant, *[0.5] * 40)
        y = fake_quant(x)
        backward(y)
        assert y.isfinite().all()
        assert fake_quant.log_part.grad[0] == 0
        assert fake_quant.log_part.grad[1].abs() < fake_quant.log_part.grad[2:].abs().max()

    def test_the_parameters_are_exempt_from_decay_and_in_the_state(self) -> None:
        fake_quant = learned_activation(self.x)
        assert isinstance(fake_quant, Undecayed)
        assert not isinstance(activation(), Undecayed)
        assert [name for name, _ in fake_quant.named_parameters()] == list(fake_quant.undecayed)
        set_parts(fake_quant, 0.5, 0.5)
        again = learned_activation(torch.ones(1))
        again.load_state_dict(fake_quant.state_dict())
        assert torch.equal(again(self.x), fake_quant(self.x))
