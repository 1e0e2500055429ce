"""From the evaluation of models to facts about each sample, and through a file.

Shape legend: N samples, M models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from sklearn.metrics import roc_auc_score

from ptpipe import IntegrityError, StageError
from ptpipe_eval.quality import recorder as recorder_module
from ptpipe_eval.quality.paired import ModelSamples, PairedSamples, pair
from ptpipe_eval.quality.recorder import SampleRecorder
from ptpipe_eval.quality.storage import load_samples, save_samples
from ptpipe_eval.quality.summary import bounds_summary, paired_summary
from ptpipe_torch import (
    BATCH,
    ArrayInfo,
    Classification,
    LanguageModeling,
    Metric,
    MultiLabel,
    Regression,
    Task,
    TensorSpec,
)
from ptpipe_torch.quality.drops import primary_drops, primary_value

N, NAMES = 300, tuple("abcdef")
LABELS_N = np.arange(N) % 6
TASK = Classification(class_names=NAMES)


def recorded(task: Task, outputs: dict, targets: dict, batch_size: int = 128) -> ModelSamples:
    num_samples = len(next(iter(outputs.values())))
    recorder = SampleRecorder(task, num_samples)
    for start in range(0, num_samples, batch_size):
        rows = slice(start, start + batch_size)
        recorder.add(*({name: tensor[rows] for name, tensor in side.items()} for side in (outputs, targets)))
    return recorder.result()


def predicting(predicted_N: np.ndarray, task: Task = TASK, batch_size: int = 128) -> ModelSamples:
    logits_NK = torch.nn.functional.one_hot(torch.from_numpy(predicted_N), 6).float() * 3
    return recorded(task, {"logits": logits_NK}, {"labels": torch.from_numpy(LABELS_N)}, batch_size)


def changed(*positions: int, to: int = 1) -> np.ndarray:
    """The labels, but for these samples, whose class is another one."""
    predicted_N = LABELS_N.copy()
    predicted_N[list(positions)] = (predicted_N[list(positions)] + to) % 6
    return predicted_N


@pytest.fixture(scope="module")
def three() -> PairedSamples:
    """A baseline that is wrong on 0, 6, 12 and 2; one that is right on 2 and wrong on 1 and 18, and calls 0 another
    wrong class; one that is the baseline."""
    base = changed(0, 6, 12, 2)
    other = changed(6, 12, 1, 18)
    other[0] = (LABELS_N[0] + 2) % 6
    models = [predicting(predicted) for predicted in (other, base, base)]
    return pair(TASK, models, 1, [f"id/{i}" for i in range(N)], seed=7)


def test_counts(three) -> None:
    drop = three.drop("accuracy", 0)
    assert (drop.num_lost, drop.num_gained, drop.num_samples) == (2, 1, N)
    assert drop.drop == 1 / 300 and drop.discordance == 0.01
    assert three.flips_MN.sum(axis=1).tolist() == [4, 0, 0]
    assert [*np.flatnonzero(three.flips_MN[0])] == [0, 1, 2, 18]
    same = three.drop("accuracy", 2)
    assert (same.num_lost, same.num_gained, same.drop) == (0, 0, 0)
    assert three.drop("f1", 0) is None


def test_classes(three) -> None:
    by_class = dict(three.class_drops("accuracy", 0))
    assert [*by_class] == [*NAMES]
    assert {name: (of.num_lost, of.num_gained, of.num_samples) for name, of in by_class.items() if of.discordance} == {
        "a": (1, 0, 50),
        "b": (1, 0, 50),
        "c": (0, 1, 50),
    }
    assert three.class_drops("loss", 0) == []


def test_other_metrics_are_resampled(three) -> None:
    (drop, of_baseline, same) = three.bootstraps["loss"]
    assert of_baseline is None and drop.drop > 0
    assert drop.num_differing in (3, 4)  # sample 0 differs by rounding
    assert same.drop == 0 and not same.drops_R.any()
    low, high = drop.limits(0.95)
    assert low < 0 < drop.drop < high


def test_batches_change_nothing(three) -> None:
    again = pair(TASK, [predicting(changed(0, 6, 12, 2), batch_size=7)], 0, three.ids, seed=7)
    assert (again.right["accuracy"][0] == three.right["accuracy"][1]).all()
    assert again.bootstraps == {}  # nothing to compare with


def test_the_summary_of_a_row(three) -> None:
    summary = paired_summary(three, 0, TASK.metrics)
    assert summary["num_flips"] == 4
    low, high = three.drop("accuracy", 0).limits(0.975)
    assert bounds_summary(three, 0, TASK.metrics[0]) == {"drop_low": low, "drop_high": high}
    assert bounds_summary(three, 0, TASK.metrics[2]).keys() == {"worse_by_low", "worse_by_high"}
    assert summary["paired"]["accuracy"] == {
        "drop": 1 / 300,
        "low": low,
        "high": high,
        "num_lost": 2,
        "num_gained": 1,
        "discordance": 0.01,
        "mcnemar_mid_p": 0.625,
    }
    assert summary["paired"].keys() == {"accuracy", "top5_accuracy", "loss"}
    assert [(row["name"], row["drop"], row["num_lost"]) for row in summary["per_class"]] == [
        ("a", 0.02, 1),
        ("b", 0.02, 1),
        ("c", -0.02, 0),
    ]
    json.dumps(summary, allow_nan=False)


def test_of_a_thousand_classes_the_worst_are_listed() -> None:
    task = Classification(class_names=tuple(f"c{k}" for k in range(1000)))
    labels_N = torch.arange(1000)
    right = torch.eye(1000)
    models = [recorded(task, {"logits": logits}, {"labels": labels_N}) for logits in (right, right.roll(1, 0))]
    samples = pair(task, models, 0, [str(i) for i in range(1000)], seed=1)
    assert len(paired_summary(samples, 1, task.metrics)["per_class"]) == 20


def test_flips_are_of_predictions_that_can_be_equal() -> None:
    texts = LanguageModeling(vocabulary_size=4)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 6, 4, generator=generator)
    other = logits.clone()
    other[3, 2] = -other[3, 2]
    targets = {"next_tokens": torch.randint(0, 4, (40, 6), generator=generator)}
    samples = pair(texts, [recorded(texts, {"logits": of}, targets) for of in (logits, other)], 0, [""] * 40, 7)
    assert np.flatnonzero(samples.flips_MN[1]).tolist() == [3]
    assert samples.bootstraps.keys() == {"perplexity", "next_token_accuracy", "loss"} and not samples.right

    numbers = Regression(target_names=("y",), mean=(0.0,), std=(1.0,))
    model = recorded(numbers, {"predictions": torch.randn(9, 1)}, {"targets": torch.randn(9, 1)})
    assert model.predictions_N is None
    assert "num_flips" not in paired_summary(pair(numbers, [model, model], 0, [""] * 9, 7), 1, numbers.metrics)


def test_too_much_for_the_memory_leaves_what_is_right(monkeypatch) -> None:
    monkeypatch.setattr(recorder_module, "_MAX_BYTES", 8 * N - 1)
    models = [predicting(changed()), predicting(changed(4))]
    assert not models[0].is_complete and models[0].sums.keys() == {"accuracy", "top5_accuracy"}
    samples = pair(TASK, models, 0, [""] * N, 7)
    assert samples.drop("accuracy", 1).num_lost == 1 and samples.drop("loss", 1) is None
    monkeypatch.setattr(recorder_module, "_MAX_BYTES", 8 * N)
    assert predicting(changed()).is_complete


def test_rankings_are_left_out_first(monkeypatch, tmp_path: Path) -> None:
    """8 bytes for a label and sample; those of F1 and loss were kept before there were rankings."""
    task, random = MultiLabel(label_names=("a", "b")), torch.Generator().manual_seed(2)
    logits, labels = torch.randn(2, N, 2, generator=random), (torch.rand(N, 2, generator=random) < 0.4).float()
    ids = [str(number) for number in range(N)]

    def paired(max_bytes: int) -> PairedSamples:
        monkeypatch.setattr(recorder_module, "_MAX_BYTES", max_bytes)
        return pair(task, [recorded(task, {"logits": of}, {"labels": labels}) for of in logits], 0, ids, 7)

    everything, without_ranking, nothing = paired(28 * N), paired(28 * N - 1), paired(12 * N - 1)
    assert everything.bootstraps.keys() == {"macro_f1", "roc_auc", "average_precision", "loss"}
    assert everything.too_large == ()
    assert without_ranking.bootstraps.keys() == {"macro_f1", "loss"} and without_ranking.scores.keys() == {"loss"}
    assert without_ranking.drop("macro_f1", 1).limits(0.95) == everything.drop("macro_f1", 1).limits(0.95)
    assert without_ranking.too_large == ("roc_auc", "average_precision")
    assert nothing.bootstraps == {} and nothing.too_large == ("macro_f1", "roc_auc", "average_precision", "loss")
    save_samples(without_ranking, tmp_path)
    assert load_samples(tmp_path, 2, 0).too_large == without_ranking.too_large


def test_a_metric_without_a_value_in_some_resamples_has_no_interval() -> None:
    class OrNone(Classification):
        def metric_values(self, totals, num_samples):
            values = super().metric_values(totals, num_samples)
            return values | {"loss": np.where(totals["loss"] > totals["loss"].mean(), np.nan, values["loss"])}

    samples = pair(OrNone(class_names=NAMES), [predicting(changed()), predicting(changed(4))], 0, [""] * N, 7)
    assert samples.bootstraps == {} and samples.drop("accuracy", 1).num_lost == 1


class Detector(Task):
    """Of a plugin: it says how sure it is, and nothing else of rankings."""

    targets = property(lambda self: {"found": ArrayInfo(dtype="float32")})
    outputs = property(lambda self: (TensorSpec("score", "float32", (BATCH,)),))
    metrics = property(lambda self: (Metric("roc_auc", True, is_fraction=True), Metric("loss", False)))

    def losses(self, outputs, targets):
        return (outputs["score"] - targets["found"]).square()

    def sums(self, outputs, targets):
        return {"loss": self.losses(outputs, targets).double().sum()}

    def figures(self, sums, num_samples):
        return {"loss": float(sums["loss"]) / num_samples}

    def samples(self, outputs, targets):
        return {"prediction": outputs["score"], "score": -self.losses(outputs, targets)}

    def label_scores(self, outputs, targets):
        return torch.stack([outputs["score"], targets["found"]], dim=1)[:, None]


def test_a_task_of_a_plugin_is_ranked_by_its_label_scores(tmp_path: Path) -> None:
    random, found_N = torch.Generator().manual_seed(4), (torch.arange(N) % 5 == 0).float()
    base_N = found_N + torch.randn(N, generator=random)
    own_N = base_N + 0.5 * torch.randn(N, generator=random)
    models = [recorded(Detector(), {"score": scores_N}, {"found": found_N}) for scores_N in (base_N, own_N)]
    areas = [roc_auc_score(found_N, scores_N) for scores_N in (base_N, own_N)]
    assert primary_value(Detector(), models[1].sums) == pytest.approx(areas[1], abs=1e-12)
    samples = pair(Detector(), models, 0, [str(number) for number in range(N)], 7)
    assert samples.bootstraps.keys() == {"roc_auc", "loss"} and samples.scores.keys() == {"loss"}
    drop = samples.drop("roc_auc", 1)
    assert drop.drop == pytest.approx(areas[0] - areas[1], abs=1e-12)
    (primary,) = primary_drops(Detector(), models[0].sums, [models[1].sums], seed=7)
    assert primary.limits(0.95) == drop.limits(0.95)
    save_samples(samples, tmp_path)
    assert load_samples(tmp_path, 2, 0).drop("roc_auc", 1).limits(0.95) == drop.limits(0.95)


class TestFile:
    def test_it_comes_back_and_is_small(self, three, tmp_path: Path) -> None:
        save_samples(three, tmp_path)
        again = load_samples(tmp_path, 3, 1)
        assert (again.ids, again.class_names, again.baseline) == (three.ids, NAMES, 1)
        assert (again.right["accuracy"] == three.right["accuracy"]).all()
        assert (again.flips_MN == three.flips_MN).all() and (again.labels_N == LABELS_N).all()
        for row in (0, 2):
            assert paired_summary(again, row, TASK.metrics) == paired_summary(three, row, TASK.metrics)
        (tmp_path / "again").mkdir()
        save_samples(again, tmp_path / "again")
        for name in ("samples.json", "samples.safetensors"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
        arrays = load_file(tmp_path / "samples.safetensors")
        assert arrays["right.accuracy"].nbytes == 3 * 38
        assert arrays["drops.loss"].shape == (2, 2000) and arrays["drops.loss"].dtype == np.float32

    @pytest.mark.parametrize(
        "damage",
        [
            lambda arrays: arrays | {"right.accuracy": arrays["right.accuracy"][:, 1:]},
            lambda arrays: arrays | {"right.accuracy": arrays["right.accuracy"][1:]},
            lambda arrays: arrays | {"flips": arrays["flips"].astype(np.int8)},
            lambda arrays: arrays | {"labels": arrays["labels"][1:]},
            lambda arrays: arrays | {"labels": arrays["labels"].astype(np.float32)},
            lambda arrays: arrays | {"drops.loss": arrays["drops.loss"][1:]},
            lambda arrays: arrays | {"drops.loss": np.full((2, 5), np.nan, np.float32)},
            lambda arrays: {name: array for name, array in arrays.items() if name != "drops.loss"},
        ],
    )
    def test_damaged_arrays_are_refused(
        self, three, tmp_path: Path, damage: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
    ) -> None:
        save_samples(three, tmp_path)
        arrays = {name: array.copy() for name, array in load_file(tmp_path / "samples.safetensors").items()}
        damaged = {name: np.ascontiguousarray(array) for name, array in damage(arrays).items()}
        save_file(damaged, tmp_path / "samples.safetensors")
        with pytest.raises(IntegrityError, match=r"^not the samples of a comparison: "):
            load_samples(tmp_path, 3, 1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"ids": ["a"]},
            {"ids": [1] * N},
            {"ids": None},
            {"class_names": [None]},
            {"bootstraps": {"loss": []}},
            {"bootstraps": {"loss": [{}, None, {}]}},
            {"bootstraps": {"loss": [None, None, None]}},
        ],
    )
    def test_damaged_facts_are_refused(self, three, tmp_path: Path, changes: dict) -> None:
        save_samples(three, tmp_path)
        content = json.loads((tmp_path / "samples.json").read_text())
        (tmp_path / "samples.json").write_text(json.dumps(content | changes))
        with pytest.raises(IntegrityError, match=r"^not the samples of a comparison: "):
            load_samples(tmp_path, 3, 1)

    def test_a_former_file_is_read_as_it_was_meant(self, three, tmp_path: Path) -> None:
        save_samples(three, tmp_path)
        content = json.loads((tmp_path / "samples.json").read_text())
        for fact in filter(None, content["bootstraps"]["loss"]):
            del fact["num_mistakes"]
        (tmp_path / "samples.json").write_text(json.dumps(content))
        again = load_samples(tmp_path, 3, 1).drop("loss", 0)
        assert again.num_mistakes == again.num_differing
        assert again.limits(0.95) == three.drop("loss", 0).limits(0.95)

    @pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
    def test_other_files_are_refused(self, three, tmp_path: Path, text: str) -> None:
        save_samples(three, tmp_path)
        (tmp_path / "samples.json").write_text(text)
        with pytest.raises(IntegrityError):
            load_samples(tmp_path, 3, 1)
        (tmp_path / "samples.safetensors").write_text(text)
        with pytest.raises(IntegrityError):
            load_samples(tmp_path, 3, 1)


def test_different_numbers_of_samples_are_refused() -> None:
    other = recorded(TASK, {"logits": torch.randn(9, 6)}, {"labels": torch.zeros(9, dtype=torch.long)})
    with pytest.raises(StageError, match=r"9 of 300 samples"):
        pair(TASK, [predicting(changed()), other], 0, [str(i) for i in range(N)], 7)
