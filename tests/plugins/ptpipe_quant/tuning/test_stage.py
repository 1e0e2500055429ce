"""`quant.tune` on handwritten digits: networks with one planted layer that int8 harms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from ptpipe import Context, StageError
from ptpipe.events import Notice, Progress
from ptpipe_quant import ConvertConfig, TuneConfig, convert, tune
from ptpipe_quant.tuning import evaluator as evaluator_module
from ptpipe_torch import Data, Model

from .. import planted
from ..conftest import BACKENDS, accuracy, logits_of

TRIED = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]
NUM_LAYERS = 5
"""Of the small network: four with weights, and the input."""


def config(**options) -> TuneConfig:
    return TuneConfig(**{"split": "test", "max_drop": 0.02, **options})


def lost(int8: Model, float_model: Model, data: Data) -> float:
    return accuracy(logits_of(float_model, data), data) - accuracy(logits_of(int8, data), data)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", TRIED)
def test_a_layer_with_an_outlier_in_its_weights_is_kept_float(backend, trained, digits, ctx, events) -> None:
    model = planted.with_weight_outlier(trained)
    tuned = tune(config(backend=backend, weights="per_tensor"), ctx, model, digits)
    progress = [event for event in events if isinstance(event, Progress)]
    assert all(event.done <= event.total for event in progress)
    assert min(event.done for event in progress if event.done) > 2, "samples, not the steps of preparing"
    first, *_, last = tuned.trials.trials
    assert not first.is_met and first.drop > 0.05
    assert last.is_met and tuned.trials.best == last
    assert last.choice.skip == (planted.LAYER,)
    assert len(tuned.trials.trials) <= math.log2(NUM_LAYERS) + 3
    int8 = convert(ConvertConfig(), ctx, tuned.model)
    assert lost(int8, model, digits) <= 0.02
    assert any("meets max_drop 2 points" in event.text for event in events if isinstance(event, Notice))


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("backend", TRIED)
def test_a_layer_with_an_outlier_in_its_output_is_kept_float_with_what_reads_it(backend, trained, digits, ctx) -> None:
    model = planted.with_activation_outlier(trained)
    tuned = tune(config(backend=backend, weights="per_channel", observer="min_max"), ctx, model, digits)
    assert tuned.trials.best.is_met
    assert set(tuned.trials.best.choice.skip) == {planted.LAYER, planted.NEXT_LAYER}
    assert len(tuned.trials.trials) <= math.log2(NUM_LAYERS) + 3
    assert lost(convert(ConvertConfig(), ctx, tuned.model), model, digits) <= 0.02


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", TRIED)
def test_scales_per_channel_of_one_layer_are_tried_before_it_is_kept_float(
    backend, trained, digits, ctx, events
) -> None:
    model = planted.with_weight_outlier(trained)
    options = {"backend": backend, "weights": "per_tensor", "layers": {"[49]": {"observer": "min_max"}}}
    tuned = tune(config(**options, remedies=("per_channel", "float")), ctx, model, digits)
    best = tuned.trials.best
    assert best.is_met and best.choice.skip == ()
    assert best.choice.layers == ((planted.LAYER, "per_channel"),)
    assert len(tuned.trials.trials) == 3  # as it is, kept float, and the remedy
    assert tuned.model.recipe.prepare[0].arguments["layers"] == [
        [planted.LAYER, {"observer": "min_max", "weights": "per_channel"}], ["[49]", {"observer": "min_max"}],
    ]  # fmt: skip
    assert lost(convert(ConvertConfig(), ctx, tuned.model), model, digits) <= 0.02
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("accuracy with layers: {9: {weights: per_channel}}, after" in text for text in notices)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("backend", TRIED)
def test_another_observer_is_tried_before_a_layer_is_kept_float(backend, trained, digits, ctx) -> None:
    model = planted.with_rare_spike(trained, digits)
    options = {"backend": backend, "weights": "per_channel", "observer": "min_max", "percentile": 99.9}
    tuned = tune(config(**options, remedies=("percentile", "float")), ctx, model, digits)
    assert tuned.trials.best.choice.layers == ((planted.LAYER, "percentile"),)
    assert tuned.trials.best.choice.skip == ()
    assert tuned.model.recipe.prepare[0].arguments["layers"] == [
        [planted.LAYER, {"percentile": 99.9, "observer": "percentile"}]
    ]
    assert lost(convert(ConvertConfig(), ctx, tuned.model), model, digits) <= 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remedies": ()}, "at least 1 item"),
        ({"remedies": ("percentile", "percentile")}, "each is tried once"),
        ({"remedies": ("float", "percentile")}, "float is the last one"),
        ({"remedies": ("mse", "float")}, "mse is the observer of all layers already"),
        ({"remedies": ("per_channel",), "backend": "qnnpack"}, "per_channel is what all layers have"),
        ({"percentile": 99.9}, "percentile has an effect with"),
    ],
)
def test_remedies_that_make_no_sense_are_refused(options, message) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**options)


def test_a_network_without_a_harmful_layer_needs_one_trial(trained, digits, ctx) -> None:
    tuned = tune(config(max_drop=0.03), ctx, trained, digits)
    (trial,) = tuned.trials.trials
    assert trial.choice.skip == ()
    assert trial.is_sure and trial.num_samples < len(digits.splits["test"])


def test_without_time_the_closest_is_returned_with_a_notice(trained, digits, ctx, events) -> None:
    options = {"weights": "per_tensor", "max_trials": 1}
    tuned = tune(config(**options), ctx, planted.with_weight_outlier(trained), digits)
    assert len(tuned.trials.trials) == 1 and not tuned.trials.best.is_met
    assert any("NO TRIAL MEETS max_drop 2 points" in event.text for event in events if isinstance(event, Notice))
    convert(ConvertConfig(), ctx, tuned.model)


def test_a_killed_search_goes_on_with_the_trials_that_it_has(trained, digits, ctx, monkeypatch) -> None:
    model = planted.with_weight_outlier(trained)
    options = config(weights="per_tensor")
    uninterrupted = tune(options, Context("tune", "quant.tune", 7, _folder(ctx, "whole")), model, digits)
    broken = Context("tune", "quant.tune", 7, _folder(ctx, "killed"))
    with monkeypatch.context() as patch:
        _kill_at_trial(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            tune(options, broken, model, digits)
    kept = json.loads((broken.scratch / "journal.json").read_text(encoding="utf-8"))
    assert len(kept["trials"]) == 1
    assert Model.load(broken.scratch / "best-1").recipe.backend == "fbgemm"  # the best so far
    counted = _count_trials(monkeypatch)
    resumed = tune(options, broken, model, digits)
    assert counted() == len(uninterrupted.trials.trials) - 1
    for one, other in zip(resumed.trials.trials, uninterrupted.trials.trials, strict=True):
        assert (one.choice, one.drop, one.num_samples) == (other.choice, other.drop, other.num_samples)
    for name, tensor in uninterrupted.model.tensors.items():
        np.testing.assert_array_equal(resumed.model.tensors[name].numpy(), tensor.numpy())


def test_trials_of_another_input_are_not_taken(trained, digits, ctx, monkeypatch) -> None:
    folder = _folder(ctx, "scratch")
    one, other = (
        Context("tune", "quant.tune", 7, folder, input_digests={"model": (digest,)}) for digest in ("one", "other")
    )
    tune(config(), one, trained, digits)
    counted = _count_trials(monkeypatch)
    tune(config(), other, trained, digits)
    assert counted() == 1


def test_an_empty_split_is_refused(trained, digits, ctx) -> None:
    with pytest.raises(StageError, match="split 'val' is empty; set `split` to one of train, test, calibration"):
        tune(config(split="val"), ctx, trained, digits)


def test_a_model_that_is_prepared_is_refused(trained, digits, ctx) -> None:
    tuned = tune(config(), ctx, trained, digits)
    with pytest.raises(StageError, match="already prepared for fbgemm; it needs a float one"):
        tune(config(), Context("tune", "quant.tune", 7, _folder(ctx, "second")), tuned.model, digits)


def _folder(ctx: Context, name: str) -> Path:
    folder = ctx.scratch / name
    folder.mkdir()
    return folder


def _kill_at_trial(patch: pytest.MonkeyPatch, number: int) -> None:
    evaluate, count = evaluator_module.Evaluator.evaluate, 0

    def killed(*arguments):
        nonlocal count
        count += 1
        if count == number:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    patch.setattr(evaluator_module.Evaluator, "evaluate", killed)


def _count_trials(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    evaluate, count = evaluator_module.Evaluator.evaluate, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        return evaluate(*arguments)

    patch.setattr(evaluator_module.Evaluator, "evaluate", counted)
    return lambda: count


def test_samples_that_show_no_range_are_refused_at_once(trained, digits, ctx) -> None:
    same = digits.splits["calibration"].subset(np.zeros(5, np.int64))
    data = Data(digits.info, {"calibration": replace(same, ids=np.array(list("abcde"))), "val": digits.splits["test"]})
    with pytest.raises(StageError, match=r"quant\.test: all 5 samples of calibration are the same"):
        tune(config(), ctx, trained, data)
