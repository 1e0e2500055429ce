"""A run that compared models, and ONNX files that ptpipe never made. Nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from ptpipe import RunResult, load_plan, run
from ptpipe_eval.comparing.command import compare

NET = """
import torch

def make_net(inputs: int):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, 10))
"""
MANIFEST = """
version: 1
name: {name}
seed: 3
stages:
  digits:  {{uses: data.digits}}
  net:     {{uses: model.mlp, needs: {{data: digits}}, with: {{hidden: [{hidden}]}}}}
  dynamic: {{uses: quant.dynamic, needs: {{model: net}}, with: {{backend: fbgemm}}}}
  own:
    uses: model.python
    needs: {{data: digits}}
    with: {{file: {file}, function: make_net, arguments: {{inputs: 64}}}}
  table:
    uses: eval.compare
    needs: {{models: [dynamic, net, own], data: digits}}
    with: {{baseline: net, batch_sizes: []}}
  gate:    {{uses: gate.size, needs: {{comparison: table}}, with: {{candidate: dynamic, max_ratio: 0.9}}}}
"""


class Place(NamedTuple):
    """A folder with two manifests and a run of each."""

    folder: Path
    artifacts: Path
    manifest: Path
    first: RunResult
    second: RunResult


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("compare")
    (folder / "mine.py").write_text(NET)
    manifest = folder / "digits.yaml"
    results = []
    for hidden in (16, 24):
        manifest.write_text(MANIFEST.format(name="digits", hidden=hidden, file=folder / "mine.py"))
        results.append(run(load_plan(manifest), artifacts=folder / "artifacts"))
        assert results[-1].exit_code == 0
    return Place(folder, folder / "artifacts", manifest, *results)


class Ended(NamedTuple):
    code: int
    out: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def call(place: Place) -> Callable[..., Ended]:
    """`ptpipe compare` with these arguments, in this process."""

    def call(*arguments: object) -> Ended:
        words = [*map(str, arguments), "--artifacts", str(place.artifacts)]
        result = CliRunner().invoke(compare, words, catch_exceptions=False, standalone_mode=False)
        return Ended(result.return_value or 0, result.stdout)

    return call


def write_linear(path: Path, batch: Any, classes: int = 10, name: str = "x", dtype: int = TensorProto.FLOAT) -> Path:
    """A linear classifier of 8x8 digits with tensor names of its own."""
    weights_KD = np.random.default_rng(classes).normal(size=(classes, 64)).astype(np.float32)
    nodes = [
        helper.make_node("Flatten", [name], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["scores"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info(name, dtype, [batch, 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, classes])],
        [numpy_helper.from_array(weights_KD, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
