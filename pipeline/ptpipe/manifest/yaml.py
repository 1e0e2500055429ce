"""A YAML 1.2 reader: plain values with the location of every key and value.

Scalars follow the core schema: `1e-3` is a number, `no` is text. Repeated keys, tags and keys that are not scalars are
problems; size, depth and the expansion of aliases are capped, so that no text can exhaust memory or time. `<<: *anchor`
merges a mapping, or several, as in YAML 1.1: keys that are written out, and the earlier of several mappings, win.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ptpipe.artifact import JSON
from ptpipe.errors import Location, ManifestError, Problem

Path: TypeAlias = tuple[str | int, ...]

MAX_BYTES = 256_000
MAX_DEPTH = 32
MAX_VALUES = 50_000
MAX_LETTERS = 1_000_000

_REWORDED = {
    "found character '\\t' that cannot start": "a tab; YAML is indented with spaces",
    "expected <block end>, but found": "this does not fit the lines above; is the indentation right?",
    "mapping values are not allowed": "a ':' has no place here; is the indentation right, or a text without quotes?",
}
_SURROGATE = re.compile("[\ud800-\udfff]")
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
    """A parsed text: its value, and the location of each key and value."""

    value: JSON
    keys: Mapping[Path, Location] = field(default_factory=dict)
    values: Mapping[Path, Location] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """Mistakes that did not stop the reader: repeated keys, keys that are not scalars."""
    broken: frozenset[Path] = frozenset()
    """The paths of the mappings that have such keys."""

    def locate(self, path: Path, key: bool = False) -> Location | None:
        """Return the location of the value (or, with `key`, the key) at a path; else that of its nearest parent."""
        places = (self.keys, self.values) if key else (self.values, self.keys)
        for length in range(len(path), -1, -1):
            for known in places:
                if path[:length] in known:
                    return known[path[:length]]
        return None


def scalar(text: str) -> JSON:
    """Return the value of a plain (unquoted) scalar in the core schema (YAML 1.2.2, section 10.3)."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _integer(text: str) -> JSON:
    # CPython refuses to turn thousands of digits into an integer or back; no option is that large.
    if len(text) > 100:
        return math.inf if text[:2] in ("0o", "0x") else float(text)
    if text[:2] in ("0o", "0x"):
        return int(text[2:], 8 if text[1] == "o" else 16)
    return int(text)


