"""The optional libraries timm and transformers: whether they are installed, timm's names. Imports neither."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# @register_model, further decorators, then the function whose name is the network's.
_REGISTERED = re.compile(r"^@register_model\b.*\n(?:[@ \t)].*\n)*def (\w+)\(", re.MULTILINE)


def missing_extra(package: str) -> str | None:
    """Return what to install where the package of an extra of the same name is missing; else None."""
    if find_spec(package) is not None:
        return None
    return f"model.{package} needs {package}: pip install 'ptpipe[{package}]'"


@cache
def timm_names() -> tuple[str, ...]:
    """Return the sorted names of timm's networks, from its source; empty if it is missing or laid out differently."""
    spec = find_spec("timm")
    found: set[str] = set()
    for location in (spec and spec.submodule_search_locations) or ():
        for file in (Path(location) / "models").glob("*.py"):
            found |= {*_REGISTERED.findall(file.read_text(encoding="utf-8", errors="replace"))}
    return tuple(sorted(found))


def longest_prefix_first(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin as `name` does first: of so many, `ptpipe.nearest` compares some hundreds."""

    def num_common(other: str) -> int:
        return next((i for i, (one, two) in enumerate(zip(name, other, strict=False)) if one != two), len(other))

    return sorted(names, key=num_common, reverse=True)
