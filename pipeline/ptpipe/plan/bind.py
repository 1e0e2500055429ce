"""The plan: a manifest bound to a vocabulary, with kinds, options and wiring resolved and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ptpipe.artifact import JSON
from ptpipe.config import StageConfig, options_as_json
from ptpipe.errors import MAX_PROBLEMS, ExitCode, Location, ManifestError, Problem, Severity, nearest
from ptpipe.manifest.manifest import Manifest, StageEntry
from ptpipe.plan.frames import describe_error
from ptpipe.plan.hints import beside_manifest_hint, kind_hint, same_name_hint
from ptpipe.plan.module_files import no_bytecode
from ptpipe.plan.options import changed_option, config_problems
from ptpipe.plan.rules import hook_warnings, problems_of_sound_stages
from ptpipe.plan.source_functions import functions_above, missing_files
from ptpipe.plan.vocabulary import Vocabulary
from ptpipe.stages import Port, Stage

_MAX_NAMED = 5
"""How many of the stages that fit an input a message names."""


@dataclass(frozen=True)
class Reference:
    """An output of a stage above."""

    stage: str
    output: str
    text: str
    """As in a manifest: `calibrate.model`, or `pretrain` where that is unambiguous."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PlannedStage:
    """One stage with its kind, options and inputs resolved."""

    id: str
    stage: Stage[..., object]
    config: StageConfig
    wiring: Mapping[str, tuple[Reference, ...]]
    """Input port to the outputs it is connected to; unconnected ports are absent."""

    @property
    def kind(self) -> str:
        """The kind's name: `train.supervised`."""
        return self.stage.kind

    @property
    def options(self) -> dict[str, JSON]:
        """The options with defaults filled in, as JSON."""
        return options_as_json(self.config)

    @cached_property
    def upstream(self) -> tuple[str, ...]:
        """Ids of the stages that this one has inputs from, each once."""
        return tuple(dict.fromkeys(reference.stage for references in self.wiring.values() for reference in references))


@dataclass(frozen=True)
class Plan:
    """Stages in run order; needs point upwards only."""

    manifest: Manifest
    vocabulary: Vocabulary
    stages: tuple[PlannedStage, ...]
    notes: tuple[Problem, ...] = ()
    """What could not be checked, because the manifest's plugins were not loaded: such a plan can't be run."""
    warnings: tuple[Problem, ...] = ()
    """What plugins' checks found that stops nothing."""

    def __getitem__(self, stage_id: str) -> PlannedStage:
        return self._by_id[stage_id]

    @cached_property
    def _by_id(self) -> dict[str, PlannedStage]:
        return {stage.id: stage for stage in self.stages}

    @cached_property
    def unkeyed_values(self) -> dict[str, dict[str, JSON]]:
        """For each stage, the options that are in no key: its own, and those of the stages above it."""
        values: dict[str, dict[str, JSON]] = {}
        for stage in self.stages:
            values[stage.id] = {}
            for options in (*(values[name] for name in stage.upstream), stage.config.unkeyed_values()):
                values[stage.id] |= options
        return values

    @cached_property
    def source_functions(self) -> dict[str, tuple[str, ...]]:
        """For each stage, what its options and those of the stages above it name: see `Artifact`."""
        return {name: tuple(f.address for f in functions) for name, functions in functions_above(self).items()}

    def subplan(self, stage_id: str) -> Plan:
        """Return the plan of the stage `stage_id` and the stages that it depends on."""
        wanted = {stage_id}
        for stage in reversed(self.stages):
            if stage.id in wanted:
                wanted.update(stage.upstream)
        return replace(self, stages=tuple(stage for stage in self.stages if stage.id in wanted))

    def problem(
        self,
        stage_id: str,
        message: str,
        *option: str,
        suggestion: str | None = None,
        severity: Severity = "error",
    ) -> Problem:
        """Return a problem of a stage (or of one option), located in the manifest. For `ptpipe_check` hooks.

        `stage_id`: the stage's name. `message`: what is wrong. `option`: the path of the option below `with:`.
        `suggestion`: what to write instead. `severity`: "warning" does not stop the run.
        """
        path = ("stages", stage_id, *(("with", *option) if option else ()))
        if stage_id in self._by_id:  # else it is one that is wrong in itself
            message += beside_manifest_hint(self.manifest.path, self[stage_id].options, message)
        return Problem(f"{stage_id}: {message}", self.manifest.locate(*path), suggestion, severity=severity)

    def plugin_problem(self, stage_id: str, what: str, error: BaseException) -> Problem:
        """Return a problem of the plugin behind the stage `stage_id`: its `what` (`preflight()`) raised `error`."""
        stage = self[stage_id]
        owner = self.vocabulary.owners[stage.kind].name
        message = f"{stage_id}: {what} of {stage.kind} (plugin {owner}) failed: {describe_error(error)}"
        return Problem(message, self.manifest.locate("stages", stage_id), code=ExitCode.PLUGIN)


