from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from ptpipe import StageError
from ptpipe.events import Metric, Notice, Progress
from ptpipe_eval import eval_predict
from ptpipe_eval.config import PredictConfig
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    Deployable,
    LoaderOptions,
    Predictions,
    Predictor,
    RaggedColumn,
    Signature,
    Split,
    TokenClassification,
    TokensInfo,
)

from ...datasets import image_split, labels_of


def test_float_torch_onnx_and_a_strangers_format_agree(
    digits, numpy_model, torch_model, onnx_model, weights, context
) -> None:
    (batch,) = digits.batches("test", batch_size=1000)
    expected_NK = batch.inputs["images"].flatten(1).double().numpy() @ weights[0].T.astype(np.float64) + weights[1]
    answers = [
        eval_predict(PredictConfig(), context("eval.predict", model=("m",)), model, digits)
        for model in (numpy_model, torch_model, onnx_model)
    ]
    for answer in answers:
        assert answer.arrays.keys() == {"prediction", "score", "labels", "logits"}
        assert answer.arrays["logits"] == pytest.approx(expected_NK, abs=1e-4)
        assert answer.arrays["logits"].dtype == np.float32
        assert answer.ids.tolist() == digits.splits["test"].ids.tolist()
        labels_N = labels_of(digits.splits["test"])
        assert answer.arrays["labels"].tolist() == labels_N.tolist()
        assert answer.arrays["prediction"].tolist() == expected_NK.argmax(axis=1).tolist()
        assert answer.arrays["score"].tolist() == (expected_NK.argmax(axis=1) == labels_N).tolist()
        assert answer.metrics["accuracy"] == answer.arrays["score"].mean(dtype=np.float64)
        assert answer.metrics["accuracy"] > 0.85
    assert [answer.metrics["format"] for answer in answers] == ["numpy float32", "torch float32", "onnx float32"]


def test_metrics_say_what_they_are_of(digits, numpy_model, context) -> None:
    metrics = eval_predict(PredictConfig(split="val"), context(model=("m",)), numpy_model, digits).metrics
    assert (metrics["data"], metrics["split"], metrics["num_samples"]) == ("digits", "val", 200)
    assert metrics["class_names"][:2] == ["zero", "one"]
    assert metrics["probabilities"] == {"logits": "softmax"}
    arrays = eval_predict(PredictConfig(split="val"), context(), numpy_model, digits).arrays
    logits_NK, labels_N = torch.from_numpy(arrays["logits"]), torch.from_numpy(labels_of(digits.splits["val"]))
    assert metrics["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits_NK, labels_N).item(), rel=1e-5)


def test_progress_and_metrics_are_reported(digits, numpy_model, context, events) -> None:
    answer = eval_predict(PredictConfig(batch_size=100), context(model=("m",)), numpy_model, digits)
    steps = [event for event in events if isinstance(event, Progress)]
    assert (steps[-1].done, steps[-1].total, steps[-1].unit) == (400, 400, "samples")
    metrics = {event.name: event.value for event in events if isinstance(event, Metric)}
    assert metrics.pop("primary_metric") == "accuracy"
    assert metrics == {word: answer.metrics[word] for word in ("accuracy", "top5_accuracy", "loss")}


def test_what_a_split_lacks_for_a_metric_is_reported(digits, numpy_model, context, events, monkeypatch) -> None:
    monkeypatch.setattr(Classification, "undefined", lambda _, figures, split: [f"{split}: {figures['accuracy']:.0f}"])
    eval_predict(PredictConfig(split="val"), context(model=("m",)), numpy_model, digits)
    assert [event.text for event in events if isinstance(event, Notice)] == ["val: 1"]


def test_predictions_are_saved(digits, numpy_model, context, tmp_path) -> None:
    answer = eval_predict(PredictConfig(), context(model=("m",)), numpy_model, digits)
    (tmp_path / "kept").mkdir()
    answer.save(tmp_path / "kept")
    again = Predictions.load(tmp_path / "kept")
    assert again.arrays.keys() == answer.arrays.keys()
    assert all((again.arrays[name] == array).all() for name, array in answer.arrays.items())
    assert again.ids.tolist() == answer.ids.tolist()
    assert again.metrics == answer.metrics


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_batch_size_decides_how_many_at_once_and_nothing_else(
    digits, linear_model, weights, context, batch_size
) -> None:
    seen = []

    class Watched(linear_model):
        def predict(self, images_NCHW):
            seen.append(len(images_NCHW))
            return super().predict(images_NCHW)

    answer = eval_predict(PredictConfig(batch_size=batch_size), context(), Watched(*weights), digits)
    assert max(seen) == min(batch_size, 400) and sum(seen) == 400
    whole = eval_predict(PredictConfig(), context(), linear_model(*weights), digits)
    for name in ("num_samples", "accuracy", "top5_accuracy", "confusion", "per_class"):
        assert answer.metrics[name] == whole.metrics[name]
    assert answer.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-6)
    assert answer.arrays["prediction"].tolist() == whole.arrays["prediction"].tolist()


