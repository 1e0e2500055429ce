"""Measure the throughput of one training stage of a manifest with different numbers of workers.

The stage must have the options `parallel` (`mode`, `workers`), `batch_size`, `epochs` and `num_threads`, and report the
metrics `samples_per_s`, `samples_per_step` and `num_steps`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptpipe import (
    JSON,
    Event,
    ExitCode,
    ManifestError,
    Outcome,
    Plan,
    PlannedStage,
    Progress,
    PtpipeError,
    Reporter,
    RunOptions,
    StageFinished,
    Terminated,
    UsageError,
    load_plan,
    nearest,
    run,
)
from ptpipe_elastic.scaling.fit import Throughput

NUM_ROUNDS = 3
_OPTIONS = {"parallel", "batch_size", "epochs", "num_threads"}
_METRICS = ("samples_per_s", "samples_per_step", "num_steps")
_DEFAULT_BATCH_SIZE = 128
_ROUND_S = 3.0
_MIN_STEPS, _MAX_STEPS = 20, 300
_START_S = 2.5
"""The overhead of a measurement: starting workers, importing torch."""
_SILENT = -2
_LONG_S = 20.0
"""A first epoch that takes longer is announced."""
_COMPRESSION = {"bf16": 0.5, "fp16": 0.5}
"""Compressed bytes of gradients per byte, by the option `compress`."""


@dataclass(frozen=True)
class Setting:
    """A number of workers in one parallelism mode."""

    mode: str
    workers: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.workers} worker{'s' * (self.workers > 1)}"


@dataclass(frozen=True)
class Measured:
    """The measurements of a stage."""

    throughputs: tuple[Throughput, ...]
    """One worker first."""
    gradient_bytes: Mapping[str, float]
    """By mode: the gradients per step; empty if the stage does not report the size of its model."""
    notices: tuple[str, ...]


def choose_stage(plan: Plan, named: str | None) -> PlannedStage:
    """The training stage to measure: `named`, or the only one. Raises UsageError if that does not exist."""
    stages = {stage.id: stage for stage in plan.stages if set(stage.stage.config_type.model_fields) >= _OPTIONS}
    names = ", ".join(stages)
    if named is not None and named not in stages:
        if named in (stage.id for stage in plan.stages):
            raise UsageError(
                f"--stage {named}: {plan[named].kind} is no training stage; the manifest has {names or 'none'}"
            )
        suggestion = nearest(named, stages)
        hint = f" (did you mean {suggestion!r}?)" if suggestion else f"; the manifest has {names or 'none'}"
        raise UsageError(f"--stage {named}: no such training stage{hint}")
    if not stages:
        raise UsageError(f"{plan.manifest.path}: no training stage to measure")
    if named is None and len(stages) > 1:
        raise UsageError(f"{plan.manifest.path}: several training stages: choose one with --stage: {names}")
    return stages[named or names]


def samples_per_worker(plan: Plan, stage: PlannedStage) -> int:
    """The batch size per worker: the stage's own, else that of the stages that feed it, else 128."""
    options = [stage.options, *(plan[name].options for name in stage.upstream)]
    sizes = (size for given in options if isinstance(size := given.get("batch_size"), int))
    return next(sizes, _DEFAULT_BATCH_SIZE)


