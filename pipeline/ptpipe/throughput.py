"""Measuring one training stage of a manifest with different numbers of workers, for `ptpipe scaling`.

A stage that can be measured is one with the options `parallel` (`mode`, `workers`), `batch_size`, `epochs` and
`num_threads`, that says `images_per_s`, `samples_per_step` and `num_steps` of its result.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptpipe.artifact import JSON
from ptpipe.errors import ExitCode, ManifestError, PtpipeError, Terminated, UsageError, nearest
from ptpipe.events import Event, Outcome, Progress, StageFinished
from ptpipe.execution.engine import RunOptions, execute
from ptpipe.manifest.manifest import Manifest
from ptpipe.plan.bind import Plan, PlannedStage, bind
from ptpipe.reporter import Reporter
from ptpipe.scaling import Throughput
from ptpipe.store.store import Store

NUM_ROUNDS = 3
_OPTIONS = {"parallel", "batch_size", "epochs", "num_threads"}
_FACTS = ("images_per_s", "samples_per_step", "num_steps")
_USUAL_BATCH = 128
_ROUND_S = 3.0
_MIN_STEPS, _MAX_STEPS = 20, 300
_START_S = 2.5
"""What a measurement takes beside training: starting workers, importing torch."""
_SILENT = -2
_LONG_S = 20.0
"""Whoever waits longer wants to know how long."""
_BYTES_OF = {"bf16": 0.5, "fp16": 0.5}
"""What compressing leaves of the gradients' bytes."""


@dataclass(frozen=True)
class Setting:
    """What is measured: so many workers in this mode."""

    mode: str
    workers: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.workers} worker{'s' * (self.workers > 1)}"


@dataclass(frozen=True)
class Measured:
    """All that was measured of a stage."""

    throughputs: tuple[Throughput, ...]
    """That of one worker first."""
    gradient_bytes: Mapping[str, float]
    """By mode, what each worker sends of in a step; empty where the stage doesn't say how large its model is."""
    notices: tuple[str, ...]


def choose_stage(plan: Plan, named: str | None) -> PlannedStage:
    """The training stage to measure. Raises UsageError where there is none, or several and none is named."""
    stages = {stage.id: stage for stage in plan.stages if set(stage.stage.config_type.model_fields) >= _OPTIONS}
    there = ", ".join(stages)
    if named is not None and named not in stages:
        if named in (stage.id for stage in plan.stages):
            raise UsageError(f"--stage {named}: {plan[named].kind} is no training stage; there is {there or 'none'}")
        suggestion = nearest(named, stages)
        hint = f" (did you mean {suggestion!r}?)" if suggestion else f"; there is {there or 'none'}"
        raise UsageError(f"--stage {named}: there is no such training stage{hint}")
    if not stages:
        raise UsageError(f"{plan.manifest.path}: there is no training stage, so nothing to measure")
    if named is None and len(stages) > 1:
        raise UsageError(f"{plan.manifest.path}: there are several training stages: name one with --stage: {there}")
    return stages[named or there]


def images_per_worker(plan: Plan, stage: PlannedStage) -> int:
    """A worker's share of a batch: the stage's own batch size, else that of the data that it is given, else 128."""
    options = [stage.options, *(plan[name].options for name in stage.upstream)]
    sizes = (size for given in options if isinstance(size := given.get("batch_size"), int))
    return next(sizes, _USUAL_BATCH)