def bind(manifest: Manifest, vocabulary: Vocabulary) -> Plan:
    """Resolve every stage's kind, options and inputs. Raises ManifestError with every problem found.

    Without the manifest's plugins (`Vocabulary.without_named`), a kind that is not known is a note.
    """
    binder = _Binder(manifest, vocabulary)
    stages = tuple(stage for entry in manifest.stages if (stage := binder.bind(entry)))
    plan = Plan(manifest, vocabulary, stages, tuple(binder.notes))
    problems = [*vocabulary.problems, *binder.problems, *binder.broken_plugins()]
    with no_bytecode():
        if not problems and not manifest.problems and not plan.notes:
            problems += [*missing_files(plan)]
            if not problems:
                return replace(plan, warnings=hook_warnings(plan, "ptpipe_check"))
        elif (problems or manifest.problems) and not vocabulary.problems and not plan.notes:
            problems += problems_of_sound_stages(plan, binder.faulty)
    if manifest.problems:
        problems = sorted([*manifest.problems, *problems], key=lambda problem: problem.location or Location("", 0, 0))
    if problems:
        raise ManifestError(problems)
    return plan


class _Binder:
    """Binds stage after stage, collecting every problem."""

    def __init__(self, manifest: Manifest, vocabulary: Vocabulary) -> None:
        self.manifest = manifest
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []
        self.faulty = {entry.id for entry in manifest.stages if entry.broken}
        """Stages with a problem."""
        self.above: dict[str, Stage[..., object] | None] = {}
        """Stages bound so far; None where the kind is unknown, so that one mistake gives one message."""
        self.candidates = _Candidates()
        self.stage_ids = {entry.id for entry in manifest.stages}
        self.knows_all_above = True
        self.has_failed_plugin = any(problem.code is ExitCode.PLUGIN for problem in vocabulary.problems)
        self.suggestions: list[str | None] = []
        """For each unknown kind, the one that it may have meant."""

    def broken_plugins(self) -> list[Problem]:
        """Return the broken plugins that may offer an unknown kind: as warnings where each may be a mistyped one."""
        if None in self.suggestions:
            return [Problem(line, code=ExitCode.PLUGIN) for line in self.vocabulary.broken_lines]
        return [Problem(line, severity="warning") for line in self.vocabulary.broken_lines] if self.suggestions else []

    def bind(self, entry: StageEntry) -> PlannedStage | None:
        stage = self._kind(entry)
        bound = None
        if stage is not None:
            config = self._config(entry, stage) if "with" not in entry.broken else None
            wiring = self._wiring(entry, stage)
            bound = PlannedStage(entry.id, stage, config, wiring) if config is not None else None
            self.candidates.add(entry.id, stage)
        else:
            self._check_needs(entry)
            self.knows_all_above = False
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
        self.faulty.add(entry.id)
        self.problems.append(Problem(f"{entry.id}: {message}", place, suggestion, code))

    def _kind(self, entry: StageEntry) -> Stage[..., object] | None:
        stage = self.vocabulary.stages.get(entry.uses)
        if "uses" in entry.broken:
            return None
        if stage is None:
            renamed = next((kind for kind in self.vocabulary.stages.values() if kind.renamed_from == entry.uses), None)
            if renamed:
                self._complain(entry, f"{entry.uses} was renamed to {renamed.kind}", "uses")
                return renamed
            stages = self.vocabulary.stages
            suggestion, hint = kind_hint(entry.uses, stages) if self._is_reported() else (None, "")
            if self.vocabulary.without_named:
                message = f"{entry.id}: stage kind {entry.uses!r} is not checked: it is neither built in nor installed"
                place = self.manifest.locate("stages", entry.id, "uses")
                self.notes.append(Problem(message, place, suggestion, ExitCode.DONE, "note"))
                return None
            if suggestion is None and self.has_failed_plugin:
                return None  # one mistake, one message: the plugin that may offer it has failed
            self.suggestions.append(suggestion)
            self._complain(entry, f"unknown stage kind {entry.uses!r}{hint}", "uses", suggestion=suggestion)
        return stage

    def _is_reported(self) -> bool:
        """Return whether a further problem is reported, and not only counted."""
        return len(self.problems) + len(self.notes) < MAX_PROBLEMS

    def _nearest(self, word: str, words: Iterable[str]) -> str | None:
        return nearest(word, words) if self._is_reported() else None

    def _check_needs(self, entry: StageEntry) -> None:
        """Check what can be checked of the inputs of an unknown kind."""
        for port, texts in entry.needs.items():
            for position, text in enumerate(texts):
                stage_id = text.partition(".")[0]
                if stage_id not in self.above:
                    self._complain_absent(entry, stage_id, ("needs", port, position))

    def _config(self, entry: StageEntry, stage: Stage[..., object]) -> StageConfig | None:
        try:
            num_reported = max(0, MAX_PROBLEMS - len(self.problems))
            config, problems = config_problems(stage, entry.options, num_reported)
            changed = changed_option(stage.kind, config) if config else ""
        except Exception as error:  # noqa: BLE001  # a plugin's validator may raise anything
            message = f"checking the options of {stage.kind} failed: {describe_error(error)}"
            self._complain(entry, message, "with", code=ExitCode.PLUGIN)
            return None
        if changed:
            self._complain(entry, changed, "with", code=ExitCode.PLUGIN)
        for path, message, suggestion, at_key in problems:
            names = accumulate((entry.id, *map(str, path)), "{}.{}".format)
            if self.manifest.overrides and any(name in self.manifest.overrides for name in names):
                name = ".".join((entry.id, *map(str, path)))
                self.faulty.add(entry.id)
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
                self._complain(entry, message, "needs", name, suggestion=self._nearest(name, ports), key=True)
        wiring = {}
        for port in stage.inputs:
            named = entry.needs.get(port.name)
            if not named and "needs" in entry.broken:
                continue
            found = self._named(entry, port, named) if named else self._found(entry, port)
            if found:
                wiring[port.name] = found
        return wiring

    def _named(self, entry: StageEntry, port: Port, texts: tuple[str, ...]) -> tuple[Reference, ...]:
        if len(texts) > 1 and not port.several:
            self._complain(entry, f"{port.name} takes one input, not {len(texts)}", "needs", port.name)
            return ()
        for text in sorted(text for text, number in Counter(texts).items() if number > 1):
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
            self._complain(entry, message, *path, suggestion=self._nearest(output, names))
            return None
        fitting = [o for o in stage.outputs if issubclass(o.type, port.type) and output in ("", o.name)]
        if len(fitting) == 1:
            return _reference(stage_id, stage, fitting[0], port)
        given = ", ".join(f"{o.name}: {o.type.__name__}" for o in stage.outputs if output in ("", o.name))
        if fitting:
            message = f"{text!r} is ambiguous for {port.name}: {given}; name one, such as {stage_id}.{fitting[0].name}"
        else:
            message = f"{port.name} takes a {port.type.__name__}; {stage_id} ({stage.kind}) has {given}"
            message += same_name_hint(port.type, (o.type for o in stage.outputs if output in ("", o.name)))
        self._complain(entry, message, *path)
        return None

    def _complain_absent(self, entry: StageEntry, stage_id: str, path: tuple[str | int, ...]) -> None:
        if stage_id == entry.id:
            self._complain(entry, "a stage cannot need itself", *path)
        elif stage_id in self.stage_ids:
            self._complain(entry, f"{stage_id!r} comes later; needs refer to stages above only", *path)
        else:
            suggestion = self._nearest(stage_id, reversed(self.above))
            self._complain(entry, f"there is no stage {stage_id!r}", *path, suggestion=suggestion)

    def _found(self, entry: StageEntry, port: Port) -> tuple[Reference, ...]:
        if port.optional:
            return ()
        if not self.knows_all_above:
            return ()  # the outputs of an unknown kind are unknown
        fitting = self.candidates.fitting(port)
        if len(fitting) == 1:
            return (fitting[0],)
        if fitting:
            choices = ", ".join(map(str, fitting[:_MAX_NAMED]))
            choices += f" and {len(fitting) - _MAX_NAMED:,} more" if len(fitting) > _MAX_NAMED else ""
            named = f"{port.name}: {f'[{choices}]' if port.several and len(fitting) <= _MAX_NAMED else fitting[-1]}"
            add = f"`{named}` in `needs`" if entry.needs else f"`needs: {{{named}}}`"
            message = f"input {port.name} ({port.type.__name__}) fits several stages above: {choices}; "
            message += f"name one, such as {add}"
        else:
            message = f"input {port.name}: no stage above has an output of type {port.type.__name__}"
            if self._is_reported():
                above = (output.type for _, stage in self.candidates.stages for output in stage.outputs)
                message += same_name_hint(port.type, above) or self._later(entry, port)
        self._complain(entry, message)
        return ()

    def _later(self, entry: StageEntry, port: Port) -> str:
        """Return what to do where a stage below has what an input needs; else nothing."""
        below = self.manifest.stages[len(self.above) + 1 :]
        for later in below:
            stage = self.vocabulary.stages.get(later.uses)
            if stage is not None and any(issubclass(output.type, port.type) for output in stage.outputs):
                if any(name == entry.id for names in later.needs.values() for name in names):
                    continue  # it can't move up
                place = self.manifest.locate("stages", later.id, key=True)
                line = f" (line {place.line})" if place else ""
                return f"; {later.id} comes later{line}: move it up"
        return ""


class _Candidates:
    """The outputs of the stages above, found by the type of an input in time that does not grow with their number."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, Stage[..., object]]] = []
        self.found: dict[type, tuple[int, list[Reference]]] = {}
        """A type to the number of stages that were searched for it, and their outputs that fit."""

    def add(self, stage_id: str, stage: Stage[..., object]) -> None:
        self.stages.append((stage_id, stage))

    def fitting(self, port: Port) -> list[Reference]:
        """Return all outputs above that fit an input."""
        num_searched, found = self.found.get(port.type, (0, []))
        for stage_id, stage in self.stages[num_searched:]:
            fitting = (output for output in stage.outputs if issubclass(output.type, port.type))
            found.extend(_reference(stage_id, stage, output, port) for output in fitting)
        self.found[port.type] = (len(self.stages), found)
        return found


def _reference(stage_id: str, stage: Stage[..., object], output: Port, port: Port) -> Reference:
    alone = sum(issubclass(other.type, port.type) for other in stage.outputs) == 1
    return Reference(stage_id, output.name, stage_id if alone else f"{stage_id}.{output.name}")
