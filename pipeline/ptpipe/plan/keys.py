"""Stage keys: the hash of everything that decides a stage's output, computed before any work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

from ptpipe import host
from ptpipe.artifact import JSON
from ptpipe.errors import ManifestError, Problem, StageError
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.source_digest import SourceDigests
from ptpipe.plan.source_functions import source_functions
from ptpipe.printable import error_text

FORMAT = 3

_DIGESTS = {"source": "the plugin's code", "machine": "measured on another machine"}
"""Parts that are digests, and what to print instead of them."""
_SOURCE_FILES = "source_files"
"""The part with the digests of Python files that options name, by file: absent where the stage's kind names none."""


@dataclass(frozen=True)
class Key:
    """A digest, and the named parts that it is the hash of."""

    digest: str
    parts: Mapping[str, JSON]

    @classmethod
    def of(cls, parts: Mapping[str, JSON]) -> Key:
        """Return the key of these parts."""
        return cls(hashlib.sha256(_canonical(parts).encode()).hexdigest(), parts)

    @property
    def short(self) -> str:
        """The first twelve digits, for display."""
        return self.digest[:12]


def compute_keys(plan: Plan, sources: SourceDigests) -> dict[str, Key]:
    """Return the key of every stage. Raises ManifestError where a stage's `fingerprint` fails (a missing file)."""
    keys: dict[str, Key] = {}
    problems: list[Problem] = []
    for stage in plan.stages:
        ask = partial(_ask, plan, stage, problems)
        parts = _known_parts(stage, plan.manifest.seed, keys)
        parts["source"] = sources.of(*code_roots(plan, stage))
        parts["config"] = ask("resolved_options()", partial(_options_of, stage))
        parts["fingerprint"] = ask("fingerprint()", partial(fingerprint_of, stage))
        if stage.stage.source_functions:
            parts[_SOURCE_FILES] = ask("source_functions()", partial(_source_files_of, stage, sources))
        keys[stage.id] = Key.of(parts)
    if problems:
        raise ManifestError(problems)
    return keys


def fingerprint_of(stage: PlannedStage) -> JSON:
    """Return what the stage's `fingerprint` says now, as it will be read back from the store; None without one."""
    function = stage.stage.fingerprint
    return _as_stored(function(stage.config)) if function else None


def _source_files_of(stage: PlannedStage, sources: SourceDigests) -> JSON:
    return {file: sources.digest_of_file(path) for file, path in {(f.file, f.path) for f in source_functions(stage)}}


def _options_of(stage: PlannedStage) -> JSON:
    return _as_stored(stage.config.keyed_options())


def code_roots(plan: Plan, stage: PlannedStage) -> tuple[str, ...]:
    """Return the names of the modules that the code behind a stage starts from: its function's and its plugin's."""
    return stage.stage.function.__module__, plan.vocabulary.owners[stage.kind].module.__name__


def differences(old: Mapping[str, JSON], new: Mapping[str, JSON]) -> list[str]:
    """Return what changed between the parts of two keys, one line each: `config.lr: 0.05 -> 0.01`."""
    flat_old, flat_new = dict(_flat(dict(old))), dict(_flat(dict(new)))
    lines = []
    for name in sorted(flat_old.keys() | flat_new.keys()):
        before, after = flat_old.get(name, "absent"), flat_new.get(name, "absent")
        if _canonical(before) != _canonical(after):  # to Python 1 is true, and 0.0 is -0.0
            lines.append(_described(name) or f"{name}: {_shown(before)} -> {_shown(after)}")
    return lines


def _described(name: str) -> str | None:
    """Return what to print for a part that is a digest."""
    file = name.removeprefix(f"{_SOURCE_FILES}.")
    return f"{file}, or what it imports, changed" if file != name else _DIGESTS.get(name)


def _ask(plan: Plan, stage: PlannedStage, problems: list[Problem], what: str, function: Callable[[], JSON]) -> JSON:
    """Return what a plugin's function says; None, and a problem more, where it fails."""
    try:
        return function()
    except (StageError, OSError) as error:
        problems.append(plan.problem(stage.id, error_text(error)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a plugin may raise anything
        problems.append(plan.plugin_problem(stage.id, what, error))
    return None


def _as_stored(value: JSON) -> JSON:
    """Return it as it will be read back from the store, so that `differences` can compare the two."""
    stored: JSON = json.loads(json.dumps(value))
    return stored


def _known_parts(stage: PlannedStage, seed: int, keys: Mapping[str, Key]) -> dict[str, JSON]:
    """Return the parts that follow from the plan alone."""
    inputs: dict[str, JSON] = {}
    several = {port.name for port in stage.stage.inputs if port.several}
    for port, references in stage.wiring.items():
        # Where a port takes several, the stage sees their names (Context.input_names): they decide its output.
        inputs[port] = [
            f"{reference}={keys[reference.stage].digest}/{reference.output}"
            if port in several
            else f"{keys[reference.stage].digest}/{reference.output}"
            for reference in references
        ]
    parts: dict[str, JSON] = {
        "format": FORMAT,
        "kind": stage.kind,
        "version": stage.stage.version,
        "seed": seed,
        "inputs": inputs,
        "packages": {name: _version(name) for name in stage.stage.packages},
    }
    if stage.stage.per_machine:
        parts["machine"] = host.fingerprint()
    return parts


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _flat(parts: JSON, name: str = "") -> list[tuple[str, JSON]]:
    if isinstance(parts, Mapping) and parts:
        return [item for key, value in parts.items() for item in _flat(value, f"{name}.{key}" if name else str(key))]
    return [(name, parts)]


def _shown(value: JSON) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