class Measurement:
    """Runs one stage of a plan, and what it needs, again and again. `tell` takes lines for a person who waits."""

    def __init__(self, plan: Plan, stage: PlannedStage, artifacts: Path, tell: Callable[[str], None]) -> None:
        self._plan, self._stage, self._store, self._tell = plan, stage, Store(artifacts), tell
        self.images_per_worker = images_per_worker(plan, stage)
        self._notices: dict[str, None] = {}
        self._epoch_images = 0.0

    def check(self, settings: Sequence[Setting]) -> None:
        """Raise UsageError where the stage can't work so, with the stage's own words for why."""
        problems = []
        for setting in settings:
            try:
                self._bound(setting, 1)
            except ManifestError as error:
                # What `-s` would have said: the user said it by --mode and --workers.
                said = re.compile(rf"^(-s )?{re.escape(self._stage.id)}[\w.]*: ")
                problems += [f"{setting}: {said.sub('', problem.message)}" for problem in error.problems]
        if problems:
            raise UsageError("; ".join(dict.fromkeys(problems)))

    def measure(self, settings: Sequence[Setting]) -> Measured:
        """Measure each, in turn, several times. The first is one worker: its first run says how long the rest takes.

        Raises PtpipeError where a run fails, UsageError where there are too few images for a step.
        """
        first = self._run(settings[0], 1)
        rate, per_step, num_steps = self._facts(first)
        self._epoch_images = num_steps * per_step
        target = min(_MAX_STEPS, max(_MIN_STEPS, math.ceil(_ROUND_S * rate / per_step)))
        epochs = {setting: math.ceil(target / math.ceil(num_steps / setting.workers)) for setting in settings}
        seconds = sum(epochs[s] * self._epoch_images / (rate * math.sqrt(s.workers)) + _START_S for s in settings)
        self._tell(f"{NUM_ROUNDS} rounds of {len(settings)} measurements: about {_time(NUM_ROUNDS * seconds)}")
        rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
        images: dict[Setting, float] = {}
        sizes: dict[str, float] = {}
        for number in range(NUM_ROUNDS):
            for setting in settings:
                event = self._run(setting, epochs[setting])
                rate, images[setting], _ = self._facts(event)
                if images[setting] < per_step * setting.workers:
                    raise UsageError(
                        f"{setting}: the train split has fewer images than one step of {setting.workers} x "
                        f"{self.images_per_worker}: choose a smaller -s {self._stage.id}.batch_size=N"
                    )
                rates[setting].append(rate)
                sizes.update(_gradient_bytes(event, setting, self._parallel(setting)))
                self._tell(f"round {number + 1} of {NUM_ROUNDS}: {setting}: {rate:,.0f} images/s")
        throughputs = tuple(
            Throughput(setting.mode, setting.workers, statistics.median(of_it), tuple(of_it), images[setting])
            for setting, of_it in rates.items()
        )
        return Measured(throughputs, sizes, tuple(self._notices))

    def _run(self, setting: Setting, epochs: int) -> StageFinished:
        plan = self._bound(setting, epochs).subplan(self._stage.id)
        options = RunOptions(fresh=(self._stage.id,), verbosity=_SILENT)
        waiting = _Waiting(self._stage.id, self._tell)
        ended = execute(plan, self._store, options, (waiting,) if not self._epoch_images else ())
        code = ExitCode(ended.exit_code)
        if code is ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if code is ExitCode.TERMINATED:
            raise Terminated
        for event in ended.stages:
            self._notices |= dict.fromkeys(f"{event.stage_id}: {notice}" for notice in event.notices)
            if event.outcome is Outcome.FAILED:
                error = PtpipeError(f"{setting}: {event.stage_id} failed: {event.message}")
                error.exit_code = code
                raise error
        return ended.stages[-1]

    def _bound(self, setting: Setting, epochs: int) -> Plan:
        stage_id = self._stage.id
        overrides: dict[str, JSON] = {
            f"{stage_id}.parallel": self._parallel(setting),
            f"{stage_id}.batch_size": self.images_per_worker * setting.workers,
            f"{stage_id}.epochs": epochs,
            f"{stage_id}.num_threads": 1,
        }
        if self._stage.options.get("early_stopping"):
            overrides[f"{stage_id}.early_stopping"] = None
        manifest: Manifest = self._plan.manifest.overridden_by(overrides)
        return bind(manifest, self._plan.vocabulary)

    def _parallel(self, setting: Setting) -> dict[str, JSON]:
        """The `parallel` options: the manifest's own for its own mode."""
        if setting.workers == 1:
            return {}
        own = self._stage.options["parallel"]
        given: dict[str, JSON] = dict(own) if isinstance(own, dict) else {}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("mode") != setting.mode:
            given = {name: value for name, value in given.items() if name in ("comm", "timeout_s")}
        given |= {"mode": setting.mode, "workers": setting.workers}
        if setting.mode == "pp" and given.get("schedule") != "interleaved_1f1b":
            # One pipeline stage per worker; `split_at` was given for another number of them.
            if given.get("pipeline_stages", 2) != setting.workers:
                given.pop("split_at", None)
            given["pipeline_stages"] = setting.workers
        return given

    def _facts(self, event: StageFinished) -> tuple[float, float, float]:
        values = [event.metrics.get(name) for name in _FACTS]
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            raise UsageError(f"{event.stage_id} ({event.kind}) doesn't say {', '.join(_FACTS)}: it can't be measured")
        rate, per_step, num_steps = (float(value) for value in values)  # type: ignore[arg-type]  # checked above
        return rate, per_step, num_steps


class _Waiting(Reporter):
    """Says how long the first epoch takes, where that is long."""

    def __init__(self, stage_id: str, tell: Callable[[str], None]) -> None:
        self._stage_id, self._tell, self._is_said = stage_id, tell, False

    def event(self, event: Event) -> None:
        if not isinstance(event, Progress) or event.stage_id != self._stage_id or self._is_said or not event.total:
            return
        rate = event.facts.get("images_per_s")
        if isinstance(rate, int | float) and rate > 0:
            self._is_said = True
            if event.total / rate > _LONG_S:
                self._tell(f"an epoch of one worker takes about {_time(event.total / rate)}")


def _gradient_bytes(event: StageFinished, setting: Setting, parallel: Mapping[str, JSON]) -> dict[str, float]:
    """What the model's tensors come to, by mode: a gradient is as large as its parameter."""
    sizes: list[JSON] = []
    for output in event.outputs.values():
        summary = output.get("summary")
        sizes.append(summary.get("size_bytes") if isinstance(summary, dict) else None)
    found = [float(size) for size in sizes if isinstance(size, int | float)]
    return {setting.mode: found[0] * _BYTES_OF.get(str(parallel.get("compress")), 1.0)} if len(found) == 1 else {}


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
