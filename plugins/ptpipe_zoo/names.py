"""torchvision's classification networks and their published weights, parsed from its source.

Importing torchvision would import torch.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

# @register_model() or @register_model(name="..."), further decorators, then the function whose name is the default.
_REGISTERED = re.compile(
    r"""^@register_model\((?:(?:name=)?["'](?P<given>\w+)["'])?\)\s*\n(?:@.*\n)*"""
    r"""def (?P<own>\w+)\((?:[^)]*?\bweights: Optional\[(?P<weights>\w+)\])?""",
    re.MULTILINE,
)
_WEIGHTS = re.compile(r"^class (\w+)\(WeightsEnum\):\n((?:[ \t].*\n|\n)*)", re.MULTILINE)
_MEMBER = re.compile(r"""^    (\w+) = (?:Weights\((?:\s|\#.*\n)*url="([^"]+)"|(\w+)$)""", re.MULTILINE)


@cache
def classifier_names() -> tuple[str, ...]:
    """Return the sorted names of all classifiers; empty if torchvision is missing or laid out differently."""
    folder = _folder()
    return tuple(sorted(_names_in(folder))) if folder else ()


def weight_urls(name: str) -> dict[str, str]:
    """Return the URLs of a network's published weights by name, including `DEFAULT`; empty if there are none."""
    for file in sorted(folder.glob("*.py")) if (folder := _folder()) else ():
        source = file.read_text(encoding="utf-8", errors="replace")
        for match in _REGISTERED.finditer(source):
            if name == (match["given"] or match["own"]):
                return _urls_in(source, match["weights"] or "")
    return {}


def _folder() -> Path | None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "models"  # networks for other tasks are in subfolders


def _urls_in(source: str, class_name: str) -> dict[str, str]:
    body = next((match[2] for match in _WEIGHTS.finditer(source) if match[1] == class_name), "")
    urls: dict[str, str] = {}
    for member, url, alias in _MEMBER.findall(body):
        if url or alias in urls:
            urls[member] = url or urls[alias]
    return urls


def _names_in(folder: Path) -> set[str]:
    found = (_REGISTERED.finditer(file.read_text(encoding="utf-8", errors="replace")) for file in folder.glob("*.py"))
    return {match["given"] or match["own"] for matches in found for match in matches}
