"""Fixtures for pytest, after `pytest_plugins = ["ptpipe.testing"]`.

`bench` runs a stage as a run would use it; `ptpipe_run` runs a whole manifest, whose gates a test asserts.

PYTEST_DONT_REWRITE: a test module that imports from here does so before pytest loads its plugins.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast, get_type_hints

import pytest

from ptpipe.api import DEFAULT_ARTIFACTS, RunResult, run
from ptpipe.artifact import JSON, Artifact, Decision
from ptpipe.config import StageConfig
from ptpipe.context import Context, NamedCode
from ptpipe.errors import ManifestError, Problem, nearest
from ptpipe.events import Event, Metric, Notice, Outcome, StageFinished
from ptpipe.plan.options import changed_option, config_problems
from ptpipe.plan.source_functions import SourceFunction
from ptpipe.plan.vocabulary import FILE_PREFIX
from ptpipe.stages import Port, Stage
from ptpipe.store.store import Store

P = ParamSpec("P")
R = TypeVar("R")


class BrokenContractError(AssertionError):
    """A stage, or an artifact that it takes or returns, breaks a rule that every run depends on."""


class Bench:
    """Runs one stage at a time; its inputs and outputs go through a store, as in a run.

    `metrics`, `notices` and `events` have what the last stage reported. The content of `ctx.scratch` is kept for the
    next attempt after a failure, and deleted after a success.
    """

    def __init__(self, folder: Path, seed: int = 7) -> None:
        """Create a store in `folder`; `seed` is passed to stages as `ctx.seed`."""
        self.seed = seed
        self.metrics: dict[str, JSON] = {}
        self.notices: list[str] = []
        self.events: list[Event] = []
        self._functions: tuple[str, ...] = ()
        """What the options of the stages so far name: see `Artifact.with_source_functions`."""
        self._store = Store(folder)
        self._store.open_for_writing()

    def run(self, stage: Stage[P, R], config: Mapping[str, Any] | None = None, /, **inputs: Any) -> R:
        """Execute `stage` and return its result, loaded from the store.

        `config`: options, as under `with:` in a manifest. `inputs`: artifacts by port name.
        Raises ManifestError if the options are invalid or the preflight reports something missing, TypeError if the
        inputs do not fit the ports, BrokenContractError if the stage breaks a rule. Errors of the stage itself
        propagate.
        """
        options = _validated(stage, config or {})
        _check_inputs(stage, inputs)
        _prepare(stage, options)
        self.metrics, self.notices, self.events = {}, [], []
        addresses = stage.source_functions(options) if stage.source_functions else ()
        named = (SourceFunction(*address.rpartition(":")[::2]).address for address in addresses)
        self._functions = tuple(dict.fromkeys((*self._functions, *named)))
        digests: dict[str, tuple[str, ...]] = {}
        stored = {name: self._passed_in(stage, name, value, digests) for name, value in inputs.items()}
        with _silence(stage):
            returned = stage.function(options, self._context(stage, inputs, digests), **stored)  # type: ignore[arg-type]  # P is (config, ctx, ports)
        outputs = self._passed_out(stage, returned)
        self._store.drop_scratch(stage.kind)
        return _shaped(stage, outputs)

    def _context(
        self, stage: Stage[..., Any], inputs: Mapping[str, Any], digests: Mapping[str, tuple[str, ...]]
    ) -> Context:
        return Context(
            "bench",
            stage.kind,
            self.seed,
            self._store.scratch(stage.kind),
            {name: _references(name, value) for name, value in inputs.items()},
            self._record,
            input_digests=digests,
            code=NamedCode(_plugin_files(inputs), ".", self._functions),
        )

    def _record(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Metric(name=name, value=value):
                try:
                    json.dumps(value, allow_nan=False)
                except (TypeError, ValueError) as error:
                    raise BrokenContractError(f"metric {name}={value!r} is not JSON: {error}") from error
                self.metrics[name] = value
            case Notice(text=text):
                self.notices.append(text)

    def _passed_in(self, stage: Stage[..., Any], name: str, value: Any, digests: dict[str, tuple[str, ...]]) -> Any:
        """Return an input as a run would pass it, and add its objects to `digests`."""
        given = value if isinstance(value, Sequence) else () if value is None else (value,)
        stored = [self._through_store(f"{stage.kind}: input {name}", item, type(item)) for item in given]
        digests[name] = tuple(digest for _, digest in stored)
        loaded = [item for item, _ in stored]
        return loaded if isinstance(value, Sequence) else next(iter(loaded), None)

    def _passed_out(self, stage: Stage[..., Any], returned: object) -> list[Artifact]:
        try:
            outputs = stage.named(returned)
        except TypeError as error:
            raise BrokenContractError(str(error)) from error
        ports = {port.name: port for port in stage.outputs}
        return [
            self._through_store(f"{stage.kind}: output {name}", value, ports[name].type)[0]
            for name, value in outputs.items()
        ]

    def _through_store(self, what: str, value: Artifact, type_: type[Artifact]) -> tuple[Artifact, str]:
        """Save the value, load it as the promised type, compare what it saves again; return it and its digest."""
        if type(value) is not type_:
            given = type(value).__name__
            raise BrokenContractError(f"{what}: a run loads it as the promised {type_.__name__}, but it is a {given}")
        with _blamed(f"{what}: {type_.__name__}.save"):
            stored = self._store.put(value)
        _refuse_pickles(what, self._store.root / "objects" / stored.digest[:2] / stored.digest / "files")
        with _blamed(f"{what}: {type_.__name__}.load"):
            loaded = self._store.get(stored.digest, type_)
        with _blamed(f"{what}: {type_.__name__}.save of a loaded value"):
            again = self._store.put(loaded)
        if again.digest != stored.digest:
            raise BrokenContractError(
                f"{what}: {type_.__name__}.load does not restore what save wrote: saved again it differs"
            )
        return loaded.with_source_functions(self._functions), stored.digest


@dataclass(frozen=True)
class GatedRun(RunResult):
    """A run that has ended, and assertions about its gates."""

    def assert_passed(self, *gates: str) -> None:
        """Assert that `gates` passed; without names, that all did and that the run ended with exit code 0.

        An undecided gate has not passed, whether or not it fails the run. Raises AssertionError with the reasons of
        those that did not pass, the figures that they are based on and the folder of the run's report; ValueError where
        the manifest has no such gate.
        """
        __tracebackhide__ = True
        found = [line for gate in gates or self._gates for line in self._describe_unless_passed(gate)]
        if not gates and not self._gates:
            found.append(f"{self.plan.manifest.path} has no gate")
        if not gates and self.exit_code and not found:
            found.append(f"the run ended with exit code {int(self.exit_code)}")
        if found:
            found += [f"{each.stage_id} failed: {each.message}" for each in self.stages.values() if _has_failed(each)]
            raise AssertionError("\n".join([*found, f"report: {self.folder}"]))

    def _describe_unless_passed(self, gate: str) -> Iterator[str]:
        verdicts, stage = self.verdicts(gate), self.stages[gate]
        if not verdicts:
            yield f"gate {gate} gave no verdict: {stage.outcome}, {stage.message}"
        for verdict in verdicts:
            if verdict.decision is not Decision.PASSED:
                yield f"gate {gate} {verdict.decision}: {verdict.reason}"
                yield from (f"    {name} = {json.dumps(value)}" for name, value in verdict.facts.items())


class RunManifest(Protocol):
    """What the fixture `ptpipe_run` is: runs a manifest, as `ptpipe run` does.

    `manifest`, `overrides`, `artifacts`: as for `ptpipe.run`; the folder is by default `$PTPIPE_ARTIFACTS`, or
    `artifacts` in the working directory. What earlier runs computed is cached.
    """

    def __call__(
        self, manifest: Path | str, overrides: Mapping[str, Any] | None = None, artifacts: Path | str | None = None
    ) -> GatedRun:
        """Run it, and return the ended run. Raises ManifestError where it is wrong."""


@pytest.fixture
def ptpipe_run() -> RunManifest:
    """A function that runs a manifest: `ptpipe_run("m.yaml", {"finetune.lr": 0.001}).assert_passed("accuracy")`."""

    def run_manifest(
        manifest: Path | str, overrides: Mapping[str, Any] | None = None, artifacts: Path | str | None = None
    ) -> GatedRun:
        folder = artifacts or os.environ.get("PTPIPE_ARTIFACTS") or DEFAULT_ARTIFACTS
        result = GatedRun(**vars(run(manifest, overrides, artifacts=folder)))
        if result.exit_code.is_interrupted:  # by a signal that was meant for all tests
            pytest.exit(f"{manifest} was interrupted", returncode=int(result.exit_code))
        return result

    return run_manifest


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench with an empty store."""
    return Bench(tmp_path_factory.mktemp("bench"))


