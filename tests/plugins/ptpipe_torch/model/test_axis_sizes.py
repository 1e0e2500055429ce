"""Sizes of axes that may have any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe_torch.model.axis_sizes import is_symbol, names_of, numbers_of, parsed, sized

NAMES = st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True)
SIZES = (
    st.integers(1, 10**4) | st.builds(lambda factor, name: f"{factor}*{name}", st.integers(2, 999999), NAMES) | NAMES
)


@pytest.mark.parametrize(("symbol", "factor", "name"), [("length", 1, "length"), ("32*height", 32, "height")])
def test_a_symbol_has_a_factor_and_a_name(symbol: str, factor: int, name: str) -> None:
    assert is_symbol(symbol)
    assert parsed(symbol) == (factor, name)


@pytest.mark.parametrize(
    "text", ["", "2", "2*", "*height", "0*height", "-2*height", "2 * height", "height*2", "a*b", 3]
)
def test_anything_else_is_none(text: object) -> None:
    assert not is_symbol(text)


@given(st.lists(SIZES, max_size=5), st.data())
def test_a_shape_with_numbers_fits_and_tells_them(shape: list[int | str], data: st.DataObject) -> None:
    names = names_of(size for size in shape if isinstance(size, str))
    numbers = {name: data.draw(st.integers(1, 999)) for name in names}
    found = sized(shape, numbers)
    assert all(isinstance(size, int) for size in found)
    assert numbers_of([(shape, found)]) == numbers


@pytest.mark.parametrize(
    ("allowed", "found", "numbers"),
    [
        (["batch", 3, "height"], ["batch", 3, 20], {"height": 20}),
        (["batch", "length"], ["batch", "length"], {}),
        (["batch", "length"], ["batch", "tokens"], None),
        (["batch", 20], ["batch", "height"], None),
        (["4*height", "2*height"], [12, 6], {"height": 3}),
        (["4*height", "2*height"], [12, 8], None),
        (["4*height"], [10], None),
        (["height"], [10, 10], None),
        ([3], [4], None),
    ],
)
def test_what_does_not_fit_is_none(
    allowed: list[int | str], found: list[int | str], numbers: dict[str, int] | None
) -> None:
    assert numbers_of([(allowed, found)]) == numbers


def test_a_name_is_one_number_in_all_tensors() -> None:
    assert numbers_of([(["height"], [4]), (["2*height"], [8])]) == {"height": 4}
    assert numbers_of([(["height"], [4]), (["height"], [5])]) is None
    assert sized(["batch", "2*height", 3], {"height": 4}) == ("batch", 8, 3)