class Measurement:
    """Runs one stage of a plan, and those that it needs, many times. `tell` receives lines about the progress."""

    def __init__(self, plan: Plan, stage: PlannedStage, artifacts: Path, tell: Callable[[str], None]) -> None:
        self._plan, self._stage, self._artifacts, self._tell = plan, stage, artifacts, tell
        self.samples_per_worker = samples_per_worker(plan, stage)
        self._notices: dict[str, None] = {}
        self._epoch_samples = 0.0

    def check(self, settings: Sequence[Setting]) -> None:
        """Raise UsageError, with the stage's own reasons, if it does not support a setting."""
        problems = []
        for setting in settings:
            try:
                self._bound(setting, 1)
            except ManifestError as error:
                # The user gave --mode and --workers, not the overrides that the problems begin with.
                option = re.compile(rf"^(-s )?{re.escape(self._stage.id)}[\w.]*: ")
                problems += [f"{setting}: {option.sub('', problem.message)}" for problem in error.problems]
        if problems:
            raise UsageError("; ".join(dict.fromkeys(problems)))

    def measure(self, settings: Sequence[Setting]) -> Measured:
        """Measure each setting in several alternating rounds. The first setting must be a single worker.

        Raises PtpipeError if a run fails, UsageError if the split has too few samples for a step.
        """
        first = self._run(settings[0], 1)  # its throughput decides how many epochs the rest needs
        rate, per_step, num_steps = self._metrics(first)
        self._epoch_samples = num_steps * per_step
        target = min(_MAX_STEPS, max(_MIN_STEPS, math.ceil(_ROUND_S * rate / per_step)))
        epochs = {setting: math.ceil(target / math.ceil(num_steps / setting.workers)) for setting in settings}
        seconds = sum(epochs[s] * self._epoch_samples / (rate * math.sqrt(s.workers)) + _START_S for s in settings)
        self._tell(f"{NUM_ROUNDS} rounds of {len(settings)} measurements: about {_time(NUM_ROUNDS * seconds)}")
        rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
        samples: dict[Setting, float] = {}
        sizes: dict[str, float] = {}
        for number in range(NUM_ROUNDS):
            for setting in settings:
                event = self._run(setting, epochs[setting])
                rate, samples[setting], _ = self._metrics(event)
                if samples[setting] < per_step * setting.workers:
                    raise UsageError(
                        f"{setting}: the train split has fewer samples than one step of {setting.workers} x "
                        f"{self.samples_per_worker}: choose a smaller -s {self._stage.id}.batch_size=N"
                    )
                rates[setting].append(rate)
                sizes.update(_gradient_bytes(event, setting, self._parallel(setting)))
                self._tell(f"round {number + 1} of {NUM_ROUNDS}: {setting}: {rate:,.0f} samples/s")
        throughputs = tuple(
            Throughput(setting.mode, setting.workers, statistics.median(rounds), tuple(rounds), samples[setting])
            for setting, rounds in rates.items()
        )
        return Measured(throughputs, sizes, tuple(self._notices))

    def _run(self, setting: Setting, epochs: int) -> StageFinished:
        plan = self._bound(setting, epochs).subplan(self._stage.id)
        options = RunOptions(fresh=(self._stage.id,), verbosity=_SILENT)
        reporters = () if self._epoch_samples else (_FirstEpoch(self._stage.id, self._tell),)
        result = run(plan, artifacts=self._artifacts, options=options, reporters=reporters)
        if result.exit_code is ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if result.exit_code.is_interrupted:
            raise Terminated(result.exit_code)
        for event in result.stages.values():
            self._notices |= dict.fromkeys(f"{event.stage_id}: {notice}" for notice in event.notices)
            if event.outcome is Outcome.FAILED:
                error = PtpipeError(f"{setting}: {event.stage_id} failed: {event.message}")
                error.exit_code = result.exit_code
                raise error
        return result.stages[self._stage.id]

    def _bound(self, setting: Setting, epochs: int) -> Plan:
        stage_id = self._stage.id
        overrides: dict[str, JSON] = {
            f"{stage_id}.parallel": self._parallel(setting),
            f"{stage_id}.batch_size": self.samples_per_worker * setting.workers,
            f"{stage_id}.epochs": epochs,
            f"{stage_id}.num_threads": 1,
        }
        if self._stage.options.get("early_stopping"):
            overrides[f"{stage_id}.early_stopping"] = None
        return load_plan(self._plan, overrides)

    def _parallel(self, setting: Setting) -> dict[str, JSON]:
        """The `parallel` options: the manifest's own if the mode is the same."""
        if setting.workers == 1:
            return {}
        own = self._stage.options["parallel"]
        given: dict[str, JSON] = dict(own) if isinstance(own, dict) else {}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("mode") != setting.mode:
            given = {name: value for name, value in given.items() if name in ("comm", "timeout_s")}
        given |= {"mode": setting.mode, "workers": setting.workers}
        if setting.mode == "pp" and given.get("schedule") != "interleaved_1f1b":
            # One pipeline stage per worker; split points hold for the manifest's own number of them.
            if given.get("pipeline_stages", 2) != setting.workers:
                given.pop("split_at", None)
            given["pipeline_stages"] = setting.workers
        return given

    def _metrics(self, event: StageFinished) -> tuple[float, float, float]:
        values = [event.metrics.get(name) for name in _METRICS]
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            raise UsageError(
                f"{event.stage_id} ({event.kind}) does not report {', '.join(_METRICS)}: it can't be measured"
            )
        rate, per_step, num_steps = (float(value) for value in values)  # type: ignore[arg-type]  # checked above
        return rate, per_step, num_steps


class _FirstEpoch(Reporter):
    """Announces how long the first epoch takes, if that is long."""

    def __init__(self, stage_id: str, tell: Callable[[str], None]) -> None:
        self._stage_id, self._tell, self._is_done = stage_id, tell, False

    def event(self, event: Event) -> None:
        if not isinstance(event, Progress) or event.stage_id != self._stage_id or self._is_done or not event.total:
            return
        rate = event.facts.get("samples_per_s")
        if isinstance(rate, int | float) and rate > 0:
            self._is_done = True
            if event.total / rate > _LONG_S:
                self._tell(f"an epoch of one worker takes about {_time(event.total / rate)}")


def _gradient_bytes(event: StageFinished, setting: Setting, parallel: Mapping[str, JSON]) -> dict[str, float]:
    """By mode, the bytes of all gradients, which are those of the parameters: the model's size in its summary."""
    sizes: list[JSON] = []
    for output in event.outputs.values():
        summary = output.get("summary")
        sizes.append(summary.get("size_bytes") if isinstance(summary, dict) else None)
    found = [float(size) for size in sizes if isinstance(size, int | float)]
    return {setting.mode: found[0] * _COMPRESSION.get(str(parallel.get("compress")), 1.0)} if len(found) == 1 else {}


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
