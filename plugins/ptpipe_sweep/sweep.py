"""A sweep: chooses trials, has them run, and records how each ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ptpipe import CacheStatus, ExitCode, Plan, Store, Terminated, UsageError, cache_status, host, nearest
from ptpipe_sweep import processes
from ptpipe_sweep.outcome import Ending, Objective, judged_comparisons, read_ending
from ptpipe_sweep.record import SweepRecord, exit_code
from ptpipe_sweep.search import OptunaSearch
from ptpipe_sweep.space import Axis, Range
from ptpipe_sweep.trials import Trial, bind, drawn, extremes, grid
from ptpipe_sweep.worker import Request, unmeasured

Method: TypeAlias = Literal["grid", "random", "optuna"]
RunTrials: TypeAlias = Callable[[Sequence[Request], int, int, Callable[[Request, Mapping[str, Any]], None]], None]
"""Runs requests, so many at a time with so many threads each, and reports each one's end."""


@dataclass(frozen=True)
class Search:
    """How trials are chosen and compared."""

    method: Method
    num_trials: int
    """Of a grid: 0, as many as it has."""
    seed: int
    objective: Objective | None
    """None: the primary metric of the comparison."""
    model: str
    """The row of the comparison; "": the last one."""


@dataclass(frozen=True)
class Workers:
    """What runs the trials."""

    num: int
    ray_address: str | None = None

    @property
    def threads(self) -> int:
        """Of each trial: those that a run here would use, divided among the workers."""
        return max(1, host.num_threads() // self.num)


class Sweep:
    """The trials of one manifest."""

    def __init__(self, plan: Plan, axes: Sequence[Axis], search: Search, artifacts: Path, workers: Workers) -> None:
        """Choose and check the trials; of an Optuna search, the first batch. Nothing is written.

        Raises ManifestError with the problems of all trials, UsageError where the axes don't suit the search.
        """
        self.plan, self.axes, self.search, self.artifacts = plan, axes, search, artifacts
        self.workers, self.threads = workers, workers.threads
        self.record: SweepRecord | None = None
        self._tell: Callable[[str], None] = lambda line: None
        self._num_trials = search.num_trials
        self._prepared: dict[int, Mapping[str, Any]] = {}
        """The results of trials by number, without what measures the machine."""
        self._batches = self._choose()
        self.first_trials = next(self._batches)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the sweep so far."""
        return exit_code(self.record.ordered if self.record else ())

    def describe(self) -> str:
        """Return `6 trials: finetune.lr (2) x backend (3)`."""
        sizes = (axis.values if isinstance(axis.values, Range) else len(axis.values) for axis in self.axes)
        axes = " x ".join(f"{axis.name} ({size})" for axis, size in zip(self.axes, sizes, strict=True))
        return f"{self._num_trials} trial{'s' * (self._num_trials != 1)}: {axes}"

    def missing_objective(self) -> str:
        """Return what is wrong with the objective where its stage reported other metrics only; "" otherwise."""
        objective, endings = self.search.objective, self.record.ordered if self.record else ()
        if not objective or any(ending.quality for ending in endings):
            return ""
        # A trial that failed before that stage says nothing about the name.
        own = f"{objective.stage}."
        ended = [ending for ending in endings if any(name.startswith(own) for name in ending.metrics)]
        if not ended:
            return ""
        guess = nearest(objective.name, dict.fromkeys(name for ending in ended for name in ending.metrics))
        return f"no trial reported {objective.name}" + (f" (did you mean {guess!r}?)" if guess else "")

    def cache_status(self, trial: Trial) -> list[CacheStatus]:
        """Return what the trial would find cached; its number of threads is part of the keys of trainings."""
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        try:
            return cache_status(trial.plan, artifacts=self.artifacts)
        finally:
            del os.environ["OMP_NUM_THREADS"]
            os.environ |= {"OMP_NUM_THREADS": before} if before is not None else {}

    def run(self, store: Store, tell: Callable[[str], None]) -> None:
        """Run all trials; `tell` receives lines about the progress."""
        self._tell = tell
        with self._runner() as run_trials:
            self.record = SweepRecord(store, self.plan.manifest.name, self._facts())
            at_a_time = f"{self.workers.num} at a time, " if self.workers.num > 1 else ""
            tell(f"{self.describe()}; {at_a_time}{self.threads} thread{'s' * (self.threads != 1)} each")
            tell(f"logs: {self.record.folder}")
            try:
                for batch in chain([self.first_trials], self._batches):
                    self._run_batch(batch, run_trials)
            except (KeyboardInterrupt, Terminated):
                num_done = sum(ending.verdict != "interrupted" for ending in self.record.ordered)
                tell(f"interrupted with {num_done} of {self._num_trials} trials done; the same command resumes")
                raise
        self._write(self.record.finish)

    def _choose(self) -> Iterator[list[Trial]]:
        """Yield trials to run together. Each batch of an Optuna search depends on the figures of those before."""
        search = self.search
        if search.method != "optuna":
            is_random = search.method == "random"
            chosen = drawn(self.axes, search.num_trials, search.seed) if is_random else grid(self.axes)
            self._num_trials = len(chosen)
            yield bind(self.plan, self.axes, chosen)
            return
        assert search.objective is not None
        optuna = OptunaSearch(self.axes, search.seed, search.objective.higher_is_better)
        bind(self.plan, self.axes, extremes(self.axes))
        for start in range(0, search.num_trials, self.workers.num):
            chosen = optuna.ask(min(self.workers.num, search.num_trials - start))
            yield bind(self.plan, self.axes, chosen, start + 1)
            if missing := self.missing_objective():
                raise UsageError(missing)
            optuna.tell([self._value(number) for number in range(start + 1, start + 1 + len(chosen))])

    def _value(self, number: int) -> float | None:
        ending = self.record.endings.get(number) if self.record else None
        return ending.quality.value if ending and ending.quality else None

    def _runner(self) -> AbstractContextManager[RunTrials]:
        if self.workers.ray_address is None:
            return nullcontext(processes.run_trials)
        from ptpipe_sweep import on_ray

        return on_ray.connected(self.workers.ray_address, self.workers.num, self.threads)

    def _run_batch(self, trials: Sequence[Trial], run_trials: RunTrials) -> None:
        """Run trials side by side, but for what measures the machine: that runs here, one trial after another."""
        by_number = {trial.number: trial for trial in trials}
        is_alone = self.workers.num == 1 and self.workers.ray_address is None
        has_measured = any(len(unmeasured(trial.plan).stages) < len(trial.plan.stages) for trial in trials)
        to_measure: list[Trial] = []

        def prepared(request: Request, result: Mapping[str, Any]) -> None:
            trial = by_number[request.number]
            if result["exit_code"] in (ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED):
                to_measure.append(trial)
                self._prepared[trial.number] = result
                self._tell(f"trial {trial.number}: {trial}: ready to be measured")
            else:
                self._add(trial, result)

        def ended(request: Request, result: Mapping[str, Any]) -> None:
            self._add(by_number[request.number], result)

        if is_alone or not has_measured:
            run_trials([self._request(trial) for trial in trials], self.workers.num, self.threads, ended)
            return
        first = [self._request(trial, without_measured=True) for trial in trials]
        run_trials(first, self.workers.num, self.threads, prepared)
        to_measure.sort(key=lambda trial: trial.number)
        processes.run_trials([self._request(trial) for trial in to_measure], 1, self.threads, ended)

    def _request(self, trial: Trial, without_measured: bool = False) -> Request:
        assert self.record is not None
        manifest = trial.plan.manifest
        return Request(
            trial.number,
            str(manifest.path.absolute()),
            manifest.text,
            manifest.overrides,
            str(self.artifacts.absolute()),
            str(self.record.folder.absolute()),
            without_measured,
        )

    def _add(self, trial: Trial, result: Mapping[str, Any]) -> None:
        assert self.record is not None
        begun = Ending(trial.number, trial.settings, trial.overrides, int(ExitCode.FAILED))
        ending = read_ending(begun, result, self.search.objective, self.search.model, judged_comparisons(self.plan))
        if before := self._prepared.get(trial.number):
            first = read_ending(begun, before, None, "")
            ending = replace(ending, seconds=first.seconds + ending.seconds, num_cached=first.num_cached)
        self._write(partial(self.record.add, ending))
        reason = f": {ending.message}" if ending.message and ending.verdict != "passed" else ""
        cached = f", {ending.num_cached} of {ending.num_stages} stages cached" if ending.num_cached else ""
        count = f"[{len(self.record.endings)}/{self._num_trials}]"
        self._tell(f"{count} trial {trial.number}: {trial}: {ending.verdict} in {ending.seconds:.1f} s{cached}{reason}")

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the record. Where that fails, the trials go on: each has a record of its own."""
        assert self.record is not None
        try:
            write()
        except OSError as error:
            self._tell(f"{self.record.folder / 'sweep.json'} could not be written: {error.strerror or error}")

    def _facts(self) -> dict[str, Any]:
        return {
            "name": self.plan.manifest.name,
            "manifest": str(self.plan.manifest.path.absolute()),
            "search": asdict(self.search),
            "axes": [asdict(axis) for axis in self.axes],
            "workers": self.workers.num,
            "threads": self.threads,
        }
