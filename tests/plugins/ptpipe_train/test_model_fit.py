"""Whether a model fits a training, and what its outputs stand for afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ptpipe import Context, StageError
from ptpipe.events import Notice
from ptpipe_data.table_columns import NumbersInfo
from ptpipe_torch import ArrayColumn, Classification, Data, DatasetInfo, Signature, Split, TensorSpec
from ptpipe_train.model_fit import check_pipelined, with_meanings_of

from ...datasets import image_info
from .conftest import Lab

TOKENS = TensorSpec("tokens", "int64", ("batch", "length"))
LOGITS = TensorSpec("logits", "float32", ("batch", 2))


def test_pipelines_take_one_input_of_one_shape() -> None:
    """`validate` finds what the options say; data that were stored, in shards for instance, are known here."""
    with pytest.raises(
        StageError, match=r"pp needs .* tokens \(batch, length\) int64 has the length of each batch: give all"
    ):
        check_pipelined("pp", Signature((TOKENS,), (LOGITS,)))
    with pytest.raises(StageError, match="parallel mode ddp_pp takes networks of one input, not of"):
        check_pipelined("ddp_pp", Signature((TOKENS, TensorSpec("mask", "bool", ("batch", 9))), (LOGITS,)))
    with pytest.raises(StageError, match="parallel mode pp takes networks of one output, not of"):
        check_pipelined(
            "pp",
            Signature(
                (TensorSpec("tokens", "int64", ("batch", 9)),), (LOGITS, TensorSpec("ages", "float32", ("batch", 1)))
            ),
        )
    check_pipelined("pp", Signature((TensorSpec("tokens", "int64", ("batch", 9)),), (LOGITS,)))


def test_a_training_on_other_statistics_gives_a_notice(lab: Lab, tmp_path: Path) -> None:
    task = Classification(class_names=("a", "b"))
    january, february = (
        DatasetInfo(name, {"numbers": NumbersInfo(names=("age",), mean=(mean,), std=(2.0,))}, task)
        for name, mean in (("january", 30.5), ("february", 40.0))
    )
    model, events = lab.make_model().with_recipe(signature=january.signature), []
    february.check_fit("the model", model.signature, retrained=True)
    inputs = {"numbers": ArrayColumn(np.zeros((1, 1), np.float32))}
    split = Split(np.array(["f/1"]), inputs, {"labels": ArrayColumn(np.zeros(1, np.int64))})
    ctx = Context("train", "train.supervised", seed=0, scratch=tmp_path, _tell=events.append)
    trained = with_meanings_of(ctx, model, Data(february, {"train": split}))
    assert [event.text for event in events if isinstance(event, Notice)] == [
        "numbers stood for [age: mean 30.5, std 2], and stands for [age: mean 40, std 2] from this training on"
    ]
    february.check_fit("the model", trained.signature)
    with pytest.raises(StageError, match=r"mean 40, std 2\]; january has .*mean 30.5"):
        january.check_fit("the model", trained.signature)


def test_what_outputs_stand_for_is_the_last_trainings(lab: Lab) -> None:
    model, data = lab.make_model(), lab.make_data()
    trained = lab.train(model, data)
    assert trained.model.signature.meanings["logits"] == ("a", "b", "c", "d") and not trained.notices
    others = image_info("others", ("a", "b", "c", "e"), (1, 8, 8), (0.3,), (0.2,))
    again = lab.train(trained.model, Data(others, data.splits, data.loader))
    assert again.model.signature.meanings["logits"] == ("a", "b", "c", "e")
    assert "logits stood for [a, b, c, d], and stands for [a, b, c, e] from this training on" in again.notices
    with pytest.raises(StageError, match=r"the model returns logits of \[a, b, c, e\]; mixed has \[e, a, b, c\]"):
        mixed = image_info("mixed", ("e", "a", "b", "c"), (1, 8, 8), (0.3,), (0.2,))
        lab.train(again.model, Data(mixed, data.splits, data.loader))


def test_images_of_another_normalization_are_reported(lab: Lab) -> None:
    data = lab.make_data()
    trained = lab.train(lab.make_model(), data)
    near, far = (
        Data(image_info(f"{mean}", tuple("abcd"), (1, 8, 8), (mean,), (0.2,)), data.splits, data.loader)
        for mean in (0.305, 0.5)
    )
    assert not lab.train(trained.model, near).notices
    again = lab.train(trained.model, far)
    assert again.notices == [
        "images stood for [mean 0.3, std 0.2], and stands for [mean 0.5, std 0.2] from this training on"
    ]
    far.info.check_fit("the model", again.model.signature)
    with pytest.raises(StageError, match=r"takes images of \[mean 0.5, std 0.2\]; quadrants has \[mean 0.3, std 0.2\]"):
        data.info.check_fit("the model", again.model.signature)
