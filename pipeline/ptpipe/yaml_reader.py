"""YAML text to plain values with the place of every key and value.

YAML 1.2's core schema: `1e-3` is a number, `no` is a word. Repeated keys, tags and keys that are not words are
problems; size, depth and what aliases expand to are capped, so that no text can exhaust the reader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ptpipe.artifact import JSON
from ptpipe.errors import Location, ManifestError, Problem

Path: TypeAlias = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 50_000

_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, JSON] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}


@dataclass(frozen=True)
class Document:
    """A read text: its value, and where each key and value stands."""

    value: JSON
    keys: Mapping[Path, Location] = field(default_factory=dict)
    values: Mapping[Path, Location] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """What is wrong and yet let the rest be read: repeated keys, keys that are not words."""

    def locate(self, path: Path, key: bool = False) -> Location | None:
        """Where the value (or, with `key`, the key) at this path stands; else where its nearest parent does."""
        places = (self.keys, self.values) if key else (self.values, self.keys)
        for length in range(len(path), -1, -1):
            for known in places:
                if path[:length] in known:
                    return known[path[:length]]
        return None


def scalar(text: str) -> JSON:
    """The value of a plain (unquoted) scalar in YAML 1.2's core schema, chapter 10.3."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _integer(text: str) -> JSON:
    if text[:2] in ("0o", "0x"):
        return int(text[2:], 8 if text[1] == "o" else 16)
    # CPython refuses to turn thousands of digits into an integer; no option is that large.
    return int(text) if len(text) <= 100 else float(text)


def read(text: str, name: str) -> Document:
    """Read one document. `name` stands in front of every location.

    Raises ManifestError where the text can't be read at all: not YAML, too deep, too large, tagged.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        problems = list(_scan(YAML(typ="safe", pure=True).parse(text), name))
        if problems:
            raise ManifestError(problems)
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.problem, error.context) if part)
        raise ManifestError([Problem(f"not YAML: {message}", _place(name, mark))]) from error
    except YAMLError as error:
        raise ManifestError([Problem(f"not YAML: {_first_line(error)}", Location(name, 1, 1))]) from error
    reader = _Reader(name)
    value = reader.convert(root, ()) if root is not None else None
    return Document(value, reader.keys, reader.values, tuple(reader.problems))


def _scan(events: Iterable[Any], name: str) -> Iterable[Problem]:
    """Depth and tags, before anything recursive looks at the text."""
    depth = documents = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        documents += kind == "DocumentStartEvent"
        if depth > MAX_DEPTH:
            yield Problem(f"nested more than {MAX_DEPTH} levels deep", _place(name, event.start_mark))
            return
        if documents > 1:
            yield Problem("a second YAML document; a manifest is one", _place(name, event.start_mark))
            return
        if getattr(event, "tag", None) is not None:
            yield Problem(f"tags such as {event.tag} are not allowed here", _place(name, event.start_mark))


class _Reader:
    """Turns ruamel's nodes into values, remembering places and problems."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: dict[Path, Location] = {}
        self.values: dict[Path, Location] = {}
        self.problems: list[Problem] = []
        self.num_values = 0

    def convert(self, node: Any, path: Path) -> JSON:
        self.num_values += 1
        place = _place(self.name, node.start_mark)
        if self.num_values > MAX_VALUES:
            raise ManifestError([Problem(f"more than {MAX_VALUES} values, aliases expanded", place)])
        self.values[path] = place
        kind = type(node).__name__
        if kind == "ScalarNode":
            return scalar(node.value) if node.style is None else str(node.value)
        if len(path) > MAX_DEPTH:
            raise ManifestError([Problem("an alias that holds itself", place)])
        if kind == "SequenceNode":
            return [self.convert(child, (*path, position)) for position, child in enumerate(node.value)]
        return self._convert_mapping(node, path)

    def _convert_mapping(self, node: Any, path: Path) -> JSON:
        result: dict[str, JSON] = {}
        for key_node, value_node in node.value:
            place = _place(self.name, key_node.start_mark)
            if type(key_node).__name__ != "ScalarNode" or not isinstance(key_node.value, str):
                self.problems.append(Problem("a key must be a word", place))
                continue
            key = key_node.value
            if key in result:
                first = self.keys[(*path, key)]
                self.problems.append(Problem(f"{key!r} is given twice; first in line {first.line}", place))
                continue
            self.keys[(*path, key)] = place
            result[key] = self.convert(value_node, (*path, key))
        return result


def _place(name: str, mark: Any) -> Location:
    return Location(name, mark.line + 1, mark.column + 1) if mark is not None else Location(name, 1, 1)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