def test_threads_are_handed_on(digits, numpy_model, context) -> None:
    eval_predict(PredictConfig(), context(), numpy_model, digits)
    eval_predict(PredictConfig(num_threads=3), context(), numpy_model, digits)
    assert numpy_model.opened_with == [None, 3]


@pytest.mark.parametrize("num_classes", [9, 11])
def test_classes_must_be_as_many(digits, linear_model, weights, context, num_classes) -> None:
    other = linear_model(np.resize(weights[0], (num_classes, 64)), np.resize(weights[1], num_classes))
    with pytest.raises(
        StageError,
        match=rf"^net returns logits \(batch, {num_classes}\) .*; digits needs logits \(batch, 10\)",
    ):
        eval_predict(PredictConfig(), context(model=("net",)), other, digits)


def test_image_shapes_must_fit(digits, linear_model, weights, context) -> None:
    with pytest.raises(
        StageError, match=r"^net takes images \(batch, 1, 4, 16\) .*; digits needs images \(batch, 1, 8, 8\)"
    ):
        eval_predict(PredictConfig(), context(model=("net",)), linear_model(*weights, shape_CHW=(1, 4, 16)), digits)


@pytest.mark.parametrize("absent", [True, False])
def test_an_empty_split_is_refused(digits, numpy_model, context, absent) -> None:
    empty = image_split(
        np.array([], dtype=np.str_), np.zeros(0, np.int64), ArrayColumn(np.zeros((0, 8, 8, 1), np.uint8))
    )
    splits = {"train": digits.splits["train"]} | ({} if absent else {"test": empty})
    with pytest.raises(StageError, match="split test of digits is empty; splits with samples: train"):
        eval_predict(PredictConfig(), context(), numpy_model, Data(digits.info, splits))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_named(digits, linear_model, weights, context, poison) -> None:
    class Poisoned(linear_model):
        calls = 0

        def predict(self, images_NCHW):
            logits_NK = super().predict(images_NCHW)
            Poisoned.calls += 1
            if Poisoned.calls == 3:
                logits_NK[5, 2] = logits_NK[9, 1] = poison
            return logits_NK

    with pytest.raises(StageError, match=r"^net: the logits of sample test/00133 are not finite$"):
        eval_predict(PredictConfig(batch_size=64), context(model=("net",)), Poisoned(*weights), digits)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_metric_that_is_not_finite_is_named(digits, numpy_model, context, monkeypatch, value) -> None:
    """As a function of one's own may be: of a class that the split does not have, a recall is 0 / 0."""
    found = type(digits.info.task).figures
    poisoned = lambda *arguments: {**found(*arguments), "loss": float(value)}  # noqa: E731
    monkeypatch.setattr(type(digits.info.task), "figures", poisoned)
    with pytest.raises(
        StageError, match=rf"^net: the loss on split test of digits is {value}, which no gate could judge"
    ):
        eval_predict(PredictConfig(), context(model=("net",)), numpy_model, digits)


def test_a_fraction_that_is_a_percentage_is_named(digits, numpy_model, context, monkeypatch) -> None:
    """A drop of 0.01 would be a hundredth of a point, and reports would show 9,300 %."""
    found = type(digits.info.task).figures
    percent = lambda *arguments: {**found(*arguments), "accuracy": 93.0}  # noqa: E731
    monkeypatch.setattr(type(digits.info.task), "figures", percent)
    with pytest.raises(StageError, match=r"^net: the accuracy on split test of digits is 93, and a fraction lies betw"):
        eval_predict(PredictConfig(), context(model=("net",)), numpy_model, digits)