def _has_failed(stage: StageFinished) -> bool:
    return stage.outcome is Outcome.FAILED


def _validated(stage: Stage[..., Any], options: Mapping[str, Any]) -> StageConfig:
    config, problems = config_problems(stage, options)
    if config is None:
        raise ManifestError(Problem(message, suggestion=suggestion) for _, message, suggestion, _ in problems)
    if changed := changed_option(stage.kind, config):
        raise BrokenContractError(changed)
    return config


def _check_inputs(stage: Stage[..., Any], inputs: Mapping[str, Any]) -> None:
    ports = {port.name: port for port in stage.inputs}
    for name in inputs:
        if name not in ports:
            raise TypeError(str(Problem(f"{stage.kind} has no input {name!r}", suggestion=nearest(name, ports))))
    for port in stage.inputs:
        value = inputs.get(port.name)
        if not _fits(value, port):
            wanted = f"a sequence of {port.type.__name__}" if port.several else f"a {port.type.__name__}"
            raise TypeError(f"{stage.kind}: input {port.name} wants {wanted}, not {value!r}")


def _fits(value: object, port: Port) -> bool:
    if port.several:
        return isinstance(value, Sequence) and all(isinstance(item, port.type) for item in value)
    return isinstance(value, port.type) or (port.optional and value is None)


