"""A search by Optuna: each batch of trials is chosen from what the batches before it gave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ptpipe import JSON, UsageError
from ptpipe_sweep.space import Axis, Range
from ptpipe_sweep.trials import rounded

if TYPE_CHECKING:
    from optuna import Trial as OptunaTrial


class OptunaSearch:
    """Proposes combinations by Optuna's TPE sampler (tree-structured Parzen estimator), seeded.

    A batch is proposed at once, and its results are passed on in order, not as its trials end: the same seed and batch
    size propose the same again, which is then cached.
    """

    def __init__(self, axes: Sequence[Axis], seed: int, higher_is_better: bool) -> None:
        """Begin a study in memory. Raises UsageError where Optuna is missing."""
        try:
            import optuna
        except ImportError as error:
            raise UsageError("--optuna needs Optuna: pip install 'ptpipe[optuna]'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._axes = axes
        self._study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed), direction="maximize" if higher_is_better else "minimize"
        )
        self._asked: list[OptunaTrial] = []

    def ask(self, num: int) -> list[dict[str, JSON]]:
        """Return the next combinations."""
        self._asked = [self._study.ask() for _ in range(num)]
        return [{axis.name: self._suggest(trial, axis) for axis in self._axes} for trial in self._asked]

    def tell(self, values: Sequence[float | None]) -> None:
        """Tell what the combinations gave; None: the trial failed."""
        from optuna.trial import TrialState

        for trial, value in zip(self._asked, values, strict=True):
            if value is None:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, value)

    def _suggest(self, trial: OptunaTrial, axis: Axis) -> JSON:
        values = axis.values
        if not isinstance(values, Range):  # as text: Optuna's choices are no lists
            value: JSON = json.loads(trial.suggest_categorical(axis.name, [*map(json.dumps, values)]))
            return value
        if values.is_whole:
            return trial.suggest_int(axis.name, int(values.low), int(values.high), log=values.is_log)
        return rounded(trial.suggest_float(axis.name, values.low, values.high, log=values.is_log), values)
