"""A plan: a manifest bound to a vocabulary, checked before any work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel, ValidationError

from ptpipe.artifact import JSON
from ptpipe.config import StageConfig
from ptpipe.errors import ExitCode, ManifestError, Problem, nearest
from ptpipe.manifest import Manifest, StageEntry
from ptpipe.plugins import Vocabulary
from ptpipe.stage import Port, Stage


@dataclass(frozen=True)
class Reference:
    """An output of a stage above."""

    stage: str
    output: str
    text: str
    """As a manifest would say it: `calibrate.model`, or `pretrain` where that is enough."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PlannedStage:
    """One stage with everything decided."""

    id: str
    stage: Stage[..., object]
    config: StageConfig
    wiring: Mapping[str, tuple[Reference, ...]]
    """Port name to what feeds it; ports left empty are absent."""

    @property
    def kind(self) -> str:
        """The kind's word."""
        return self.stage.kind

    @property
    def options(self) -> dict[str, JSON]:
        """The options with defaults filled in, as JSON."""
        options: dict[str, JSON] = self.config.model_dump(mode="json")
        return options

    @cached_property
    def upstream(self) -> tuple[str, ...]:
        """Ids of the stages that feed this one, each once."""
        return tuple(dict.fromkeys(reference.stage for references in self.wiring.values() for reference in references))


@dataclass(frozen=True)
class Plan:
    """Stages in run order; needs point upwards only."""

    manifest: Manifest
    vocabulary: Vocabulary
    stages: tuple[PlannedStage, ...]

    def __getitem__(self, stage_id: str) -> PlannedStage:
        return self._by_id[stage_id]

    @cached_property
    def _by_id(self) -> dict[str, PlannedStage]:
        return {stage.id: stage for stage in self.stages}

    def problem(self, stage_id: str, message: str, *option: str, suggestion: str | None = None) -> Problem:
        """A problem of this stage (of this option of it), at its place in the manifest. For `ptpipe_check` hooks."""
        path = ("stages", stage_id, *(("with", *option) if option else ()))
        return Problem(f"{stage_id}: {message}", self.manifest.locate(*path), suggestion)


def bind(manifest: Manifest, vocabulary: Vocabulary) -> Plan:
    """Give every stage its kind, options and inputs. Raises ManifestError with every problem found."""
    problems = [_placed(problem, manifest) for problem in vocabulary.problems]
    binder = _Binder(manifest, vocabulary)
    stages = tuple(stage for entry in manifest.stages if (stage := binder.bind(entry)))
    problems += binder.problems
    plan = Plan(manifest, vocabulary, stages)
    if not problems:
        problems += [problem for answer in vocabulary.manager.hook.ptpipe_check(plan=plan) for problem in answer]
    if problems:
        raise ManifestError(problems)
    return plan


def config_problems(
    stage: Stage[..., object], options: Mapping[str, JSON]
) -> tuple[StageConfig | None, list[tuple[tuple[str | int, ...], str, str | None, bool]]]:
    """Validate options as a manifest's: the config, or else (path, message, suggestion, at_key) for each problem.

    JSON's types are taken at their word: "3" is not a number, 1 is a fine 1.0, a list may fill a tuple.
    """
    try:
        return stage.config_type.model_validate_json(json.dumps(options), strict=True), []
    except ValidationError as error:
        return None, [_option_problem(stage, details) for details in error.errors(include_url=False)]


def _option_problem(stage: Stage[..., object], details: object) -> tuple[tuple[str | int, ...], str, str | None, bool]:
    assert isinstance(details, Mapping)
    path = tuple(details["loc"])
    name = ".".join(map(str, path))
    if details["type"] == "extra_forbidden":
        known = _fields_at(stage.config_type, path[:-1])
        return path, f"unknown option {name!r} of {stage.kind}", nearest(str(path[-1]), known), True
    if details["type"] == "missing":
        return path[:-1], f"option {name!r} of {stage.kind} must be given", None, False
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = "" if isinstance(details["input"], dict | list) else f", not {json.dumps(details['input'])}"
    choices = [
        choice.strip("'") for choice in details.get("ctx", {}).get("expected", "").replace(" or ", ", ").split(", ")
    ]
    return path, f"{name + ': ' if name else ''}{message}{given}", nearest(str(details["input"]), choices), False


