"""What a teacher returns, as targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, ArrayInfo, Data, DatasetInfo, LoaderOptions, Split, Task, TeacherOutputs
from ptpipe_torch.task.teacher_outputs import TeacherOutput

BOXES = TeacherOutput(name="boxes", dtype="float32", shape=(2, 3), std=(100.0, 0.1))
CLASSES = TeacherOutput(name="classes", dtype="int64", shape=(3,))
FEATURES = TeacherOutput(name="features", dtype="float64", shape=(3, 2), channel_axis=1, std=(1.0, 2.0))
TASK = TeacherOutputs(every_output=(BOXES, CLASSES, FEATURES))
TARGETS = {"boxes": torch.zeros(1, 2, 3), "features": torch.zeros(1, 3, 2)}


def outputs(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**TARGETS, "classes": torch.ones(1, 3, dtype=torch.int64), **changes}


def figures(found: dict[str, torch.Tensor]) -> dict[str, object]:
    return TASK.figures({name: total.numpy() for name, total in TASK.sums(found, TARGETS).items()}, 1)


def test_every_output_is_returned_and_those_with_floats_are_targets() -> None:
    assert [str(spec) for spec in TASK.outputs] == [
        "boxes (batch, 2, 3) float32",
        "classes (batch, 3) int64",
        "features (batch, 3, 2) float64",
    ]
    assert TASK.targets.keys() == {"boxes", "features"}
    assert type(Task.from_json(TASK.to_json())) is TeacherOutputs and Task.from_json(TASK.to_json()) == TASK


def test_channels_count_alike_whatever_their_size_is() -> None:
    assert figures(outputs()) == {
        "fidelity": 1.0,
        "loss": 0.0,
        "per_output": [{"name": "boxes", "fidelity": 1.0}, {"name": "features", "fidelity": 1.0}],
    }
    for box, score in ((50.0, 0.0), (0.0, 0.05)):  # half a standard deviation each: a quarter of the variance
        boxes = torch.tensor([box, score]).view(1, 2, 1).expand(1, 2, 3)
        found = figures(outputs(boxes=boxes))
        assert found["per_output"][0]["fidelity"] == pytest.approx(1 - 0.25 / 2)  # type: ignore[index]
        assert found["fidelity"] == pytest.approx(1 - 0.25 / 4)
        assert found["loss"] == pytest.approx(np.log(1.25) / 4)


def test_channels_may_be_the_last_axis() -> None:
    features = torch.tensor([1.0, 0.0]).expand(1, 3, 2)  # the first channel is off by its whole deviation
    assert figures(outputs(features=features))["fidelity"] == pytest.approx(0.75)


def test_a_channel_that_is_far_off_counts_once_in_fidelity_and_has_a_gradient() -> None:
    boxes = torch.tensor([1e6, 0.0]).view(1, 2, 1).repeat(1, 1, 3).requires_grad_()
    found = outputs(boxes=boxes)
    loss = TASK.losses(found, TARGETS).sum()
    loss.backward()
    assert TASK.samples(found, TARGETS)["score"].item() == pytest.approx(0.75)
    assert boxes.grad is not None and boxes.grad[0, 0].abs().min() > 0


def test_what_a_running_teacher_returns_is_learned_alike() -> None:
    found = outputs(boxes=torch.randn(1, 2, 3))
    assert TASK.can_be_distilled
    torch.testing.assert_close(TASK.teacher_losses(found, outputs(), {}, 4.0), TASK.losses(found, TARGETS))


def test_predictions_are_the_outputs_that_have_floats() -> None:
    kept = TASK.samples(outputs(), TARGETS)
    assert {name: tuple(rows.shape) for name, rows in kept.items()} == {
        "prediction": (1, 2, 3),
        "prediction_features": (1, 3, 2),
        "score": (1,),
    }


def test_augmentation_is_refused() -> None:
    rows = ArrayColumn(np.zeros((2, 2, 3), np.float32))
    split = Split(np.array(["a", "b"]), {"x": rows}, {"boxes": rows})
    info = DatasetInfo("rows", {"x": ArrayInfo(dtype="float32", shape=(2, 3))}, TeacherOutputs(every_output=(BOXES,)))
    with pytest.raises(StageError, match=r"^augment: boxes is what the teacher returned for the samples as they are"):
        Data(info, {"train": split}, LoaderOptions(augment=("flip",)))


def test_facts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least one output has floats"):
        TeacherOutputs(every_output=(CLASSES,))
    for facts in ({"shape": (2,), "std": (1.0,)}, {"shape": (2,), "channel_axis": 1, "std": (1.0,)}, {"shape": ()}):
        changed = {"std": (1.0, 1.0), **facts}
        with pytest.raises(ValidationError, match="std has a number for each channel"):
            TeacherOutput.model_validate({"name": "boxes", "dtype": "float32", **changed})