def test_a_plugins_task_is_checked_before_its_models_are_judged(digits, numpy_model, context) -> None:
    class Averaging(Classification):
        def sums(self, outputs, targets):
            return {name: of.double() / len(of) for name, of in super().sample_sums(outputs, targets).items()}

    task = Averaging(class_names=digits.info.task.class_names)
    other = Data(replace(digits.info, task=task), digits.splits)
    with pytest.raises(StageError, match=r"^Averaging\.sums\(\) "):
        eval_predict(PredictConfig(), context(model=("net",)), numpy_model, other)


@pytest.mark.parametrize("answer", [lambda x: x[:, :9], lambda x: x[:1], lambda x: x[0], lambda x: x[..., None]])
def test_logits_of_another_shape_are_refused(digits, linear_model, weights, context, answer) -> None:
    class Odd(linear_model):
        def predict(self, images_NCHW):
            return answer(super().predict(images_NCHW))

    with pytest.raises(StageError, match=r"net returned logits of shape .* for 64 samples, expected 64 x 10"):
        eval_predict(PredictConfig(), context(model=("net",)), Odd(*weights), digits)


class Parity(Deployable):
    """A network of tokens whose class is odd or even, without any weight."""

    format = "parity"
    size_bytes = 0

    def __init__(self, signature: Signature) -> None:
        self._signature = signature

    @property
    def signature(self) -> Signature:
        return self._signature

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        yield lambda inputs: {"logits": np.eye(2, dtype=np.float32)[inputs["tokens"] % 2]}

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path) -> Self:
        raise NotImplementedError


class TestRowsOfDifferentLengths:
    LENGTHS = (2, 1, 4, 3, 3, 6, 1)

    @classmethod
    def data(cls) -> Data:
        """Tokens 2, 3, 4, ... whose tags are odd or even, but the last one of each text, whose tag is wrong."""
        rows = [np.arange(2, 2 + length) for length in cls.LENGTHS]
        offsets_N = np.cumsum([0, *cls.LENGTHS])
        tags = [np.append(row[:-1] % 2, 1 - row[-1] % 2) for row in rows]
        inputs = {"tokens": RaggedColumn(np.concatenate(rows), offsets_N, 0)}
        targets = {"tags": RaggedColumn(np.concatenate(tags), offsets_N, -1)}
        split = Split(np.array([f"text/{number}" for number in range(len(rows))]), inputs, targets)
        tokens = TokensInfo(vocabulary_size=9, max_length=6)
        info = DatasetInfo("texts", {"tokens": tokens}, TokenClassification(class_names=("even", "odd")))
        return Data(info, {"test": split}, LoaderOptions(batch_size=2))

    @pytest.mark.parametrize("batch_size", [1, 2, 3, 6, 100])
    def test_predictions_end_in_minus_1(self, context, tmp_path, batch_size) -> None:
        data = self.data()
        answer = eval_predict(PredictConfig(batch_size=batch_size), context(), Parity(data.info.signature), data)
        expected = [[*(token % 2 for token in range(2, 2 + num)), *[-1] * (6 - num)] for num in self.LENGTHS]
        assert answer.arrays["prediction"].dtype == np.int64 and answer.arrays["prediction"].tolist() == expected
        assert answer.arrays["score"] == pytest.approx([(num - 1) / num for num in self.LENGTHS])
        assert answer.metrics["token_accuracy"] == pytest.approx(13 / 20)
        assert answer.ids.tolist() == data.splits["test"].ids.tolist()
        answer.save(tmp_path)
        assert Predictions.load(tmp_path).arrays["prediction"].tolist() == expected

    def test_an_output_of_another_length_is_named(self, context) -> None:
        data = self.data()

        class Shorter(Parity):
            @contextmanager
            def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
                with super().predictor(num_threads) as predict:
                    yield lambda inputs: {"logits": predict(inputs)["logits"][:, :-1]}

        with pytest.raises(StageError, match=r"returned logits of shape 2 x 1 x 2 for 2 samples, expected 2 x 2 x 2$"):
            eval_predict(PredictConfig(), context(), Shorter(data.info.signature), data)
