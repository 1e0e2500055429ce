"""Handwritten digits, and one linear classifier of them in three formats.

Shape legend: N samples, B of a batch, C channels, H height, W width, D = C*H*W, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from ptpipe import Context, NamedCode
from ptpipe.events import Event
from ptpipe.launching import load_vocabulary
from ptpipe_eval.graph.facts import Peaks
from ptpipe_torch import (
    ArrayColumn,
    Data,
    FunctionRef,
    LoaderOptions,
    Model,
    OnnxFile,
    Recipe,
)

from ...datasets import image_info, image_split
from ...forked_servers import LIBRARIES, ServerFork
from ...signatures import classifier

PLUGIN = Path(__file__).parent / "digit_models.py"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """The plugin, as a manifest that names it loads it."""
    (plugin,) = [own for own in load_vocabulary([str(PLUGIN)]).plugins if own.source == "manifest"]
    return plugin.module


@pytest.fixture(scope="session")
def linear_model(models: ModuleType) -> type[Any]:
    return models.LinearModel


@pytest.fixture(scope="session")
def digits() -> Data:
    """400 samples to test on, 200 to validate, the rest to fit."""
    bunch = load_digits()
    pixels_NHWC = (bunch.images * 15.9375).astype(np.uint8)[..., None]  # 0..16 to 0..255
    labels_N = bunch.target.astype(np.int64)
    parts = {"test": slice(0, 400), "val": slice(400, 600), "train": slice(600, None)}
    splits = {
        name: image_split(
            np.array([f"{name}/{i:05d}" for i in range(len(labels_N[part]))]),
            labels_N[part],
            ArrayColumn(np.ascontiguousarray(pixels_NHWC[part])),
        )
        for name, part in parts.items()
    }
    info = image_info("digits", NAMES, (1, 8, 8), (0.3,), (0.4,))
    return Data(info, splits, LoaderOptions(batch_size=64))


@pytest.fixture(scope="session")
def weights(digits: Data) -> tuple[np.ndarray, np.ndarray]:
    """Weights (K, D) and biases (K) that scikit-learn found."""
    (batch,) = digits.batches("train", batch_size=10_000)
    fitted = LogisticRegression(C=0.01, max_iter=200).fit(
        batch.inputs["images"].flatten(1).numpy(), batch.targets["labels"].numpy()
    )
    return fitted.coef_.astype(np.float32), fitted.intercept_.astype(np.float32)


@pytest.fixture
def pair(linear_model: type[Any], weights: tuple[np.ndarray, np.ndarray]) -> list[Any]:
    """A model, and one that never says three."""
    never_three = (np.arange(10) == 3).astype(np.float32) * 100
    return [linear_model(*weights), linear_model(weights[0], weights[1] - never_three)]


@pytest.fixture
def numpy_model(linear_model: type[Any], weights: tuple[np.ndarray, np.ndarray]) -> Any:
    return linear_model(*weights)


@pytest.fixture(scope="session")
def torch_model(models: ModuleType, weights: tuple[np.ndarray, np.ndarray]) -> Model:
    recipe = Recipe(FunctionRef.to(models.linear_net, inputs=64, classes=10), classifier((1, 8, 8), 10))
    return Model(recipe, {"1.weight": torch.from_numpy(weights[0]), "1.bias": torch.from_numpy(weights[1])})


@pytest.fixture(scope="session")
def onnx_model(weights: tuple[np.ndarray, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> OnnxFile:
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("Gemm", ["flat", "weights", "biases"], ["logits"], transB=1),
        ],
        "linear",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(weights[0], "weights"), numpy_helper.from_array(weights[1], "biases")],
    )
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return OnnxFile(path, classifier((1, 8, 8), 10))


@pytest.fixture(autouse=True)
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no peaks of this machine, and write none to the user's cache."""
    rates = {"float32": 1e13, "int8": 4e13}
    monkeypatch.setattr("ptpipe_eval.graph.companions.machine_peaks", lambda number: Peaks(number, rates, {}))


@pytest.fixture(scope="session")
def server_fork() -> Iterator[ServerFork]:
    fork = ServerFork.started()
    yield fork
    fork.end()


@pytest.fixture
def forked_servers(server_fork: ServerFork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that measure: see `forked_servers.py`."""
    monkeypatch.setattr("ptpipe_eval.latency.session._server", server_fork.server)
    monkeypatch.setattr("ptpipe_eval.latency.session._LIBRARIES", LIBRARIES)


@pytest.fixture
def events() -> list[Event]:
    """The events of the stage under test."""
    return []


@pytest.fixture
def context(tmp_path: Path, events: list[Event]) -> Callable[..., Context]:
    """A context for a stage whose ports are bound to these references."""

    def make(kind: str = "eval.compare", **sources: Any) -> Context:
        named: Mapping[str, tuple[str, ...]] = sources
        return Context("stage", kind, 7, tmp_path, named, events.append, code=NamedCode((str(PLUGIN),)))

    return make
