"""The manifest file: read, checked for structure, every key and value with its location."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ptpipe.artifact import JSON
from ptpipe.errors import MAX_PROBLEMS, Location, ManifestError, Problem, nearest
from ptpipe.manifest.yaml import MAX_BYTES, MAX_DEPTH, Document, read

VERSION = 1
MAX_SEED = 2**32 - 1
ID_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,63}")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_TOP_KEYS = ("version", "name", "seed", "plugins", "stages")
_STAGE_KEYS = ("uses", "needs", "with")


@dataclass(frozen=True)
class StageEntry:
    """One stage as written; kind, inputs and options are not checked yet."""

    id: str
    uses: str
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Mapping[str, JSON] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    """Which of `uses`, `needs` and `with` can't be read as written, so that nothing else of them is checked."""


@dataclass(frozen=True)
class Manifest:
    """A manifest whose structure is valid, but for `problems`."""

    path: Path
    name: str
    seed: int
    plugins: tuple[str, ...]
    stages: tuple[StageEntry, ...]
    document: Document
    overrides: Mapping[str, JSON] = field(default_factory=dict)
    text: str = ""
    """As written."""
    is_file: bool = True
    """Whether `path` is a file's; else it stands in a folder that file names are relative to."""
    problems: tuple[Problem, ...] = ()
    """Of its structure; `bind` raises them, with those of the stages that it can judge."""

    def locate(self, *path: str | int, key: bool = False) -> Location | None:
        """Return the location of the value (or key) at a path: `locate("stages", "net", "with", "width")`.

        None where there is no file.
        """
        return self.document.locate(path, key) if self.is_file else None

    def overridden_by(self, overrides: Mapping[str, JSON]) -> Manifest:
        """Return the manifest with options replaced: `{"finetune.lr": 0.001, "seed": 3}`.

        Raises ManifestError for a name that is neither `seed` nor `STAGE.OPTION`, and for a value that is not JSON.
        """
        problems = _strange_overrides(overrides)
        if problems:
            raise ManifestError(problems)
        written = {entry.id: entry.options for entry in self.stages}
        options: dict[str, dict[str, Any]] = {}
        seed = self.seed
        for name, value in overrides.items():
            stage_id, _, rest = name.partition(".")
            if name == "seed" and _is_seed(value):
                seed = int(value)  # type: ignore[arg-type]  # checked by _is_seed
            elif name == "seed":
                problems.append(Problem(f"-s seed={value}: a seed is a whole number from 0 to {MAX_SEED}"))
            elif stage_id not in written:
                suggestion = nearest(stage_id, written) if len(problems) < MAX_PROBLEMS else None
                problems.append(Problem(f"-s {name}: there is no stage {stage_id!r}", suggestion=suggestion))
            elif not rest:
                problems.append(Problem(f"-s {name}: name one of its options: {stage_id}.OPTION=VALUE"))
            elif rest.count(".") >= MAX_DEPTH:
                problems.append(Problem(f"-s {name}: nested more than {MAX_DEPTH} levels deep"))
            else:
                if stage_id not in options:
                    options[stage_id] = deepcopy(dict(written[stage_id]))
                _assign(options[stage_id], rest.split("."), value)
        if problems:
            raise ManifestError(problems)
        stages = tuple(replace(entry, options=options.get(entry.id, entry.options)) for entry in self.stages)
        return replace(self, seed=seed, stages=stages, overrides={**self.overrides, **overrides})


def _strange_overrides(overrides: object) -> list[Problem]:
    """Return what no manifest could have: a program may give anything."""
    if not isinstance(overrides, Mapping):
        return [Problem(f"overrides are a mapping, {{'STAGE.OPTION': value}}, not a {type(overrides).__name__}")]
    problems = [Problem(f"-s {name!r:.80}: it is no text") for name in overrides if not isinstance(name, str)]
    for name, value in overrides.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            remedy = "say int(...), float(...) or str(...)"
            message = f"-s {name}: the value, of type {type(value).__name__}, is not JSON ({error}); {remedy}"
            problems.append(Problem(message))
    return problems


def load(path: Path) -> Manifest:
    """Read a manifest file, as `parse_stages` does. Raises ManifestError where it can't be read."""
    name = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ManifestError([Problem(f"cannot read {name}: {reason or error}")]) from error
    if len(content) > MAX_BYTES:
        raise ManifestError(
            [Problem(f"larger than {MAX_BYTES // 1000} kB: this is not a manifest", Location(name, 1, 1))]
        )
    return parse_stages(_decode(content, name), path)


def parse(text: str, path: Path) -> Manifest:
    """Parse YAML text; `path` is the file name in locations, and its folder that of the plugins.

    Raises ManifestError with every problem of its text and structure.
    """
    manifest = parse_stages(text, path)
    if manifest.problems:
        raise ManifestError(manifest.problems)
    return manifest


