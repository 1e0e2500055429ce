"""int8 state as plain tensors: a bit-exact round trip, and errors for what does not match."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import IntegrityError, StageError
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.int8_state import pack_state, unpack_state


@pytest.fixture(autouse=True)
def quiet():
    with deprecations_silenced():
        yield


def per_channel(shape: tuple[int, ...] = (4, 3, 2, 2), axis: int = 0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(shape[axis], generator=generator, dtype=torch.float64) / 100 + 1e-3
    weight = torch.randn(shape, generator=generator)
    return torch.quantize_per_channel(weight, scales, torch.zeros(shape[axis], dtype=torch.int64), axis, torch.qint8)


def per_tensor(zero_point: int = 0, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(3, 5), 0.0123, zero_point, dtype)


def make_state() -> OrderedDict[str, object]:
    return OrderedDict(
        {
            "conv.weight": per_channel(),
            "conv.bias": torch.nn.Parameter(torch.randn(4)),
            "conv.scale": torch.tensor(0.25),
            "conv.zero_point": torch.tensor(7),
            "linear._packed_params.dtype": torch.qint8,
            "linear._packed_params._packed_params": (per_tensor(), torch.randn(3)),
            "bare._packed_params._packed_params": (per_tensor(3), None),
            "prelu.weight": per_tensor(9, torch.quint8),
            "norm.bias": None,
        }
    )


def like(state: OrderedDict[str, object]) -> OrderedDict[str, object]:
    """The same shapes with other values."""
    return unpack_state(
        {
            name: (torch.zeros_like(tensor) if name.endswith(":int8") else tensor)
            for name, tensor in pack_state(state).items()
        },
        state,
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, tuple):
        return all(same(*pair) for pair in zip(one, other, strict=True))
    if not isinstance(one, torch.Tensor):
        return one is other
    if not one.is_quantized:
        return torch.equal(one, other)
    if (
        one.qscheme() != other.qscheme()
        or one.dtype != other.dtype
        or not torch.equal(one.int_repr(), other.int_repr())
    ):
        return False
    if one.qscheme() is torch.per_tensor_affine:
        return (one.q_scale(), one.q_zero_point()) == (other.q_scale(), other.q_zero_point())
    return (
        torch.equal(one.q_per_channel_scales().double(), other.q_per_channel_scales().double())
        and torch.equal(one.q_per_channel_zero_points(), other.q_per_channel_zero_points())
        and one.q_per_channel_axis() == other.q_per_channel_axis()
    )


def test_round_trip() -> None:
    state = make_state()
    packed = pack_state(state)
    assert all(type(tensor) is torch.Tensor and not tensor.is_quantized for tensor in packed.values())
    again = unpack_state(packed, like(state))
    assert again.keys() == state.keys()
    for name, value in state.items():
        assert same(value, again[name]), name


def test_what_is_stored() -> None:
    packed = pack_state(make_state())
    assert sorted(packed) == sorted(
        [
            *(f"conv.weight:{part}" for part in ("int8", "scales", "axis")),
            "conv.bias", "conv.scale", "conv.zero_point",
            *(f"linear._packed_params._packed_params:{part}" for part in ("int8", "scales", "bias")),
            *(f"bare._packed_params._packed_params:{part}" for part in ("int8", "scales", "zero_points")),
            *(f"prelu.weight:{part}" for part in ("int8", "scales", "zero_points")),
        ]
    )  # fmt: skip
    assert packed["prelu.weight:int8"].dtype == torch.uint8


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    axis=st.integers(-1, 3),
    scale=st.floats(1e-30, 1e30),
    zero_point=st.integers(-128, 127),
)
def test_any_scale_and_axis(shape, axis, scale, zero_point) -> None:
    integers = torch.randint(-128, 128, shape, dtype=torch.int8)
    with deprecations_silenced():
        if axis < 0:
            weight = torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)
        else:
            axis %= len(shape)
            scales = torch.full((shape[axis],), scale, dtype=torch.float64) * torch.arange(1, shape[axis] + 1)
            zeros = torch.full((shape[axis],), zero_point)
            weight = torch._make_per_channel_quantized_tensor(integers, scales, zeros, axis)
        state = OrderedDict(weight=weight)
        assert same(weight, unpack_state(pack_state(state), state)["weight"])


def test_a_float_tensor_may_be_stored_as_integers() -> None:
    weight = per_channel(axis=1)
    packed = pack_state({"weight": weight})
    again = unpack_state(packed, OrderedDict(weight=torch.zeros(weight.shape)))
    assert torch.equal(again["weight"], weight.dequantize())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed: packed.pop("conv.bias"), "conv.bias is missing"),
        (lambda packed: packed.pop("conv.weight:int8"), "conv.weight"),
        (lambda packed: packed.pop("conv.weight:scales"), "conv.weight has no valid scales"),
        (lambda packed: packed.pop("conv.weight:axis"), "conv.weight has no valid scales"),
        (lambda packed: packed.pop("linear._packed_params._packed_params:bias"), "params:bias"),
        (lambda packed: packed.update(extra=torch.zeros(1)), "without a layer: extra"),
        (lambda packed: packed.update({"conv.bias": torch.zeros(5)}), r"conv.bias is torch.float32 \(5,\)"),
        (lambda packed: packed.update({"conv.bias": torch.zeros(4, dtype=torch.int32)}), "conv.bias is torch.int32"),
        (
            lambda packed: packed.update({"conv.weight:int8": torch.zeros(4, 3, 2, 2)}),
            "conv.weight:int8 is torch.float32",
        ),
        (lambda packed: packed.update({"conv.weight:axis": torch.tensor(7)}), "no valid channel axis"),
        (lambda packed: packed.update({"conv.weight:axis": torch.tensor(-1)}), "no valid channel axis"),
        (lambda packed: packed["conv.weight:scales"].fill_(float("nan")), "no valid scales"),
        (lambda packed: packed["conv.weight:scales"].zero_(), "no valid scales"),
        (lambda packed: packed["prelu.weight:zero_points"].fill_(10**6), "no valid zero points"),
        (lambda packed: packed.update({"prelu.weight:zero_points": torch.zeros(1)}), "no valid zero points"),
    ],
)
def test_what_was_altered_is_refused(change, message) -> None:
    state = make_state()
    packed = pack_state(state)
    change(packed)
    with pytest.raises(IntegrityError, match=message):
        unpack_state(packed, state)


def test_scales_of_the_wrong_kind_are_refused() -> None:
    packed = pack_state({"weight": per_channel((3, 5))})
    with pytest.raises(IntegrityError, match="scales per channel, unlike its layer"):
        unpack_state(packed, OrderedDict(weight=per_tensor()))


def test_what_has_no_plain_form_is_refused_by_name() -> None:
    with pytest.raises(StageError, match=r"layer.secret \(object\) can't be stored"):
        pack_state({"layer.secret": object()})


def test_scales_and_zero_points_that_are_both_float_are_refused_by_name() -> None:
    weight = torch.quantize_per_channel(torch.randn(3, 4), torch.ones(3), torch.zeros(3), 0, torch.quint8)
    with pytest.raises(StageError, match=r"table.weight"):
        pack_state({"table.weight": weight})
