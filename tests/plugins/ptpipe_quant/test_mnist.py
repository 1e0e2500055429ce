"""The project's CNN on real images: int8 against fake quantization, accuracies, and sizes.

Thorough: test_stages.py shows the same on small digits, end_to_end/test_mnist.py on real ones.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from ptpipe import Context
from ptpipe_data import MnistConfig, load_mnist
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    DynamicConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    dynamic,
    prepare,
    prepare_qat,
)
from ptpipe_torch import Data, Model
from ptpipe_torch.runtime import torch_threads
from ptpipe_zoo import SmallCnnConfig, small_cnn

from . import layerwise
from .conftest import BACKENDS, accuracy, logits_of, train

HAS_MNIST = bool(os.environ.get("PTPIPE_DATA")) and (Path(os.environ["PTPIPE_DATA"]) / "mnist").is_dir()

pytestmark = [
    pytest.mark.mnist,
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(not HAS_MNIST, reason="PTPIPE_DATA names no folder that holds mnist/"),
]


def static_int8(model: Model, data: Data, context: Context, backend: str) -> Model:
    prepared = prepare(PrepareConfig(backend=backend), context, model)
    return convert(ConvertConfig(), context, calibrate(CalibrateConfig(), context, prepared, data).model)


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    return Context("int8", "quant.test", 7, tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def images(context) -> Data:
    whole = load_mnist(MnistConfig(batch_size=128), context)
    splits = dict(whole.splits)
    splits["train"] = splits["train"].subset(np.arange(10_000))
    splits["calibration"] = splits["train"].subset(np.arange(2_000))
    return Data(whole.info, splits, whole.loader)


@pytest.fixture(scope="module")
def cnn(images, context) -> Model:
    with torch_threads(1):
        model = small_cnn(SmallCnnConfig(), context, images)
        return train(train(model, images, lr=0.05), images, lr=0.01)


@pytest.fixture(scope="module")
def static_accuracy(cnn, images, context) -> float:
    return accuracy(logits_of(static_int8(cnn, images, context, BACKENDS[0]), images), images)


@pytest.mark.parametrize(
    ("batch_norm", "bf16"),
    [("fold", False), ("train", True), ("fold", True), ("train", False)],
)
def test_quantization_aware_training(cnn, images, context, static_accuracy, batch_norm, bf16) -> None:
    config = PrepareQatConfig(backend=BACKENDS[0], batch_norm=batch_norm, reduce_range="auto")
    with torch_threads(1):
        tuned = train(prepare_qat(config, context, cnn), images, lr=0.005, bf16=bf16)
    int8 = convert(ConvertConfig(), context, tuned)
    fake_NK, real_NK = logits_of(tuned, images), logits_of(int8, images)
    assert len(fake_NK) == 10_000
    assert (fake_NK.argmax(1) == real_NK.argmax(1)).mean() >= 0.999
    for batch in images.batches("test", batch_size=2500):
        for name, steps in layerwise.differences(int8, batch.inputs["images"]).items():
            assert steps.max() < 1.01, name
        difference_NK, bound_NK = layerwise.output_steps(int8, batch.inputs["images"])
        assert (difference_NK < bound_NK + 0.01).all()
        assert difference_NK.mean() < 0.5
    assert accuracy(real_NK, images) >= static_accuracy - 0.002


def test_every_method_keeps_the_accuracy_within_27_percent_of_the_size(cnn, images, context, static_accuracy) -> None:
    float_accuracy = accuracy(logits_of(cnn, images), images)
    assert float_accuracy > 0.96
    assert static_accuracy > float_accuracy - 0.003
    first_accuracy = accuracy(logits_of(cnn, images, 3000), images)
    for backend in BACKENDS:
        for model in (
            dynamic(DynamicConfig(backend=backend), context, cnn),
            static_int8(cnn, images, context, backend),
        ):
            assert accuracy(logits_of(model, images, 3000), images) > first_accuracy - 0.003
            assert model.size_bytes <= 0.27 * cnn.size_bytes


def test_building_is_quick(cnn, images, context) -> None:
    int8 = static_int8(cnn, images, context, BACKENDS[0])
    seconds = []
    for _ in range(5):
        begin = perf_counter()
        int8.build()
        seconds.append(perf_counter() - begin)
    assert min(seconds) < 0.3