def parse_stages(text: str, path: Path) -> Manifest:
    """Parse YAML text as `parse` does; leave problems of its structure to `bind`, which finds those of other stages.

    Raises ManifestError where stages, or the plugins that would know them, are unknown.
    """
    check = _StructureCheck(read(text, str(path)))
    manifest = check.manifest(path)
    problems = sorted(check.problems, key=lambda problem: problem.location or Location("", 0, 0))
    if manifest is None:
        raise ManifestError(problems)
    return replace(manifest, text=text, problems=tuple(problems))


def from_content(content: Mapping[str, JSON], folder: Path) -> Manifest:
    """Return the manifest that a program composed; `folder` is that of its plugins' files.

    Its text is JSON, which is YAML, and can be run from anywhere: names of plugins' files become absolute. Raises
    ManifestError, without locations.
    """
    plugins = content.get("plugins")
    if isinstance(plugins, list | tuple):
        content = {**content, "plugins": [_absolute(name, folder) for name in plugins]}
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        manifest = parse_stages(text, folder.absolute() / "manifest.yaml")
        problems = tuple(replace(problem, location=None) for problem in manifest.problems)
        return replace(manifest, is_file=False, problems=problems)
    except ManifestError as error:
        raise ManifestError([replace(problem, location=None) for problem in error.problems]) from error
    except (TypeError, ValueError) as error:
        raise ManifestError([Problem(f"the manifest's content is not JSON: {error}")]) from error


def _absolute(plugin: JSON, folder: Path) -> JSON:
    return str((folder / plugin).resolve()) if isinstance(plugin, str) and is_file_name(plugin) else plugin


def is_file_name(plugin: str) -> bool:
    """Return whether a plugin's name in a manifest is that of a file, and not of a module."""
    return plugin.endswith(".py") or "/" in plugin


