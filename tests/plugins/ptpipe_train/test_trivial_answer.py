from __future__ import annotations

import numpy as np
import pytest

from ptpipe_torch import ArrayColumn, ArrayInfo, Classification, Data, DatasetInfo, Regression, Split, Task
from ptpipe_torch.task.own_functions import OwnFunction, OwnFunctionsTask
from ptpipe_train.trivial_answer import no_better_than_trivial

from .conftest import Lab

CLASSES = Classification(class_names=("a", "b", "c", "d"))
PRICES = Regression(target_names=("price",), mean=(0.0,), std=(1.0,))
OWN = OwnFunction(address="own.py:f", source="0" * 64)


def labelled(task: Task, labels_N: np.ndarray) -> Data:
    """Return data whose val has these targets."""
    (name,) = task.targets
    inputs = {"x": ArrayColumn(np.zeros((len(labels_N), 1), np.float32))}
    ids = np.arange(len(labels_N)).astype(np.str_)
    val = Split(ids, inputs, {name: ArrayColumn(labels_N)})
    return Data(DatasetInfo("d", {"x": ArrayInfo(dtype="float32", shape=(1,))}, task), {"val": val})


UNEVEN = np.repeat(np.arange(4), (40, 30, 20, 10))


@pytest.mark.parametrize(
    ("task", "labels_N", "metrics", "start"),
    [
        (CLASSES, UNEVEN, {"val_accuracy": 0.2}, "val accuracy 20.00% is no better than always answering the most "),
        (CLASSES, UNEVEN, {"val_accuracy": 0.4}, "val accuracy 40.00% is no better than "),
        (CLASSES, UNEVEN, {"val_accuracy": 0.41}, None),
        (CLASSES, UNEVEN[::3], {"val_accuracy": 0.1}, None),  # too few
        (CLASSES.model_copy(update={"class_weights": (1.0, 2.0, 3.0, 4.0)}), UNEVEN, {"val_accuracy": 0.2}, None),
        (CLASSES.model_copy(update={"positive_class": "d"}), UNEVEN, {"val_f1": 0.0, "val_accuracy": 0.2}, None),
        (OwnFunctionsTask(base=CLASSES.to_json(), loss=OWN), UNEVEN, {"val_accuracy": 0.2}, "val accuracy 20.00% is "),
        (OwnFunctionsTask(base=CLASSES.to_json(), metric=OWN), UNEVEN, {"val_f": 0.0, "val_accuracy": 0.2}, None),
    ],
)
def test_classes(task: Task, labels_N: np.ndarray, metrics: dict[str, float], start: str | None) -> None:
    reason = no_better_than_trivial(labelled(task, labels_N), metrics, metrics)
    assert reason is None if start is None else reason is not None and reason.startswith(start)


@pytest.mark.parametrize(("r2", "is_trivial"), [(-0.25, True), (0.0, True), (0.01, False)])
def test_numbers(r2: float, is_trivial: bool) -> None:
    data = labelled(PRICES, np.linspace(0, 1, 60, dtype=np.float32)[:, None])
    reason = no_better_than_trivial(data, {"val_r2": r2, "val_rmse": 0.3}, {})
    assert (reason is not None) == is_trivial
    assert not is_trivial or reason == (
        f"val r2 {r2:g} is no better than always answering the mean, 0: the lr may be too high or too low, or the "
        "epochs too few"
    )


@pytest.mark.parametrize(
    ("mean", "r2", "rmse", "names_units"),
    [
        (4300.0, -6.4, 4610.0, True),  # outputs near 0
        (4300.0, -2.0, 2900.0, True),  # on their way
        (-4300.0, -6.4, 4610.0, True),
        (4300.0, -0.5, 2080.0, False),
        (4300.0, -40.0, 10_900.0, False),  # diverged
        (10.0, -2.0, 1800.0, False),  # targets lie around 0
    ],
)
def test_numbers_in_other_units(mean: float, r2: float, rmse: float, names_units: bool) -> None:
    task = Regression(target_names=("height", "price"), mean=(0.0, mean), std=(1.0, 1700.0))
    data = labelled(task, np.zeros((60, 2), np.float32))
    reason = no_better_than_trivial(data, {"val_r2": r2, "val_rmse": rmse / 2}, {})
    assert reason is not None
    assert ("the lr may be" not in reason) == names_units
    if names_units:
        assert f"since price is {mean:,.0f} ± 1,700: return the target's units, e.g. end `forward` with" in reason


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        (
            (1.13, 1.78),
            "train loss fell from 1.62 to 1.13 and val loss rose from 1.64 to 1.78: it learned train by ",
        ),
        ((1.60, 1.78), "the lr may be too high or too low, or the epochs too few"),
        ((1.13, 1.60), "the lr may be too high or too low, or the epochs too few"),
    ],
)
def test_losses_that_part_are_no_matter_of_the_lr(last: tuple[float, float], cause: str) -> None:
    metrics, first = (
        {"train_loss": train, "val_loss": val, "val_accuracy": 0.2} for train, val in (last, (1.62, 1.64))
    )
    reason = no_better_than_trivial(labelled(CLASSES, UNEVEN), metrics, first)
    assert reason is not None and f", 40.00%: {cause}" in reason


def test_a_training_that_memorizes_noise_says_so(lab: Lab) -> None:
    """Labels that have nothing to do with the inputs: a network of enough weights learns those of train by heart."""
    data, rng = lab.make_data(60, 80), np.random.default_rng(0)
    (name,) = data.info.task.targets

    def shuffled(split: Split) -> Split:
        return Split(split.ids, split.inputs, {name: ArrayColumn(rng.permutation(split.targets[name].values()))})

    data = Data(data.info, {split_name: shuffled(split) for split_name, split in data.splits.items()})
    notices = lab.train(lab.make_model(), data, epochs=60, lr=0.05).notices
    assert any(": it learned train by heart" in notice for notice in notices), notices


def test_a_training_at_chance_level_is_reported(lab: Lab) -> None:
    data = lab.make_data(160, 80)
    assert not lab.train(lab.make_model(), data, epochs=6).notices
    (notice,) = lab.train_afresh(lab.make_model(), data, epochs=1, lr=5.0).notices
    assert notice.startswith("val accuracy ") and "no better than always answering the most frequent class" in notice
    assert not lab.train_afresh(lab.make_model(), lab.make_data(160), epochs=1, lr=5.0).notices, "there is no val"
