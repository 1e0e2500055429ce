"""How the classes of a classification count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_data.classes import balanced_weights, classification, report_absent
from ptpipe_data.config import ClassesConfig, SyntheticConfig
from ptpipe_data.table_config import TableConfig
from ptpipe_torch import Classification

NAMES = ("ham", "eggs", "spam")
POSITIVE = {"positive": "ham", "weights": "balanced"}


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels_N = np.repeat([0, 1, 2], [50, 30, 20])
    task = classification(NAMES, ClassesConfig(weights="balanced"), labels_N)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels_N)
    assert task.class_weights == pytest.approx(expected.tolist())
    assert np.take(task.class_weights, labels_N).mean() == pytest.approx(1)


def test_a_class_that_train_does_not_have_weighs_nothing() -> None:
    assert balanced_weights(np.array([10, 0, 30])) == pytest.approx([2, 0, 2 / 3])


def test_a_positive_class_that_is_none_is_refused() -> None:
    with pytest.raises(StageError, match=r"classes.positive: 'spm' is no class \(did you mean 'spam'\?\)"):
        classification(NAMES, ClassesConfig(positive="spm"), np.zeros(1, dtype=np.int64))


def test_what_models_are_compared_by_is_of_the_positive_class() -> None:
    options = ClassesConfig(positive="spam", metric="average_precision")
    task = classification(NAMES, options, np.zeros(1, dtype=np.int64))
    assert task.primary_metric.name == "average_precision"
    assert (
        classification(NAMES, ClassesConfig(positive="spam"), np.zeros(1, dtype=np.int64)).primary_metric.name == "f1"
    )
    with pytest.raises(
        ValueError, match="metric: roc_auc is of one class: name it as `positive`, or write roc_auc_ovr"
    ):
        ClassesConfig(metric="roc_auc")


@pytest.mark.parametrize("metric", ["roc_auc_ovr", "average_precision"])
def test_without_a_positive_class_a_ranking_is_of_all_classes(metric: str) -> None:
    labels_N = np.zeros(1, dtype=np.int64)
    task = classification(NAMES, ClassesConfig(metric=metric), labels_N)
    assert task == Classification(class_names=NAMES, ovr_metric=metric)
    assert task.primary_metric.name == metric
    with pytest.raises(StageError, match=f"of two classes, {metric} is of the one to find: name it as `positive`"):
        classification(NAMES[:2], ClassesConfig(metric=metric), labels_N)
    with pytest.raises(StageError, match=f"{metric} is of at most 100 classes, and there are 1,000"):
        classification([f"class {number}" for number in range(1000)], ClassesConfig(metric=metric), labels_N)


def test_a_mean_over_all_classes_has_no_positive_one() -> None:
    with pytest.raises(ValueError, match="roc_auc_ovr is of all classes: leave out `positive`, or write roc_auc"):
        ClassesConfig(positive="spam", metric="roc_auc_ovr")


def test_by_default_the_task_is_what_it_was() -> None:
    assert classification(NAMES, ClassesConfig(), np.zeros(1, dtype=np.int64)) == Classification(class_names=NAMES)


def test_options_of_stages(tmp_path: Path) -> None:
    ctx = Context("d", "data.synthetic", 3, tmp_path)
    options = {
        "num_classes": 3,
        "num_train": 40,
        "num_test": 10,
        "classes": {"weights": "balanced", "focal_gamma": 2.0},
    }
    task = front.make_synthetic(SyntheticConfig.model_validate(options), ctx).info.task
    assert task.focal_gamma == 2 and len(task.class_weights) == 3
    (tmp_path / "t.csv").write_text("x,kind\n" + "\n".join(f"{n},{'spam' if n % 5 else 'ham'}" for n in range(40)))
    table = {
        "path": str(tmp_path / "t.csv"),
        "targets": ("kind",),
        "classes": {"positive": "ham", "weights": "balanced"},
    }
    task = front.load_table(TableConfig.model_validate(table | {"task": "classification"}), ctx).info.task
    assert task.positive_class == "ham" and task.class_weights[0] > 2 > task.class_weights[1]
    with pytest.raises(ValueError, match="classes is an option of the task classification"):
        TableConfig.model_validate(table | {"task": "multi_label"})


def test_absent_classes_are_reported(ctx, events) -> None:
    report_absent(np.array([1, 2]), ("ham", "spam"), ctx)
    assert not events.notices
    report_absent(np.array([0] * 1011 + [3]), [str(number) for number in range(1012)], ctx)
    assert events.notices == ["train has nothing of 1,011 of 1,012 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."]
