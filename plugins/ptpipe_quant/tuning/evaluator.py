"""Make and measure the int8 model of a choice: what `quant.prepare`, `quant.calibrate` and `quant.convert` make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ptpipe import JSON, Context, LogLine, Metric, Progress
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, PrepareConfig
from ptpipe_quant.layer_options import layer_rules, options_at
from ptpipe_quant.tuning.config import TuneConfig
from ptpipe_quant.tuning.sequential import Budget
from ptpipe_quant.tuning.trials import Choice, Trial
from ptpipe_torch import Data, Model, Predictor
from ptpipe_torch.quality.bootstrap import Sums
from ptpipe_torch.task.ranking import rows_of_samples


@dataclass
class Evaluator:
    """Makes trials on the same samples, in one random order."""

    config: TuneConfig
    ctx: Context
    model: Model
    data: Data
    positions_N: npt.NDArray[np.int64]
    on_samples: Callable[[int], None]
    """Called with the number of samples that a trial has run so far."""
    _metrics: dict[str, JSON] = field(default_factory=dict)
    _float_sums: dict[str, npt.NDArray[Any]] | None = None

    @property
    def num_samples_per_trial(self) -> int:
        """How many samples a trial runs at most."""
        return self._num_calibration + len(self.positions_N)

    @property
    def _num_calibration(self) -> int:
        return min(self.config.calibration_samples, len(self.data.splits["calibration"]))

    def calibrated(self, choice: Choice) -> Model:
        """Return the calibrated model of a choice."""
        given = {name: getattr(self.config, name) for name in PrepareConfig.model_fields}
        if self.config.observer != "percentile":
            given["percentile"] = None  # of the remedy
        options = {"skip": choice.skip, "layers": self._layers(choice)}
        prepare = PrepareConfig.model_validate({**given, **options})
        calibrate = CalibrateConfig(num_samples=self.config.calibration_samples)
        # A pattern of the user's may have nothing left to decide where the search decides.
        may_be_idle = bool(choice.layers) or choice.skip != self.config.skip
        quiet = self._quiet("quant.prepare")
        prepared = stages.prepare(prepare, quiet, self.model, may_be_idle=may_be_idle)
        model, _ = stages.calibrate(calibrate, self._quiet("quant.calibrate"), prepared, self.data)
        return model

    def _layers(self, choice: Choice) -> dict[str, dict[str, JSON]]:
        """Return the user's options by layer, those of a layer with a remedy changed by that."""
        given = {pattern: layer.own_options() for pattern, layer in self.config.layers.items()}
        network = self.model.build() if choice.layers else None
        changed = {}
        for name, options in choice.layer_options().items():
            assert network is not None
            before = options_at(name, layer_rules(network, given.items()))
            if "observer" in options:
                before.pop("percentile", None)
            if options.get("observer") == "percentile" and self.config.percentile is not None:
                before["percentile"] = self.config.percentile
            changed[name] = before | options
        return changed | {pattern: options for pattern, options in given.items() if pattern not in changed}

    def evaluate(self, choice: Choice, calibrated: Model) -> Trial:
        """Convert and measure a calibrated model, on as few samples as decide."""
        int8 = stages.convert(self._quiet("quant.convert"), calibrated)
        fraction = self._metrics.get("int8_parameters_fraction")
        baseline = self._baseline()
        with int8.predictor() as predict:
            sums = _GrowingSums(self, predict)

            def sums_of(size: int) -> tuple[Sums, Sums]:
                return {name: rows[:size] for name, rows in baseline.items()}, sums.first(size)

            budget = Budget(self.data.info.task, self.config.max_drop, self.config.confidence, self.ctx.seed)
            judged = budget.judge(len(self.positions_N), sums_of)
        return Trial(
            choice,
            judged.drop,
            judged.low,
            judged.high,
            judged.num_samples,
            judged.is_met,
            judged.is_sure,
            fraction if isinstance(fraction, float) else 1.0,
        )

    def _baseline(self) -> dict[str, npt.NDArray[Any]]:
        if self._float_sums is None:
            with self.model.predictor() as predict:
                self._float_sums = self.sums(predict, self.positions_N, lambda _: None)
        return self._float_sums

    def sums(
        self, predict: Predictor, positions_N: npt.NDArray[np.int64], on_samples: Callable[[int], None]
    ) -> dict[str, npt.NDArray[Any]]:
        """Return of each of these samples what the metrics are computed from."""
        task, parts, done = self.data.info.task, list[dict[str, npt.NDArray[Any]]](), 0
        for batch in self.data.batches(self.config.split, order_N=positions_N):
            outputs = {name: torch.from_numpy(array) for name, array in predict(batch.input_arrays()).items()}
            parts.append(rows_of_samples(task, outputs, batch.targets))
            done += len(batch)
            on_samples(done)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _quiet(self, kind: str) -> Context:
        """Return a context in which the metrics and notices of a trial are not the stage's."""

        def tell(event: Any) -> None:
            if isinstance(event, Metric):
                self._metrics[event.name] = event.value
            elif isinstance(event, Progress) and event.total is not None:  # of samples, not of steps
                self.on_samples(event.done)
            elif isinstance(event, LogLine):
                self.ctx.log(event.text)

        return Context(self.ctx.stage_id, kind, self.ctx.seed, self.ctx.scratch, _tell=tell)


class _GrowingSums:
    """The sums of one model, for more and more samples."""

    def __init__(self, evaluator: Evaluator, predict: Predictor) -> None:
        self._evaluator, self._predict = evaluator, predict
        self._sums: dict[str, npt.NDArray[Any]] = {}
        self._size = 0

    def first(self, size: int) -> Sums:
        """Return those of that many first samples."""
        evaluator, done = self._evaluator, self._evaluator._num_calibration + self._size
        positions_N = evaluator.positions_N[self._size : size]
        more = evaluator.sums(self._predict, positions_N, lambda count: evaluator.on_samples(done + count))
        self._sums = {name: np.concatenate([self._sums.get(name, rows[:0]), rows]) for name, rows in more.items()}
        self._size = size
        return self._sums
