"""Options that name classes, labels or targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field


def _names_differ(names: tuple[str, ...]) -> tuple[str, ...]:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ValueError(f"has {name!r} twice")
        seen.add(name)
    return names


ClassNames: TypeAlias = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_names_differ)]


def refuse_ignored_class(ignore: int, class_names: Sequence[str] | None) -> None:
    """Raise ValueError where the value of pixels that don't count is the number of a class."""
    if class_names is not None and ignore < len(class_names):
        raise ValueError(f"ignore: {ignore} is the class {class_names[ignore]!r}")
