"""Sizes of axes that may have any: `length`, or `32*height`, where it is a multiple of 32. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Shape: TypeAlias = Sequence[int | str]

SYMBOL = r"(?:[1-9][0-9]{0,5}\*)?[^\W\d]\w*"
"""Of a symbol: a name, as those of torch.onnx's files, or a multiple of one."""


def is_symbol(text: object) -> bool:
    """Return whether this stands for the size of an axis that may have any."""
    return isinstance(text, str) and re.fullmatch(SYMBOL, text) is not None


def parsed(symbol: str) -> tuple[int, str]:
    """Return the factor and the name of a symbol: 32 and `height`, 1 and `length`."""
    factor, star, name = symbol.rpartition("*")
    return (int(factor) if star else 1), name


def names_of(symbols: Iterable[str]) -> tuple[str, ...]:
    """Return the names in symbols, each once, in their order."""
    return tuple(dict.fromkeys(parsed(symbol)[1] for symbol in symbols))


def are_multiples(symbols: Iterable[str]) -> bool:
    """Return whether any of these symbols has a factor."""
    return any(parsed(symbol)[0] > 1 for symbol in symbols)


def numbers_of(pairs: Iterable[tuple[Shape, Shape]]) -> dict[str, int] | None:
    """Return the number that each name of symbols stands for; None where shapes don't fit each other.

    `pairs`: what the axes of a tensor may have, and what they have. A symbol is no size of an axis that has a number,
    or another symbol.
    """
    numbers: dict[str, int] = {}
    for allowed, found in pairs:
        if len(allowed) != len(found):
            return None
        for size, own in zip(allowed, found, strict=True):
            if size == own:
                continue
            if isinstance(size, int) or isinstance(own, str):
                return None
            factor, name = parsed(size)
            if own % factor or numbers.setdefault(name, own // factor) != own // factor:
                return None
    return numbers


def sized(shape: Shape, numbers: Mapping[str, int]) -> tuple[int | str, ...]:
    """Return a shape with the sizes of those symbols whose names have a number."""
    return tuple(size if isinstance(size, int) else _size(size, numbers) for size in shape)


def _size(symbol: str, numbers: Mapping[str, int]) -> int | str:
    factor, name = parsed(symbol)
    return factor * numbers[name] if name in numbers else symbol
