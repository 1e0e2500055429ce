"""Names of torchvision's classification networks, parsed from its source: importing it would import torch."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

# @register_model() or @register_model(name="..."), further decorators, then the function whose name is the default.
_REGISTERED = re.compile(
    r"""^@register_model\((?:(?:name=)?["'](?P<given>\w+)["'])?\)\s*\n(?:@.*\n)*def (?P<own>\w+)\(""", re.MULTILINE
)


@cache
def classifier_names() -> tuple[str, ...]:
    """Return the sorted names of all classifiers; empty if torchvision is missing or laid out differently."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = Path(spec.submodule_search_locations[0]) / "models"  # networks for other tasks are in subfolders
    return tuple(sorted(_names_in(folder)))


def _names_in(folder: Path) -> set[str]:
    found = (_REGISTERED.finditer(file.read_text(encoding="utf-8", errors="replace")) for file in folder.glob("*.py"))
    return {match["given"] or match["own"] for matches in found for match in matches}
