"""Shape legend: N samples, T targets, H height, W width."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn import metrics as sk
from torch.nn import functional as F

from ptpipe import IntegrityError, StageError
from ptpipe_torch import ArrayColumn, ArrayInfo, Metric, Regression, Task
from ptpipe_torch.data.augment import augment

NAMES = ("height", "weight", "age")
MEAN, STD = (1.7, 70.0, -4.0), (0.1, 15.0, 2.0)


def task_of(num_targets: int = 3, **facts: Any) -> Regression:
    return Regression(target_names=NAMES[:num_targets], mean=MEAN[:num_targets], std=STD[:num_targets], **facts)


def tensors(
    predictions_NT: np.ndarray, targets_NT: np.ndarray
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"predictions": torch.from_numpy(predictions_NT)}, {"targets": torch.from_numpy(targets_NT)}


def sums_of(
    task: Task, predictions_NT: np.ndarray, targets_NT: np.ndarray, batch_size: int = 10_000
) -> dict[str, np.ndarray]:
    """The sums of all batches, added."""
    totals: dict[str, np.ndarray] = {}
    for start in range(0, len(targets_NT), batch_size):
        rows = slice(start, start + batch_size)
        for name, value in task.sums(*tensors(predictions_NT[rows], targets_NT[rows])).items():
            totals[name] = totals.get(name, 0) + value.numpy()
    return totals


def figures_of(
    predictions_NT: np.ndarray, targets_NT: np.ndarray, task: Regression | None = None, batch_size: int = 10_000
) -> dict[str, Any]:
    task = task or task_of(targets_NT.shape[1])
    return task.figures(sums_of(task, predictions_NT, targets_NT, batch_size), len(targets_NT))


def sample(seed: int, num_samples: int = 500, num_targets: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Predictions that explain most of the targets."""
    random = np.random.default_rng(seed)
    targets_NT = random.normal(MEAN, STD, (num_samples, 3))
    predictions_NT = targets_NT + random.normal(0, 0.4, (num_samples, 3)) * STD
    return predictions_NT.astype(np.float32)[:, :num_targets], targets_NT.astype(np.float32)[:, :num_targets]