def _prepare(stage: Stage[..., Any], config: StageConfig) -> None:
    """Do what a run does before its first stage."""
    if stage.preflight and (missing := list(stage.preflight(config))):
        raise ManifestError(Problem(f"{stage.kind}: {line}") for line in missing)
    try:
        json.dumps(stage.fingerprint(config) if stage.fingerprint else None, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BrokenContractError(f"{stage.kind}: fingerprint(config) returned no JSON: {error}") from error
    num_workers = stage.workers(config) if stage.workers else 1
    if num_workers != 1:
        raise ValueError(f"{stage.kind} wants {num_workers} workers, and the bench has one: choose options for one")


@contextlib.contextmanager
def _silence(stage: Stage[..., Any]) -> Iterator[None]:
    """Refuse output on stdout, which is for results: it would corrupt `--json`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    if printed.getvalue():
        raise BrokenContractError(
            f"{stage.kind} printed {printed.getvalue()[:80]!r}: use ctx.log, ctx.notice or ctx.progress"
        )


@contextlib.contextmanager
def _blamed(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise BrokenContractError(f"{what} raised {type(error).__name__}: {error}") from error


def _refuse_pickles(what: str, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and _is_pickle(path):
            raise BrokenContractError(
                f"{what}: {path.name} is a pickle, which runs code when it is loaded; use safetensors or JSON"
            )


def _is_pickle(path: Path) -> bool:
    if zipfile.is_zipfile(path):  # torch.save
        return any(Path(name).suffix == ".pkl" for name in zipfile.ZipFile(path).namelist())
    with path.open("rb") as file:
        if file.read(1) != b"\x80":  # protocol 2 and later
            return False
        file.seek(0)
        try:
            for _ in pickletools.genops(file):
                pass
        except (ValueError, IndexError, UnicodeError):
            return False
        return not file.read(1)


def _plugin_files(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files of the plugins of one file that the inputs' classes are in, as a manifest would name them."""
    values = (item for value in inputs.values() for item in (value if isinstance(value, Sequence) else (value,)))
    modules = {module: sys.modules[module] for module in (type(value).__module__ for value in values)}
    return tuple(str(own.__file__) for name, own in modules.items() if name.startswith(FILE_PREFIX))


def _references(name: str, value: object) -> tuple[str, ...]:
    """References as a manifest might have them."""
    return tuple(f"{name}{n}" for n in range(1, len(value) + 1)) if isinstance(value, Sequence) else (name,)


def _shaped(stage: Stage[P, R], outputs: Sequence[Artifact]) -> R:
    """The outputs as the function returns them: an Artifact or a NamedTuple."""
    promised = get_type_hints(stage.function)["return"]
    shaped: Any = outputs[0] if issubclass(promised, Artifact) else promised(*outputs)
    return cast(R, shaped)
