"""An exported model and torch's, on the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe.events import Event, Notice, Progress
from ptpipe_torch import (
    ArrayColumn,
    Data,
    FunctionRef,
    LoaderOptions,
    Model,
    Recipe,
    TokenClassification,
    builder,
)
from ptpipe_torch.model.deployable import Predictor
from ptpipe_torch.parity import comparison
from ptpipe_torch.parity.comparison import ComparedSamples, Exported, _report_noise, compare_outputs
from ptpipe_torch.parity.parity import Parity

from ....datasets import image_info, image_split
from ....signatures import classifier
from ....texts import network_of, text_data

NUM_SAMPLES = 70
SHAPE_CHW = (1, 4, 4)


@builder
def linear() -> nn.Module:
    """A linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


@pytest.fixture
def data() -> Data:
    rng = np.random.default_rng(1)
    pixels = ArrayColumn(rng.integers(0, 256, (NUM_SAMPLES, 4, 4, 1), dtype=np.uint8))
    split = image_split(np.arange(NUM_SAMPLES).astype(str), rng.integers(0, 3, NUM_SAMPLES), pixels)
    return Data(image_info("noise", "abc", SHAPE_CHW, (0.5,), (0.3,)), {"test": split}, LoaderOptions(8))


@pytest.fixture
def model() -> Model:
    return Model.from_module(Recipe(FunctionRef.to(linear), classifier(SHAPE_CHW, 3)), linear())


class Wrong(Model):
    """The model, whose file gives each sample's last logit too high."""

    is_open = False

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        with super().predictor(num_threads) as predict:
            type(self).is_open = True
            yield lambda inputs: {"logits": predict(inputs)["logits"] + np.float32([0, 0, 0.5])}
            type(self).is_open = False


def test_all_samples_are_compared_in_one_order(data: Data, model: Model, tmp_path: Path) -> None:
    events: list[Event] = []
    ctx = Context("onnx", "export.onnx", 3, tmp_path, _tell=events.append)
    exported = Exported(Wrong(model.recipe, model.tensors), "file")
    found = compare_outputs(ctx, exported, model, ComparedSamples(data, "test", 68, seed=3))
    figures = found["logits"].figures
    assert figures["num_samples"] == 68
    assert figures["max_abs_logit_difference"] == pytest.approx(0.5, rel=1e-5)
    assert figures["mean_abs_logit_difference"] == pytest.approx(0.5 / 3, rel=1e-5)
    done = [(event.done, event.total) for event in events if isinstance(event, Progress)]
    assert done[-1] == (2 * 68, 2 * 68)
    assert [count for count, _ in done] == sorted(count for count, _ in done)


@pytest.mark.parametrize("padded", [False, True])
def test_padding_is_no_prediction(tmp_path: Path, padded: bool) -> None:
    """Of short texts in a batch with a long one, most rows are of padding."""
    length = 12 if padded else "length"
    task = TokenClassification(class_names=tuple("abcde"), length=length)
    texts = text_data(task, num=(16, 40, 16), min_length=1, padded=padded)
    model = network_of("lstm", texts, Context("net", "model.text_lstm", 3, tmp_path))
    figures = {}
    for split in ("test", "calibration"):
        samples = ComparedSamples(texts, split, 40, seed=3)
        exported = Exported(OtherPadding(model.recipe, model.tensors), "file")
        found = compare_outputs(Context("onnx", "export.onnx", 3, tmp_path), exported, model, samples)["logits"]
        assert found.is_counted_N is not None
        lengths_N = texts.splits[split].inputs["tokens"].lengths
        assert lengths_N is not None and found.is_counted_N.sum() == lengths_N.sum() < len(found.exported_NK)
        figures[split] = found.figures["top1_agreement"]
    assert figures == {"test": 1, "calibration": 1}


class OtherPadding(Model):
    """The model, whose file gives other classes where there is padding."""

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        with super().predictor(num_threads) as predict:
            yield lambda inputs: {
                "logits": predict(inputs)["logits"] * np.where(inputs["tokens"] == 0, -1, 1)[..., None].astype("f4")
            }


def test_outputs_of_pictures_are_compared_on_fewer_samples(
    data: Data, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds those of several models: 512 pictures of 21 classes and 256 x 256 pixels took 23 GB."""
    monkeypatch.setattr(comparison, "_MAX_VALUES", 3 * 20 + 1)
    ctx = Context("onnx", "export.onnx", 3, tmp_path)
    exported = Exported(Wrong(model.recipe, model.tensors), "file")
    found = compare_outputs(ctx, exported, model, ComparedSamples(data, "test", 68, seed=3))
    assert found["logits"].figures["num_samples"] == len(found["logits"].exported_NK) == 20
    assert comparison.num_comparable({"map": np.zeros((2, 500))}) == 1  # one at least


def test_an_int8_output_of_mere_noise_is_reported(tmp_path: Path) -> None:
    events: list[Event] = []
    ctx = Context("onnx", "export.onnx", 3, tmp_path, _tell=events.append)
    float_NK = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    lost, kept = np.zeros_like(float_NK), float_NK + 0.01
    _report_noise(
        ctx,
        {
            "boxes": Parity(lost, lost, float_NK, are_class_scores=False, num_samples=10),
            "scores": Parity(kept, kept, float_NK, are_class_scores=False, num_samples=10),
            "float": Parity(lost, lost, are_class_scores=False, num_samples=10),
        },
    )
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice.startswith(
        "boxes: int8 leaves 0.0 dB of signal over noise, compared with the float network on 10 samp"
    )


@pytest.mark.parametrize(
    ("noise", "margin", "is_poor"), [(0.1, 0.0, False), (0.6, 0.0, True), (0.6, 9.0, False)], ids=str
)
def test_int8_classes_that_are_not_the_float_networks_are_reported(
    tmp_path: Path, noise: float, margin: float, is_poor: bool
) -> None:
    """Large noise does no harm where classes are far apart, and little of it decides between nearly equal ones."""
    events: list[Event] = []
    rng = np.random.default_rng(0)
    float_NK = rng.normal(size=(200, 5)).astype(np.float32)
    float_NK[np.arange(200), float_NK.argmax(1)] += margin
    int8_NK = float_NK + (1 + margin / 3) * noise * rng.normal(size=(200, 5)).astype(np.float32)
    ctx = Context("onnx", "export.onnx", 3, tmp_path, _tell=events.append)
    _report_noise(ctx, {"logits": Parity(int8_NK, int8_NK, float_NK, num_samples=200)})
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert len(texts) == is_poor
    for text in texts:
        assert "another class for" in text and text.endswith("keep layers float (`skip`), which quant.analyze finds")


def test_the_exported_model_is_closed_before_torchs_is_built(
    data: Data, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the memory of the weights at least once: together they held eight times the weights."""
    build, was_open = Model.build, []

    def watched(self: Model) -> nn.Module:
        was_open.append(Wrong.is_open)
        return build(self)

    monkeypatch.setattr(Model, "build", watched)
    exported = Exported(Wrong(model.recipe, model.tensors), "file")
    ctx = Context("onnx", "export.onnx", 3, tmp_path)
    compare_outputs(ctx, exported, model, ComparedSamples(data, "test", 10, seed=3))
    assert was_open == [False, False]
    assert torch.is_grad_enabled()
