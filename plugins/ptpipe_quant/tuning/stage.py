"""Implementation of `quant.tune`."""

from __future__ import annotations

import time

import numpy as np

from ptpipe import JSON, Context
from ptpipe_quant.analysis.measuring import spread_positions
from ptpipe_quant.analysis.stage import rounded_network
from ptpipe_quant.tuning.candidates import chains_of, quantizable, ranked_layers
from ptpipe_quant.tuning.config import TuneConfig
from ptpipe_quant.tuning.evaluator import Evaluator
from ptpipe_quant.tuning.journal import Journal
from ptpipe_quant.tuning.search import max_evaluations, search
from ptpipe_quant.tuning.trials import Choice, Trial, Trials
from ptpipe_torch import Data, Model
from ptpipe_torch.data.calibration_samples import num_calibration_samples

_NUM_RANKING_SAMPLES = 64


def tune(config: TuneConfig, ctx: Context, model: Model, data: Data) -> tuple[Model, Trials]:
    """Implement `quant.tune`."""
    data.info.check_fit("the model", model.signature)
    num_calibration_samples(ctx.kind, data, "calibration", config.calibration_samples)
    positions_N = spread_positions(data, config.split, config.num_samples, ctx.kind)
    # An early decision is sound for samples in random order alone.
    positions_N = np.random.default_rng(ctx.seed).permutation(positions_N)
    _Tuning(config, ctx, Evaluator(config, ctx, model, data, positions_N, lambda _: None)).run()
    journal = Journal(ctx)
    metric = data.info.task.primary_metric
    trials = Trials(tuple(journal.trials), metric.name, metric.is_fraction, config.max_drop, config.split)
    _report(config, ctx, trials)
    return journal.best_model(model), trials


class _Tuning:
    """One search."""

    def __init__(self, config: TuneConfig, ctx: Context, evaluator: Evaluator) -> None:
        self._config, self._ctx, self._evaluator = config, ctx, evaluator
        self._journal = Journal(ctx)
        self._calibrated: dict[Choice, Model] = {}
        self._num_asked = 0
        evaluator.on_samples = self._on_samples

    def run(self) -> None:
        """Rank the layers unless that is done, then search."""
        if self._journal.trials:
            self._ctx.log(f"the search resumes: {len(self._journal.trials)} trials are done", shown=True)
        if not self._journal.chains:
            self._journal.set_chains(self._ranked())
        search(self._journal.chains, self._evaluate)

    def _ranked(self) -> list[list[Choice]]:
        config, evaluator = self._config, self._evaluator
        first = Choice(config.skip)
        calibrated = self._calibrated[first] = evaluator.calibrated(first)
        positions_N = evaluator.positions_N[:_NUM_RANKING_SAMPLES]
        batches = list(evaluator.data.batches(config.split, order_N=positions_N))
        network = rounded_network(calibrated, batches[0].rows(0, 4), self._ctx.kind)
        ranked = ranked_layers(network, evaluator.model, evaluator.data, batches)
        chains = chains_of(first, ranked, config.remedies)
        layers = set(quantizable(network, evaluator.model.build()))
        num_choices = sum(choice is first or not layers <= set(choice.skip) for choice in chains[-1])
        return [chain[:num_choices] for chain in chains]

    def _evaluate(self, choice: Choice) -> Trial | None:
        """Return the trial of a choice; None where there is neither an earlier one nor time for it."""
        done = self._journal.found(choice)
        if done is None:
            if self._is_over():
                return None
            start_s = time.monotonic()
            calibrated = self._calibrated.pop(choice, None) or self._evaluator.calibrated(choice)
            done = self._evaluator.evaluate(choice, calibrated)
            self._journal.add(done, calibrated, time.monotonic() - start_s)
        self._num_asked += 1
        self._on_samples(0)
        return done

    def _is_over(self) -> bool:
        config, num_trials = self._config, len(self._journal.trials)
        is_late = config.max_minutes is not None and self._journal.seconds > 60 * config.max_minutes
        return num_trials > 0 and (num_trials >= config.max_trials or is_late)

    def _on_samples(self, done: int) -> None:
        """Report progress. The number of trials to come is the largest possible."""
        size, trials = self._evaluator.num_samples_per_trial, self._journal.trials
        chains = self._journal.chains
        total = min(self._config.max_trials, max_evaluations(chains)) if chains else self._config.max_trials
        facts = {"best_drop": round(max(trials, key=lambda trial: trial.rank).drop, 6)} if trials else {}
        self._ctx.progress(min(self._num_asked, total) * size + done, max(total, 1) * size, "samples", **facts)


def _report(config: TuneConfig, ctx: Context, trials: Trials) -> None:
    best = trials.best
    name = trials.drop_name
    ctx.metric(**{name: best.drop, f"{name}_low": best.drop_low, f"{name}_high": best.drop_high})
    ctx.metric(
        num_trials=len(trials.trials),
        **{f"max_{name}": trials.max_drop},
        is_met=best.is_met,
        kept_float=list(best.choice.skip),
        layers=dict[str, JSON](best.choice.layer_options()),
        weights=config.weights,
        int8_parameters_fraction=best.int8_fraction,
    )
    changes = [f"layers: {best.choice.layers_text()}"] if best.choice.layers else []
    changes += [f"skip: [{', '.join(best.choice.skip)}]"] if best.choice.skip else []
    in_points = f"loses {100 * best.drop:.2f} points of {trials.metric}"
    lost = in_points if trials.is_fraction else f"is {best.drop:.3g} worse in {trials.metric}"
    limit = f"{100 * trials.max_drop:g} points" if trials.is_fraction else f"{trials.max_drop:g}"
    how = "" if best.is_sure else f"; {best.num_samples:,} samples are too few to be sure"
    ctx.notice(
        f"{'meets' if best.is_met else 'NO TRIAL MEETS'} max_drop {limit}: {'' if best.is_met else 'the closest '}"
        f"{lost} with {', '.join(changes) or 'everything int8'}, after "
        f"{len(trials.trials)} trial{'' if len(trials.trials) == 1 else 's'}{how}"
    )
