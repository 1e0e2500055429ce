"""In front of HardSwish, 3 is a whole number of steps: calibrated, trained, converted and in the file."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ptpipe_quant.transforms import prepare_qat, prepare_static
from ptpipe_torch.int8.fx import convert
from ptpipe_torch.int8.hardswish_grids import has_whole_steps, whole_steps
from ptpipe_torch.int8.observers import ACTIVATION_OBSERVERS

from ....signatures import stored_pictures

SCHEME = {
    "inputs": stored_pictures((3, 8, 8)),
    "backend": "fbgemm",
    "weights": "per_channel",
    "skip": [],
}


class Gated(nn.Module):
    """One HardSwish behind a convolution, one that reads the network's input, and one called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hardswish, self.other = nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.Conv2d(3, 4, 1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> Any:
        first = self.hardswish(self.conv(x))
        return first, self.relu(self.other(x)), nn.functional.hardswish(self.other(nn.functional.hardswish(x)))


def network(*, size: float = 3.0) -> Gated:
    torch.manual_seed(0)
    gated = Gated()
    with torch.no_grad():
        for parameter in gated.parameters():
            parameter.mul_(size)
    return gated


def flagged(prepared: nn.Module) -> list[Any]:
    return [part for part in prepared.modules() if has_whole_steps(part)]


def fake_quants_of(training: nn.Module) -> list[Any]:
    return [part for part in training.modules() if has_whole_steps(getattr(part, "activation_post_process", None))]


def num_steps(scale: torch.Tensor) -> float:
    return 3 / float(scale)


limits = st.floats(0, 60, width=32)


@given(limits | st.floats(2.5, 3.5, width=32), limits, st.sampled_from([127, 255]))
@example(2.875, 30.0, 255)
def test_a_range_gets_little_wider_and_loses_nothing(low: float, high: float, quant_max: int) -> None:
    ends = torch.tensor(-low), torch.tensor(high)
    scale = torch.clamp((ends[1] - ends[0]) / quant_max, min=1e-7)
    zero_point = (-torch.round(ends[0] / scale)).clamp(0, quant_max).int()
    wider, offset = whole_steps(scale, zero_point, ends[0], 0)
    assert offset.dtype is zero_point.dtype
    if torch.equal(wider, scale):
        assert offset == zero_point
        is_bend_outside = -low > -3 + scale / 2.0001  # by half a step, so that no integer stands for it
        assert scale > 3 / 16.0001 or is_bend_outside or abs(num_steps(scale) - round(num_steps(scale))) < 1e-4
        return
    assert scale <= wider <= scale * (1 + 1 / 16) * 1.0001
    assert abs(num_steps(wider) - round(num_steps(wider))) < 1e-4
    assert round(num_steps(wider)) <= offset <= quant_max
    assert -low >= -(float(offset) + 0.501) * float(wider)
    assert high <= (quant_max - float(offset) + 0.501) * float(wider)


@pytest.mark.parametrize("observer", sorted(set(ACTIVATION_OBSERVERS) - {"histogram"}))
def test_calibrated(observer: str) -> None:
    prepared = prepare_static(network(), observer=observer, calibrating=True, **SCHEME)
    found = flagged(prepared)
    assert len(found) == 3
    with torch.no_grad():
        prepared(torch.randn(16, 3, 8, 8) * 3)
    for part in (*found, *flagged(copy.deepcopy(prepared))):
        scale, zero_point = part.calculate_qparams()
        assert num_steps(scale) == pytest.approx(round(num_steps(scale)), abs=1e-4)
        assert zero_point >= num_steps(scale)


def test_small_ranges_are_left_alone() -> None:
    prepared = prepare_static(network(size=0.01), observer="min_max", calibrating=True, **SCHEME)
    with torch.no_grad():
        prepared(torch.randn(16, 3, 8, 8) * 0.1)
    for part in flagged(prepared):
        scale, _ = part.calculate_qparams()
        assert float(scale) == pytest.approx((part.max_val.clamp(min=0) - part.min_val.clamp(max=0)).item() / 255)


@pytest.mark.parametrize("batch_norm", ["fold", "train"])
def test_trained_and_converted(batch_norm: str) -> None:
    options = {"batch_norm": batch_norm, **SCHEME}
    training = prepare_qat(network(), freeze_at=1.0, **options).train()
    for _ in range(3):
        training(torch.randn(16, 3, 8, 8) * 3)
    fake_quants = fake_quants_of(training)
    assert len(fake_quants) == 3
    for part in fake_quants:
        assert num_steps(part.scale) == pytest.approx(round(num_steps(part.scale)), abs=1e-4)
        assert [part.scale, part.zero_point] == [*part.calculate_qparams()]
    converting = prepare_qat(network(), freeze_at=None, **options)
    converting.load_state_dict(training.state_dict())
    scales = {float(part.scale) for part in fake_quants}
    converted = convert(converting)
    assert {
        float(part.scale) for part in converted.modules() if isinstance(getattr(part, "scale", None), float)
    } & scales


def test_on_an_accelerator_ranges_are_the_same() -> None:
    def trained(*, waits: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        training = prepare_qat(network(), batch_norm="fold", freeze_at=1.0, **SCHEME).train()
        results = []
        for part in fake_quants_of(training):
            for _ in range(3):
                x = (torch.randn(50) * 5).requires_grad_()
                y = part(x) if waits else part._forward_without_waiting(x, None)
                y.square().sum().backward()
                results += [y, x.grad]
            results += part.state_dict().values()
        return results

    assert all(map(torch.equal, trained(waits=True), trained(waits=False)))


def test_learned_ranges_stay_free() -> None:
    training = prepare_qat(network(), batch_norm="fold", freeze_at=1.0, learned_step_size=True, **SCHEME)
    assert not any(has_whole_steps(part) for part in training.modules())