LOSSES = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_targets", [1, 3])
def test_losses_are_torchs_in_standard_deviations(loss: Any, num_targets: int) -> None:
    outputs, targets = tensors(*sample(1, num_targets=num_targets))
    losses_N = task_of(num_targets, loss=loss).losses(outputs, targets)
    assert losses_N.shape == (500,) and losses_N.dtype == torch.float32
    std_T = torch.tensor(STD[:num_targets], dtype=torch.float64)
    pair_NT = outputs["predictions"].double() / std_T, targets["targets"].double() / std_T
    expected_N = LOSSES[loss](*pair_NT, reduction="none").mean(1)
    torch.testing.assert_close(losses_N.double(), expected_N, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delta", [0.1, 2.5])
def test_delta_is_where_huber_turns(delta: float) -> None:
    outputs, targets = tensors(*sample(2, num_targets=1))
    losses_N = task_of(1, loss="huber", huber_delta=delta).losses(outputs, targets)
    difference_N = ((outputs["predictions"] - targets["targets"]) / STD[0]).squeeze(1)
    expected_N = F.huber_loss(difference_N, torch.zeros(500), reduction="none", delta=delta)
    torch.testing.assert_close(losses_N, expected_N, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_have_gradients_and_no_unit(loss: Any) -> None:
    """Targets in grams instead of kilograms: the same loss, and the same gradient of standardized outputs."""
    predictions_NT, targets_NT = sample(3)
    found = []
    for unit in (1.0, 1024.0):
        facts = {"mean": tuple(unit * mean for mean in MEAN), "std": tuple(unit * std for std in STD)}
        task = Regression(target_names=NAMES, loss=loss, **facts)
        raw_NT = torch.from_numpy(predictions_NT).requires_grad_()
        losses_N = task.losses({"predictions": raw_NT * unit}, {"targets": torch.from_numpy(targets_NT) * unit})
        losses_N.mean().backward()
        found.append((losses_N.detach(), raw_NT.grad))
    assert found[0][0].equal(found[1][0]) and found[0][1].equal(found[1][1])
    assert found[0][1].abs().sum() > 0


def test_losses_of_half_precision_are_computed_in_float32() -> None:
    outputs, targets = tensors(*sample(4))
    half = {"predictions": outputs["predictions"].bfloat16()}
    losses_N = task_of().losses(half, targets)
    assert losses_N.dtype == torch.float32
    assert losses_N.equal(task_of().losses({"predictions": half["predictions"].float()}, targets))


@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_figures_equal_scikit_learns(num_targets: int) -> None:
    predictions_NT, targets_NT = sample(5, num_targets=num_targets)
    ours = figures_of(predictions_NT, targets_NT)
    pair = targets_NT.astype(np.float64), predictions_NT.astype(np.float64)
    assert 0.5 < ours["r2"] < 0.95
    for name, measure in (
        ("r2", sk.r2_score),
        ("rmse", sk.root_mean_squared_error),
        ("mae", sk.mean_absolute_error),
    ):
        assert ours[name] == pytest.approx(measure(*pair), rel=1e-9)
        each = measure(*pair, multioutput="raw_values").tolist()
        assert [row[name] for row in ours["per_target"]] == pytest.approx(each, rel=1e-9)
    assert [row["name"] for row in ours["per_target"]] == list(NAMES[:num_targets])
    scaled = [values_NT / STD[:num_targets] for values_NT in pair]
    assert ours["loss"] == pytest.approx(sk.mean_squared_error(*scaled), rel=1e-5)


@pytest.mark.parametrize("constant", [1.7, 0.1, 1e6])
@pytest.mark.parametrize("is_right", [True, False])
def test_r2_of_a_constant_is_scikit_learns(constant: float, is_right: bool) -> None:
    """1 where every prediction is right, else 0; and the other target's figure is its own."""
    predictions_NT, targets_NT = sample(6, num_targets=2)
    targets_NT[:, 0] = constant
    predictions_NT[:, 0] = targets_NT[:, 0] + (0 if is_right else 0.5)
    ours = figures_of(predictions_NT, targets_NT)
    expected = sk.r2_score(targets_NT.astype(float), predictions_NT.astype(float), multioutput="raw_values")
    assert expected[0] == is_right
    assert [row["r2"] for row in ours["per_target"]] == pytest.approx(expected.tolist(), rel=1e-5)
    assert ours["r2"] == pytest.approx(expected.mean(), rel=1e-5)


def test_large_means_lose_no_digits() -> None:
    random = np.random.default_rng(7)
    targets_N1 = (1e6 + random.normal(0, 1, (20_000, 1))).astype(np.float32)
    predictions_N1 = (targets_N1 + random.normal(0, 0.3, (20_000, 1))).astype(np.float32)
    pair = targets_N1.astype(np.float64), predictions_N1.astype(np.float64)
    for mean in (1e6, 1e6 + 3):  # of train, whose mean is not quite that of a split
        task = Regression(target_names=("y",), mean=(mean,), std=(1.0,))
        ours = figures_of(predictions_N1, targets_N1, task, batch_size=128)
        assert ours["r2"] == pytest.approx(sk.r2_score(*pair), rel=1e-9)
        assert ours["rmse"] == pytest.approx(sk.root_mean_squared_error(*pair), rel=1e-9)
        assert ours["mae"] == pytest.approx(sk.mean_absolute_error(*pair), rel=1e-9)
        assert ours["loss"] == pytest.approx(sk.mean_squared_error(*pair), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 499])
def test_sums_of_parts_add_up_to_the_sums_of_the_whole(batch_size: int) -> None:
    pair = sample(8)
    whole, parts = (sums_of(task_of(), *pair, size) for size in (500, batch_size))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert value.dtype == parts[name].dtype == np.float64
        np.testing.assert_allclose(parts[name], value, rtol=1e-12, atol=1e-9)
    ours, theirs = (figures_of(*pair, batch_size=size) for size in (500, batch_size))
    for metric in task_of().metrics:
        assert ours[metric.name] == pytest.approx(theirs[metric.name], rel=1e-12)


TARGETS = st.floats(-100, 100, width=32, allow_subnormal=False)


@given(st.lists(st.tuples(TARGETS, TARGETS), min_size=2, max_size=30), st.integers(1, 30))
def test_figures_of_any_samples(rows: list[tuple[float, float]], batch_size: int) -> None:
    predictions_N1, targets_N1 = (np.float32(values)[:, None] for values in zip(*rows, strict=True))
    ours = figures_of(predictions_N1, targets_N1, batch_size=batch_size)
    pair = targets_N1.astype(np.float64), predictions_N1.astype(np.float64)
    assert ours["rmse"] == pytest.approx(sk.root_mean_squared_error(*pair), rel=1e-9)
    assert ours["mae"] == pytest.approx(sk.mean_absolute_error(*pair), rel=1e-9)
    assert ours["mae"] <= ours["rmse"] * (1 + 1e-9) and ours["r2"] <= 1
    spread = float(np.ptp(targets_N1))
    if spread > 1e-3 or not spread:  # below that, differences of squares have few digits
        assert ours["r2"] == pytest.approx(sk.r2_score(*pair), rel=1e-5, abs=1e-5)


def test_figures_are_json() -> None:
    figures = figures_of(*sample(9))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert {metric.name for metric in task_of().metrics} <= figures.keys()
    one = figures_of(*sample(9, num_samples=1))  # its variance is 0
    assert json.loads(json.dumps(one, allow_nan=False)) == one


@pytest.mark.parametrize("loss", LOSSES)
def test_of_each_sample_its_prediction_score_and_targets_are_kept(loss: Any) -> None:
    predictions_NT, targets_NT = sample(10)
    outputs, targets = tensors(predictions_NT, targets_NT)
    task = task_of(loss=loss)
    kept = task.samples(outputs, targets)
    assert kept.keys() == {"prediction", "score", "targets"}
    assert kept["prediction"].equal(outputs["predictions"]) and kept["targets"].equal(targets["targets"])
    assert kept["score"].equal(-task.losses(outputs, targets))
    half = task.samples({"predictions": outputs["predictions"].half()}, targets)
    assert half["prediction"].dtype == half["score"].dtype == torch.float32
    right = task.samples({"predictions": targets["targets"]}, targets)
    assert right["score"].abs().max() == 0 and (kept["score"] < 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_targets_that_are_not_finite_are_refused(value: float) -> None:
    targets_NT = sample(11)[1]
    task = task_of()
    task.check_targets("val", {"targets": ArrayColumn(targets_NT)})
    task.check_targets("val", {"targets": ArrayColumn(targets_NT[:0])})
    targets_NT[41, 1] = targets_NT[70, 0] = value
    with pytest.raises(StageError, match=r"^split val has a weight that is not finite$"):
        task.check_targets("val", {"targets": ArrayColumn(targets_NT)})


def test_facts() -> None:
    task = task_of()
    assert task.num_targets == 3
    assert task.targets == {"targets": ArrayInfo(dtype="float32", shape=(3,))}
    assert [str(spec) for spec in task.outputs] == ["predictions (batch, 3) float32"]
    assert (task.output_scale, task.output_shift) == (STD, MEAN)
    assert task.primary_metric == Metric("r2", higher_is_better=True)
    assert {metric.name: metric.higher_is_better for metric in task.metrics} == {
        "r2": True, "rmse": False, "mae": False, "loss": False,
    }  # fmt: skip
    assert not any(metric.is_fraction for metric in task.metrics)


MAPS = (5, 4)


def maps_of(seed: int, num_samples: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and targets of shape (N, 3, 5, 4)."""
    rows = sample(seed, num_samples * 20)
    predictions, targets = (values.reshape(num_samples, 5, 4, 3).transpose(0, 3, 1, 2) for values in rows)
    return np.ascontiguousarray(predictions), np.ascontiguousarray(targets)


@pytest.mark.parametrize("batch_size", [7, 60])
def test_figures_of_maps_are_those_of_all_their_positions(batch_size: int) -> None:
    pair = maps_of(12)
    ours = figures_of(*pair, task_of(positions=MAPS), batch_size=batch_size)
    alone = figures_of(*(values.transpose(0, 2, 3, 1).reshape(-1, 3) for values in pair))
    for name in ("r2", "rmse", "mae", "loss"):
        assert ours[name] == pytest.approx(alone[name], rel=1e-6), name
    assert [row["r2"] for row in ours["per_target"]] == pytest.approx([row["r2"] for row in alone["per_target"]])


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_maps_are_their_positions_mean(loss: Any) -> None:
    outputs, targets = tensors(*maps_of(13))
    task = task_of(loss=loss, positions=MAPS)
    std = torch.tensor(STD)[:, None, None]
    pair = outputs["predictions"] / std, targets["targets"] / std
    expected_N = LOSSES[loss](*pair, reduction="none").mean((1, 2, 3))
    torch.testing.assert_close(task.losses(outputs, targets), expected_N, rtol=1e-4, atol=1e-5)
    assert task.samples(outputs, targets).keys() == {"prediction", "score"}  # targets are too much to keep
    nothing_N = task.teacher_losses(outputs, outputs, targets, 1.0)
    assert nothing_N.shape == (60,) and not nothing_N.any()


def test_psnr_is_that_of_each_sample() -> None:
    """As torchmetrics defines it; a sample without an error counts 100 dB."""
    predictions, targets = maps_of(14, 6)
    predictions[2] = targets[2]
    task = task_of(positions=MAPS, data_range=20.0)
    squared_N = np.square(predictions.astype(float) - targets).mean((1, 2, 3))
    with np.errstate(divide="ignore"):
        expected_N = np.minimum(100, 10 * np.log10(20.0**2 / squared_N))
    assert expected_N.max() == 100 and expected_N.min() < 30
    assert figures_of(predictions, targets, task)["psnr_db"] == pytest.approx(expected_N.mean(), rel=1e-6)
    assert task.primary_metric == Metric("psnr_db", higher_is_better=True)
    assert task_of(positions=MAPS).primary_metric.name == "r2"


def test_natural_units_are_those_of_each_target() -> None:
    predictions, _ = maps_of(15)
    found = task_of(positions=MAPS).in_natural_units(predictions)
    expected = (predictions - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[..., 0, 0], task_of().in_natural_units(predictions[..., 0, 0]))


def test_maps_are_mirrored_and_nothing_else() -> None:
    (name, info), *_ = task_of(positions=MAPS).targets.items()
    assert str(info.spec(name)) == "targets (batch, 3, 5, 4) float32"
    _, targets = maps_of(16)
    pixels, positions = np.arange(60 * 20, dtype=np.uint16).reshape(60, 5, 4, 1), np.arange(60)
    mirrored = augment(pixels.astype(np.uint8), positions, (3, 1), ["flip"])[..., 0]
    is_mirrored_N = (mirrored != pixels.astype(np.uint8)[..., 0]).any((1, 2))
    assert 15 < is_mirrored_N.sum() < 45
    found = info.augment(targets.copy(), positions, (3, 1), ["flip"])
    np.testing.assert_array_equal(found[is_mirrored_N], targets[is_mirrored_N, ..., ::-1])
    np.testing.assert_array_equal(found[~is_mirrored_N], targets[~is_mirrored_N])
    info.check_augment(name, ["flip"])
    with pytest.raises(StageError, match=r"^augment: crop would change the images and not targets"):
        info.check_augment(name, ["flip", "crop"])
    (signal,) = task_of(positions=(8,)).targets.values()
    with pytest.raises(StageError, match="is no map"):
        signal.check_augment(name, ["flip"])
    task_of().targets[name].check_augment(name, ["crop"])  # a number is that of the moved image, too


def test_maps_that_are_not_finite_are_refused() -> None:
    _, targets = maps_of(17)
    targets[8, 2, 4, 1] = np.inf
    with pytest.raises(StageError, match=r"^split test has a age that is not finite$"):
        task_of(positions=MAPS).check_targets("test", {"targets": ArrayColumn(targets)})


def test_there_are_no_labels_to_smooth() -> None:
    assert task_of().with_label_smoothing(0) == task_of()
    with pytest.raises(
        StageError,
        match=r"^label_smoothing is for one class of several .*, and the task Regression has none: leave it out$",
    ):
        task_of().with_label_smoothing(0.1)


@pytest.mark.parametrize(
    "facts",
    [{}, {"loss": "huber", "huber_delta": 0.5}, {"loss": "mae"}, {"positions": (4, 6), "data_range": 255.0}],
)
def test_facts_survive_json(facts: dict[str, Any]) -> None:
    task = task_of(**facts)
    stored = json.loads(json.dumps(task.to_json(), allow_nan=False))
    again = Task.from_json(stored)
    assert type(again) is Regression and again == task
    assert stored["type"] == "ptpipe_torch.task.regression:Regression"
    with pytest.raises(IntegrityError):
        Task.from_json(stored | {"type": "ptpipe_torch.task.regression:Field"})
    with pytest.raises(ValidationError):
        Task.from_json(stored | {"std": [1.0]})


@pytest.mark.parametrize(
    "facts",
    [
        {"target_names": (), "mean": (), "std": ()},
        {"mean": (1.0, 2.0)},
        {"std": (1.0, 2.0)},
        {"std": (0.0,)},
        {"std": (-1.0,)},
        {"std": (float("nan"),)},
        {"mean": (float("inf"),)},
        {"loss": "hinge"},
        {"huber_delta": 0.0},
        {"data_range": 0.0},
        {"positions": (0,)},
    ],
    ids=str,
)
def test_facts_that_make_no_sense_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Regression(**{"target_names": ("y",), "mean": (0.0,), "std": (1.0,)} | facts)