def _fields_at(config_type: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    for step in path:
        field = config_type.model_fields.get(str(step))
        if field is None:
            return []
        nested = [t for t in _types_in(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
        if len(nested) != 1:
            return []
        config_type = nested[0]
    return list(config_type.model_fields)


def _types_in(annotation: object) -> Iterator[object]:
    arguments = getattr(annotation, "__args__", ())
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _types_in(argument)


def _placed(problem: Problem, manifest: Manifest) -> Problem:
    for position, name in enumerate(manifest.plugins):
        if problem.message.startswith(f"plugin {name} ") and problem.location is None:
            return Problem(problem.message, manifest.locate("plugins", position), problem.suggestion, problem.code)
    return problem


class _Binder:
    """Binds stage after stage, collecting every problem."""

    def __init__(self, manifest: Manifest, vocabulary: Vocabulary) -> None:
        self.manifest = manifest
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []
        self.above: dict[str, Stage[..., object] | None] = {}
        """Stages bound so far; None where the kind is unknown, so that one mistake gives one message."""
        self.order = [entry.id for entry in manifest.stages]

    def bind(self, entry: StageEntry) -> PlannedStage | None:
        stage = self._kind(entry)
        bound = None
        if stage is not None:
            config = self._config(entry, stage)
            wiring = self._wiring(entry, stage)
            bound = PlannedStage(entry.id, stage, config, wiring) if config is not None else None
        self.above[entry.id] = stage
        return bound

    def _complain(
        self,
        entry: StageEntry,
        message: str,
        *path: str | int,
        suggestion: str | None = None,
        key: bool = False,
        code: ExitCode = ExitCode.USAGE,
    ) -> None:
        place = self.manifest.locate("stages", entry.id, *path, key=key)
        self.problems.append(Problem(f"{entry.id}: {message}", place, suggestion, code))

    def _kind(self, entry: StageEntry) -> Stage[..., object] | None:
        stage = self.vocabulary.stages.get(entry.uses)
        if stage is None:
            suggestion = nearest(entry.uses, self.vocabulary.stages)
            message, code = f"unknown stage kind {entry.uses!r}", ExitCode.USAGE
            if self.vocabulary.broken and suggestion is None:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in self.vocabulary.broken.items())
                message, code = f"{message}, and some plugins failed to load: {reasons}", ExitCode.PLUGIN
            self._complain(entry, message, "uses", suggestion=suggestion, code=code)
        return stage

    def _config(self, entry: StageEntry, stage: Stage[..., object]) -> StageConfig | None:
        config, problems = config_problems(stage, entry.options)
        for path, message, suggestion, at_key in problems:
            name = ".".join((entry.id, *map(str, path)))
            if any(name == given or name.startswith(f"{given}.") for given in self.manifest.overrides):
                self.problems.append(Problem(f"-s {name}: {message}", suggestion=suggestion))
            else:
                self._complain(entry, message, "with", *path, suggestion=suggestion, key=at_key)
        return config

    def _wiring(self, entry: StageEntry, stage: Stage[..., object]) -> dict[str, tuple[Reference, ...]]:
        ports = {port.name: port for port in stage.inputs}
        for name in entry.needs:
            if name not in ports:
                has = f"it has {', '.join(ports)}" if ports else "it has none"
                message = f"{entry.uses} has no input {name!r}; {has}"
                self._complain(entry, message, "needs", name, suggestion=nearest(name, ports), key=True)
        wiring = {}
        for port in stage.inputs:
            named = entry.needs.get(port.name)
            found = self._named(entry, port, named) if named else self._found(entry, port)
            if found:
                wiring[port.name] = found
        return wiring

    def _named(self, entry: StageEntry, port: Port, texts: tuple[str, ...]) -> tuple[Reference, ...]:
        if len(texts) > 1 and not port.several:
            self._complain(entry, f"{port.name} takes one input, not {len(texts)}", "needs", port.name)
            return ()
        for text in sorted({text for text in texts if texts.count(text) > 1}):
            self._complain(entry, f"{port.name} names {text!r} twice", "needs", port.name)
        references = (self._resolve(entry, port, text, position) for position, text in enumerate(texts))
        return tuple(reference for reference in references if reference)

    def _resolve(self, entry: StageEntry, port: Port, text: str, position: int) -> Reference | None:
        path = ("needs", port.name, position)
        stage_id, _, output = text.partition(".")
        if stage_id not in self.above:
            self._complain_absent(entry, stage_id, path)
            return None
        stage = self.above[stage_id]
        if stage is None:
            return None
        names = [candidate.name for candidate in stage.outputs]
        if output and output not in names:
            message = f"{stage_id} ({stage.kind}) has no output {output!r}; it has {', '.join(names)}"
            self._complain(entry, message, *path, suggestion=nearest(output, names))
            return None
        fitting = [o for o in stage.outputs if issubclass(o.type, port.type) and output in ("", o.name)]
        if len(fitting) == 1:
            return _reference(stage_id, stage, fitting[0], port)
        given = ", ".join(f"{o.name}: {o.type.__name__}" for o in stage.outputs if output in ("", o.name))
        if fitting:
            message = f"{text!r} is ambiguous for {port.name}: {given}; say {stage_id}.{fitting[0].name} or the like"
        else:
            message = f"{port.name} takes a {port.type.__name__}; {stage_id} ({stage.kind}) gives {given}"
        self._complain(entry, message, *path)
        return None

    def _complain_absent(self, entry: StageEntry, stage_id: str, path: tuple[str | int, ...]) -> None:
        if stage_id == entry.id:
            self._complain(entry, "a stage cannot need itself", *path)
        elif stage_id in self.order:
            self._complain(entry, f"{stage_id!r} stands below; needs point upwards only", *path)
        else:
            self._complain(entry, f"there is no stage {stage_id!r}", *path, suggestion=nearest(stage_id, self.above))

    def _found(self, entry: StageEntry, port: Port) -> tuple[Reference, ...]:
        if port.optional:
            return ()
        if None in self.above.values():
            return ()  # what an unknown kind would have given nobody knows
        fitting = [
            _reference(stage_id, stage, output, port)
            for stage_id, stage in self.above.items()
            if stage is not None
            for output in stage.outputs
            if issubclass(output.type, port.type)
        ]
        if len(fitting) == 1:
            return (fitting[0],)
        if fitting:
            choices = ", ".join(map(str, fitting))
            message = (
                f"input {port.name} ({port.type.__name__}) fits several stages above: {choices}; name one under needs"
            )
        else:
            message = f"input {port.name}: no stage above gives a {port.type.__name__}"
        self._complain(entry, message)
        return ()


def _reference(stage_id: str, stage: Stage[..., object], output: Port, port: Port) -> Reference:
    alone = sum(issubclass(other.type, port.type) for other in stage.outputs) == 1
    return Reference(stage_id, output.name, stage_id if alone else f"{stage_id}.{output.name}")
