"""Run with `pytest`."""
# ruff: noqa: D103  # a test says what it is in its name

from pathlib import Path

import numpy as np
import pytest
import torch
from turned import Direction, TurnedColumn, turned_digits

from ptpipe.testing import Bench
from ptpipe_torch import Data, Task

pytest_plugins = ["ptpipe.testing"]


def test_the_loss_is_that_of_the_angle_whatever_the_vectors_length() -> None:
    outputs = {"direction": torch.tensor([[3.0, 0.0], [0.0, 0.1], [-1.0, 0.0]])}
    targets = {"degrees": torch.tensor([0.0, 30.0, -180.0])}
    task = Direction()
    torch.testing.assert_close(task.losses(outputs, targets), torch.tensor([0.0, 0.5, 0.0]))
    sums = {name: total.numpy() for name, total in task.sums(outputs, targets).items()}
    assert task.figures(sums, 3)["mean_error_degrees"] == pytest.approx(20, abs=0.02)
    assert Task.from_json(task.to_json()) == task


def test_images_are_turned_when_they_are_taken() -> None:
    image_HW = np.zeros((9, 9), np.uint8)
    image_HW[4, 8] = 200
    column = TurnedColumn(np.stack([image_HW] * 2), np.array([0, 90], np.float32))
    turned_NHWC = column.take(np.array([1, 0, 1]))
    assert turned_NHWC.shape == (3, 9, 9, 1)
    assert turned_NHWC[1, 4, 8, 0] == turned_NHWC[0, 0, 4, 0] == 200


def test_the_stored_data_set_is_the_same(bench: Bench, tmp_path: Path) -> None:
    data = bench.run(turned_digits, {"num_images": 60})
    data.save(tmp_path)
    stored = Data.load(tmp_path)
    assert isinstance(stored.info.task, Direction)
    for one, other in zip(data.batches("train"), stored.batches("train"), strict=True):
        assert torch.equal(one.inputs["images"], other.inputs["images"])
        assert torch.equal(one.targets["degrees"], other.targets["degrees"])
