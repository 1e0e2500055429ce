"""Options that name classes, labels or targets."""

from __future__ import annotations

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
