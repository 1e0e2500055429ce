"""torchvision's networks for classification and segmentation, and their published weights, parsed from its source.

Importing torchvision would import torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# @register_model() or @register_model(name="..."), further decorators, then the function whose name is the default.
_REGISTERED = re.compile(
    r"""^@register_model\((?:(?:name=)?["'](?P<given>\w+)["'])?\)\s*\n(?:[@ \t)].*\n)*"""
    r"""def (?P<own>\w+)\((?:[^)]*?\bweights: Optional\[(?P<weights>\w+)\])?""",
    re.MULTILINE,
)
_WEIGHTS = re.compile(r"^class (\w+)\(WeightsEnum\):\n((?:[ \t].*\n|\n)*)", re.MULTILINE)
_CLASSIFICATION, _SEGMENTATION = "", "segmentation"
"""Subfolders of torchvision's `models`."""
_MEMBER = re.compile(r"""^    (\w+) = (?:Weights\((?:\s|\#.*\n)*url="([^"]+)"|(\w+)$)""", re.MULTILINE)


@cache
def classifier_names() -> tuple[str, ...]:
    """Return the sorted names of all classifiers; empty if torchvision is missing or laid out differently."""
    return _names_in(_CLASSIFICATION)


@cache
def segmenter_names() -> tuple[str, ...]:
    """Return the sorted names of all segmentation networks; empty if torchvision is missing or laid out differently."""
    return _names_in(_SEGMENTATION)


def weight_urls(name: str) -> dict[str, str]:
    """Return the URLs of a network's published weights by name, including `DEFAULT`; empty if there are none."""
    for source in (*_sources(_CLASSIFICATION), *_sources(_SEGMENTATION)):
        for match in _REGISTERED.finditer(source):
            if name == (match["given"] or match["own"]):
                return _urls_in(source, match["weights"] or "")
    return {}


def _sources(subfolder: str) -> Iterator[str]:
    """Yield the source of each file of networks for a task."""
    spec = importlib.util.find_spec("torchvision")
    for location in (spec and spec.submodule_search_locations) or ():
        for file in sorted((Path(location) / "models" / subfolder).glob("*.py")):
            yield file.read_text(encoding="utf-8", errors="replace")


def _names_in(subfolder: str) -> tuple[str, ...]:
    found = (match for source in _sources(subfolder) for match in _REGISTERED.finditer(source))
    return tuple(sorted({match["given"] or match["own"] for match in found}))


def _urls_in(source: str, class_name: str) -> dict[str, str]:
    body = next((match[2] for match in _WEIGHTS.finditer(source) if match[1] == class_name), "")
    urls: dict[str, str] = {}
    for member, url, alias in _MEMBER.findall(body):
        if url or alias in urls:
            urls[member] = url or urls[alias]
    return urls
