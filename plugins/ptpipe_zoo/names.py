"""The names of torchvision's classification networks, read from its source: importing it would import torch."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

# @register_model() or @register_model(name="..."), further decorators, then the function that lends its name.
_REGISTERED = re.compile(
    r"""^@register_model\((?:(?:name=)?["'](?P<given>\w+)["'])?\)\s*\n(?:@.*\n)*def (?P<own>\w+)\(""", re.MULTILINE
)


@cache
def classifier_names() -> tuple[str, ...]:
    """Names of all classification networks, sorted; empty where torchvision is absent or laid out differently."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = Path(spec.submodule_search_locations[0]) / "models"  # those for other tasks lie in folders below
    return tuple(sorted(_names_in(folder)))


def _names_in(folder: Path) -> set[str]:
    found = (_REGISTERED.finditer(file.read_text(encoding="utf-8", errors="replace")) for file in folder.glob("*.py"))
    return {match["given"] or match["own"] for matches in found for match in matches}
