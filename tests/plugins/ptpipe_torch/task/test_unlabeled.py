"""Data sets without targets: what they allow, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, ArrayInfo, Data, DatasetInfo, Signature, Split, Task, TensorSpec, Unlabeled


@pytest.fixture
def data() -> Data:
    rows = ArrayColumn(np.arange(12, dtype=np.float32).reshape(4, 3))
    split = Split(np.array(list("abcd")), {"x": rows}, {})
    return Data(DatasetInfo("rows", {"x": ArrayInfo(dtype="float32", shape=(3,))}, Unlabeled()), {"train": split})


def test_batches_have_inputs_alone_also_from_the_store(data, tmp_path) -> None:
    data.save(tmp_path)
    for each in (data, Data.load(tmp_path)):
        (batch,) = each.batches("train")
        assert len(batch) == 4 and batch.targets == {} and batch.inputs["x"].shape == (4, 3)
    assert type(Task.from_json(data.info.task.to_json())) is Unlabeled
    assert str(data.info.signature) == "x (batch, 3) float32 -> anything"


def test_a_model_of_any_outputs_fits_and_one_of_other_inputs_does_not(data) -> None:
    (x,) = data.info.signature.inputs
    outputs = (TensorSpec("boxes", "float32", ("batch", 7, 4)), TensorSpec("scores", "float32", ("batch", 7)))
    data.info.check_fit("detector", Signature((x,), outputs))
    with pytest.raises(StageError, match=r"^detector takes y \(batch, 3\) float32; rows needs x \(batch, 3\) float32"):
        data.info.check_fit("detector", Signature((TensorSpec("y", "float32", ("batch", 3)),), outputs))


def test_there_is_nothing_to_learn_and_nothing_to_judge_by() -> None:
    task, outputs = Unlabeled(), {"boxes": torch.zeros(2, 7, 4)}
    assert task.metrics == () and task.sums(outputs, {}) == {} and task.figures({}, 2) == {}
    assert task.samples(outputs, {}).keys() == {"boxes"}
    with pytest.raises(StageError, match=r"^the data set is unlabeled: there is no target to learn"):
        task.losses(outputs, {})
    with pytest.raises(StageError, match=r"^the data set is unlabeled: there is no metric .* eval\.latency"):
        _ = task.primary_metric