def read(text: str, name: str) -> Document:
    """Read one document; `name` is the file name in locations.

    Raises ManifestError where the text can't be read at all: not YAML, too deep, too large, tagged.
    """
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    try:
        root = _Composer(name).compose(_events(text, name))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ManifestError([Problem(f"not YAML: {_reworded(error)}", _place(name, mark))]) from error
    except ReaderError as error:
        before = text[: error.position]
        place = Location(name, before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise ManifestError([Problem(f"not YAML: it has the character U+{error.character:04X}", place)]) from error
    except YAMLError as error:
        raise ManifestError([Problem(f"not YAML: {_first_line(error)}", Location(name, 1, 1))]) from error
    reader = _Reader(name)
    value = reader.convert(root, ()) if root is not None else None
    return Document(value, reader.keys, reader.values, tuple(reader.problems), frozenset(reader.broken))


def _events(text: str, name: str) -> Iterator[Any]:
    """Yield the parser's events. Raises ManifestError with the place where the parser itself fails."""
    from ruamel.yaml import YAML
    from ruamel.yaml.docinfo import DocInfo
    from ruamel.yaml.error import YAMLError

    yaml = YAML(typ="safe", pure=True)  # not its parse(): it forgets where it was before an error arrives here
    yaml.doc_infos.append(DocInfo())
    _, parser = yaml.get_constructor_parser(text)
    try:
        while parser.check_event():
            yield parser.get_event()
    except YAMLError:
        raise
    except Exception as error:  # `"\UFFFFFFFF"`: a parser of hostile text may raise anything
        place = _place(name, yaml.reader.get_mark())
        raise ManifestError(
            [Problem(f"not YAML: the parser failed here: {type(error).__name__}: {error}", place)]
        ) from error


@dataclass
class _Node:
    """A value in the text, before aliases are expanded."""

    place: Location
    text: str | None = None
    """A scalar's; None for lists and mappings."""
    is_plain: bool = False
    is_mapping: bool = False
    children: list[_Node] = field(default_factory=list)
    """A list's items; a mapping's keys and values in turn."""

    @property
    def is_merge(self) -> bool:
        """Whether it is the key that merges another mapping."""
        return self.is_plain and self.text == "<<"


class _Composer:
    """Builds nodes from the parser's events without recursion.

    Not ruamel's own composer: its nodes do not tell an explicit tag (`!!int 1`), which is refused, from an implied one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.root: _Node | None = None
        self.open: list[_Node] = []
        self.anchors: dict[str, _Node] = {}
        self.tags: list[Problem] = []
        self.num_values = 0

    def compose(self, events: Iterable[Any]) -> _Node | None:
        for event in events:
            match type(event).__name__:
                case "DocumentStartEvent" if self.root is not None:
                    raise self._refusal("a second YAML document; a manifest is one", event)
                case "ScalarEvent":
                    self._add(event, _Node(_place(self.name, event.start_mark), _joined(event.value), not event.style))
                case "MappingStartEvent" | "SequenceStartEvent" as kind:
                    node = _Node(_place(self.name, event.start_mark), is_mapping=kind == "MappingStartEvent")
                    self._add(event, node)
                    self.open.append(node)
                    if len(self.open) > MAX_DEPTH:
                        raise self._refusal(f"nested more than {MAX_DEPTH} levels deep", event)
                case "MappingEndEvent" | "SequenceEndEvent":
                    self.open.pop()
                case "AliasEvent":
                    self._attach(self._aliased(event))
        if self.tags:
            raise ManifestError(self.tags)
        return self.root

    def _add(self, event: Any, node: _Node) -> None:
        if event.tag is not None:
            self.tags.append(Problem(f"tags such as {event.tag} are not allowed here", node.place))
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        self._attach(node)

    def _attach(self, node: _Node) -> None:
        parent = self.open[-1] if self.open else None
        if parent is None or not parent.is_mapping or len(parent.children) % 2:
            self.num_values += 1  # no key
        if self.num_values > MAX_VALUES:  # here already: reading on to the end takes its time
            raise ManifestError([Problem(f"more than {MAX_VALUES} values, aliases expanded", node.place)])
        if parent is None:
            self.root = node
        else:
            parent.children.append(node)

    def _aliased(self, event: Any) -> _Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            raise self._refusal(f"the alias *{event.anchor} is not defined above", event)
        if any(node is parent for parent in self.open):
            raise self._refusal(f"the alias *{event.anchor} contains itself", event)
        return node

    def _refusal(self, message: str, event: Any) -> ManifestError:
        return ManifestError([*self.tags, Problem(message, _place(self.name, event.start_mark))])


class _Reader:
    """Converts nodes to values, collecting locations and problems."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: dict[Path, Location] = {}
        self.values: dict[Path, Location] = {}
        self.problems: list[Problem] = []
        self.broken: set[Path] = set()
        self.num_letters = 0
        self.num_merged = 0

    def convert(self, node: _Node, path: Path) -> JSON:
        self.values[path] = node.place
        if len(self.values) > MAX_VALUES:
            raise ManifestError([Problem(f"more than {MAX_VALUES} values, aliases expanded", node.place)])
        if len(path) > MAX_DEPTH:
            raise ManifestError([Problem(f"nested more than {MAX_DEPTH} levels deep, aliases expanded", node.place)])
        if node.text is not None:
            self._check_text(node.text, node.place)
            return scalar(node.text) if node.is_plain else node.text
        if node.is_mapping:
            return self._convert_mapping(node, path)
        return [self.convert(child, (*path, position)) for position, child in enumerate(node.children)]

    def _convert_mapping(self, node: _Node, path: Path) -> JSON:
        result: dict[str, JSON] = {}
        for key_node, value_node in self._pairs(node, path):
            key, place = key_node.text, key_node.place
            if key is None or key in result:
                self.broken.add(path)
            if key is None:
                self.problems.append(Problem("a key must be a scalar", place))
            elif key in result:
                first = self.keys[(*path, key)]
                self.problems.append(Problem(f"{key!r} is given twice; first in line {first.line}", place))
            else:
                self._check_text(key, place)
                self.keys[(*path, key)] = place
                result[key] = self.convert(value_node, (*path, key))
        return result

    def _pairs(self, node: _Node, path: Path, depth: int = 0) -> Iterator[tuple[_Node, _Node]]:
        """Yield a mapping's keys and values, with those of the mappings that it merges in place of their `<<`."""
        pairs = list(zip(node.children[::2], node.children[1::2], strict=True))
        seen = {None, *(key.text for key, _ in pairs if not key.is_merge)}
        merging = [key for key, _ in pairs if key.is_merge]
        for key, value in pairs:
            sources = [value] if value.is_mapping else value.children
            if not key.is_merge:
                yield key, value
            elif key is merging[0] and sources and all(source.is_mapping for source in sources):
                for pair in (pair for source in sources for pair in self._merged(source, depth + 1)):
                    if pair[0].text not in seen:
                        seen.add(pair[0].text)
                        yield pair
            elif depth == 0:
                self.problems.append(
                    Problem("<< is given once, with a mapping (`<<: *a`) or a list of them", key.place)
                )
                self.broken.add(path)

    def _merged(self, source: _Node, depth: int) -> Iterator[tuple[_Node, _Node]]:
        if depth > MAX_DEPTH:
            raise ManifestError([Problem(f"nested more than {MAX_DEPTH} levels deep, aliases expanded", source.place)])
        for pair in self._pairs(source, (), depth):
            self.num_merged += 1
            if self.num_merged > MAX_VALUES:
                raise ManifestError([Problem(f"more than {MAX_VALUES} values, aliases expanded", source.place)])
            yield pair

    def _check_text(self, text: str, place: Location) -> None:
        self.num_letters += len(text)
        if self.num_letters > MAX_LETTERS:
            raise ManifestError([Problem(f"more than {MAX_LETTERS} letters, aliases expanded", place)])
        if _SURROGATE.search(text):  # "\uD800" in quotes: it has no UTF-8
            self.problems.append(Problem("half of a surrogate pair is not text", place))


def _joined(text: str) -> str:
    r"""Join the halves of surrogate pairs: JSON, which is YAML, escapes an emoji as `"\ud83d\ude00"`."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _place(name: str, mark: Any) -> Location:
    return Location(name, mark.line + 1, mark.column + 1) if mark is not None else Location(name, 1, 1)


def _reworded(error: Any) -> str:
    """Return the parser's message, or for its internal terms the usual mistake behind them."""
    problem = str(error.problem or "")
    for beginning, words in _REWORDED.items():
        if problem.startswith(beginning):
            return words
    return " ".join(str(part) for part in (error.problem, error.context) if part)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
