"""Branches whose outputs are added: one convolution in float files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ptpipe_onnx import torch_exporter
from ptpipe_onnx.branches import merge_branches
from ptpipe_onnx.graph import remove_unused
from ptpipe_torch import BATCH, FunctionRef, Model, OnnxFile, Recipe, Signature, TensorSpec, builder

from ...branching import LEFT, MERGED, MIXED, SHAPE_CHW, Body, Branches, repvgg
from ...signatures import classifier
from .test_latency_passes import Run
from .test_qdq_passes import types_of

X = torch.randn(2, *SHAPE_CHW, generator=torch.Generator().manual_seed(0))


def exported(body: Body) -> tuple[ir.Model, np.ndarray]:
    """Return a network's graph, before branches are merged, and what the network computes from `X`."""
    torch.manual_seed(1)
    network = Branches(body).eval()
    with torch.no_grad():
        expected = network(X)
    inputs = TensorSpec("images", "float32", (BATCH, *SHAPE_CHW))
    signature = Signature((inputs,), (TensorSpec("outputs", "float32", (BATCH, *expected.shape[1:])),))
    return torch_exporter.optimize(torch_exporter.export(network, signature, 20)), expected.numpy()


def passed(model: ir.Model) -> onnx.ModelProto:
    merge_branches(model.graph)
    remove_unused(model)
    content = onnx.shape_inference.infer_shapes(ir.serde.serialize_model(model), strict_mode=True)
    onnx.checker.check_model(content, full_check=True)
    return content


def merged(body: Body, run_onnx: Run) -> Counter[str]:
    """Return the operators of a file, after a check that it is the same function."""
    return before_and_merged(body, run_onnx)[1]


def before_and_merged(body: Body, run_onnx: Run) -> tuple[Counter[str], Counter[str]]:
    """Return the operators before, too."""
    model, expected = exported(body)
    before = types_of(ir.serde.serialize_model(model))
    after = passed(model)
    np.testing.assert_allclose(run_onnx(after.SerializeToString(), X.numpy()), expected, rtol=1e-4, atol=1e-5)
    assert [output.name for output in after.graph.output] == ["outputs"]
    return before, types_of(after)


@pytest.mark.parametrize("name", MERGED)
def test_branches_are_one_convolution(name: str, run_onnx: Run) -> None:
    types = merged(MERGED[name][0], run_onnx)
    assert types["Add"] + types["Sub"] + types["BatchNormalization"] == 0
    assert types["Conv"] == len(MERGED[name][1])


@pytest.mark.parametrize("name", MIXED)
def test_dense_kernels_of_several_sizes_stay(name: str, run_onnx: Run) -> None:
    types = merged(MIXED[name][0], run_onnx)
    assert types["Add"] + types["Sub"] > 0


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_branch_stays(name: str, run_onnx: Run) -> None:
    before, after = before_and_merged(LEFT[name], run_onnx)
    assert after == before


def test_weights_keep_the_name_of_the_branch_that_is_left() -> None:
    after = passed(exported(repvgg)[0])
    read = {name for node in after.graph.node for name in node.input} - {"images"}
    assert any(name.startswith("large.weight") for name in read)
    assert len(read) == 2


def test_weights_that_another_layer_reads_stay(run_onnx: Run) -> None:
    types = merged(lambda n, x: n.pixel(n.large(x) + n.norm(x)) + n.large(n.pixel(x).relu()), run_onnx)
    assert (types["Add"], types["Conv"]) == (1, 4)


@builder
def with_branches() -> nn.Module:
    bodies = repvgg, MERGED["MobileOne, pointwise"][0]
    return nn.Sequential(nn.Conv2d(1, 4, 1), *map(Branches, bodies), nn.Flatten(), nn.Linear(4 * 256, 10))


def test_the_file_of_a_float_model(run_export: Callable[..., OnnxFile]) -> None:
    recipe = Recipe(FunctionRef.to(with_branches), classifier((1, 16, 16), 10))
    file = run_export(Model.from_module(recipe, with_branches().eval()))
    types = types_of(onnx.load(file.path))
    assert (types["Conv"], types["Add"], types["BatchNormalization"]) == (3, 0, 0)