def parse_override(text: str) -> tuple[str, JSON]:
    """Parse `finetune.lr=1e-3` into a name and a value, read as YAML. Raises ManifestError."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ManifestError([Problem(f"-s {text}: not of the form STAGE.OPTION=VALUE")])
    try:
        document = read(value, f"-s {name}")
    except ManifestError as error:
        raise ManifestError([Problem(f"-s {text}: {error.problems[0].message}")]) from error
    if document.problems:
        raise ManifestError(Problem(f"-s {text}: {problem.message}") for problem in document.problems)
    if "#" in value and _ends_in_comment(value, document.value):
        raise ManifestError([Problem(f"-s {text}: '#' begins a comment in YAML: put the text into quotes")])
    return name.strip(), document.value


def _ends_in_comment(text: str, value: JSON) -> bool:
    """Return whether one more letter at the end of a text changes nothing: YAML reads `red #1` as `red`."""
    with suppress(ManifestError):
        return read(f"{text.rstrip()}x", "").value == value
    return False


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig")
        place = Location(name, before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise ManifestError([Problem(f"not UTF-8 text: byte 0x{content[error.start]:02x}", place)]) from error


def _assign(options: dict[str, Any], names: Sequence[str], value: JSON) -> None:
    *parents, last = names
    for parent in parents:
        if not isinstance(options.get(parent), dict):
            options[parent] = {}
        options = options[parent]
    options[last] = deepcopy(value)


def _is_seed(value: JSON) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SEED


class _StructureCheck:
    """Checks the structure of a document, collecting every problem."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = list(document.problems)

    def manifest(self, path: Path) -> Manifest | None:
        top = self.document.value
        if top is None:
            message = "the manifest is empty; `ptpipe init` writes one to start from"
            self.problems.append(Problem(message, Location(str(path), 1, 1)))
            return None
        if not isinstance(top, dict):
            self._complain(f"a manifest is a mapping with `stages`, not {word_for(top)}", ())
            return None
        misspelt = self._known_keys(top, (), _TOP_KEYS)
        is_read = "version" in misspelt or self._version(top)
        name = top.get("name", path.stem if NAME_PATTERN.fullmatch(path.stem) else "unnamed")
        if not (isinstance(name, str) and NAME_PATTERN.fullmatch(name)):
            self._complain("name: letters, digits, '_', '-' and '.', at most 64, are allowed", ("name",))
        seed = top.get("seed", 0)
        if not _is_seed(seed):
            self._complain(f"seed: must be a whole number from 0 to {MAX_SEED}", ("seed",))
        plugins = top.get("plugins", [])
        knows_plugins = "plugins" not in misspelt and () not in self.document.broken
        if not (isinstance(plugins, list) and all(isinstance(plugin, str) and plugin for plugin in plugins)):
            self._complain("plugins: must be a list of files (./prune.py) or module names", ("plugins",))
            knows_plugins = False
        stages = self._stages(top.get("stages")) if "stages" not in misspelt else ()
        if not (stages and knows_plugins and is_read):
            return None
        known_seed = int(seed) if _is_seed(seed) else 0  # type: ignore[arg-type]  # as was checked
        return Manifest(path, str(name), known_seed, tuple(map(str, plugins)), stages, self.document)  # type: ignore[arg-type]  # as was checked

    def _version(self, top: Mapping[str, JSON]) -> bool:
        """Return whether the rest is to be read as this version's."""
        if "version" not in top:
            self._complain(f"`version: {VERSION}` is missing", ())
        elif top["version"] != VERSION or isinstance(top["version"], bool | float):
            given = json.dumps(top["version"])
            self._complain(f"version: this ptpipe reads version {VERSION}, not {given}", ("version",))
            return False
        return True

    def _stages(self, stages: JSON) -> tuple[StageEntry, ...]:
        if not isinstance(stages, dict) or not stages:
            form = (
                ", not a list: each is `ID: {uses: KIND}`, without a dash"
                if isinstance(stages, list) and stages
                else ""
            )
            self._complain(f"stages: must be a mapping from stage ids to stages{form}", ("stages",))
            return ()
        return tuple(self._stage(stage_id, stage) for stage_id, stage in stages.items())

    def _stage(self, stage_id: str, stage: JSON) -> StageEntry:
        path = ("stages", stage_id)
        if not ID_PATTERN.fullmatch(stage_id):
            self._complain(
                f"stage id {stage_id!r}: lower-case letters, digits, '_' and '-' are allowed", path, key=True
            )
            stage_id = stage_id[:64]  # as long as one may be: further messages begin with it
        if not isinstance(stage, dict):
            self._complain(f"{stage_id}: must be a mapping with `uses`, not {word_for(stage)}", path)
            return StageEntry(stage_id, "", broken=frozenset(_STAGE_KEYS))
        misspelt = self._known_keys(stage, path, _STAGE_KEYS)
        broken = {key for key in _STAGE_KEYS if key in misspelt or (None in misspelt and key not in stage)}
        if any(place[:2] == path for place in self.document.broken):
            broken.update(_STAGE_KEYS)
        uses, options = stage.get("uses"), stage.get("with")
        if not isinstance(uses, str):
            if "uses" not in misspelt:
                place = (*path, "uses") if "uses" in stage else path
                self._complain(f"{stage_id}: `uses: family.thing` is missing", place)
            broken.add("uses")
        if not isinstance(options, dict | None):
            self._complain(f"{stage_id}: `with` holds options by name, not {word_for(options)}", (*path, "with"))
            broken.add("with")
        needs, is_read = self._needs(stage_id, (*path, "needs"), stage.get("needs"), uses)
        if not is_read:
            broken.add("needs")
        return StageEntry(stage_id, str(uses), needs, options if isinstance(options, dict) else {}, frozenset(broken))

    def _needs(
        self, stage_id: str, path: tuple[str, ...], needs: JSON, uses: JSON
    ) -> tuple[dict[str, tuple[str, ...]], bool]:
        """Return the stages that are named, by input, and whether all could be read."""
        if needs is None:
            return {}, True
        if not isinstance(needs, dict):
            message = f"{stage_id}: `needs` holds stages by input name, not {word_for(needs)}"
            given = ", ".join(map(str, needs)) if isinstance(needs, list) else needs
            if isinstance(given, str) and re.fullmatch(r"[\w., -]{1,60}", given):
                form = f"[{given}]" if isinstance(needs, list) and len(needs) > 1 else given
                message += f": `needs: {{INPUT: {form}}}`; `ptpipe stages {uses or 'KIND'}` lists the inputs"
            self._complain(message, path)
            return {}, False
        result: dict[str, tuple[str, ...]] = {}
        for port, references in needs.items():
            several = references if isinstance(references, list) else [references]
            if several and all(isinstance(reference, str) and reference for reference in several):
                result[port] = tuple(str(reference) for reference in several)
            else:
                self._complain(f"{stage_id}: {port} needs a stage id or a list of them", (*path, port))
        return result, len(result) == len(needs)

    def _known_keys(self, mapping: Mapping[str, JSON], path: tuple[str, ...], known: Sequence[str]) -> set[str | None]:
        """Report unknown keys. Returns the missing keys that they seem to misspell, which need no report."""
        misspelt = set()
        for key in mapping:
            if key not in known:
                place = self.document.locate((*path, key), key=True)
                where = f" in stage {path[-1][:64]}" if path else ""
                missing = [word for word in known if word not in mapping]
                meant = nearest(key, missing) if len(self.problems) < MAX_PROBLEMS else None
                misspelt.add(meant)
                self.problems.append(Problem(f"unknown key {key!r}{where}", place, meant))
        return misspelt

    def _complain(self, message: str, path: tuple[str, ...], key: bool = False) -> None:
        self.problems.append(Problem(message, self.document.locate(path, key)))


def word_for(value: JSON) -> str:
    """Return the type of a value in YAML's terms."""
    words = {list: "a list", dict: "a mapping", str: "a text", bool: "a yes/no value", type(None): "nothing"}
    return words.get(type(value), "a number")
