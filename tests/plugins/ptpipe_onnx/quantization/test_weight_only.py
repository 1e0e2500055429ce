"""quant.weight_only: 4 and 8 bits for weights. Shape legend: N samples, K inputs of a layer, M its outputs."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, TensorProto, helper, numpy_helper

from ptpipe import StageError
from ptpipe_onnx import quantize_onnx, quantize_weights
from ptpipe_onnx.quantization.config import WeightOnlyConfig
from ptpipe_onnx.quantization.weight_only import missing_quantizer
from ptpipe_torch import ArrayInfo, Data, OnnxFile, Regression, Split
from ptpipe_torch.data.column import ArrayColumn
from ptpipe_torch.data.dataset_info import DatasetInfo

pytestmark = pytest.mark.skipif(missing_quantizer() is not None, reason=str(missing_quantizer()))
Run = Callable[..., OnnxFile]
RNG = np.random.default_rng(5)
NUM_INPUTS = 96


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def quantized_matrix(weight_KM: np.ndarray, bits: int, block_size: int, symmetric: bool) -> np.ndarray:
    """The matrix that a MatMulNBits layer multiplies by, written down once more: round to nearest, by blocks of K."""
    found_KM = np.empty_like(weight_KM)
    for start in range(0, len(weight_KM), block_size):
        block = weight_KM[start : start + block_size]
        low, high = np.minimum(block.min(0), 0), np.maximum(block.max(0), 0)
        if symmetric:
            middle = 2 ** (bits - 1)
            scale = np.where(np.abs(low) > np.abs(high), low, high) / -middle
            integers = np.clip(np.round(block / scale) + middle, 0, 2**bits - 1) - middle
        else:
            scale = (high - low) / (2**bits - 1)
            zero = np.clip(np.round(-low / scale), 0, 2**bits - 1)
            integers = np.clip(np.round(block / scale + zero), 0, 2**bits - 1) - zero
        found_KM[start : start + block_size] = integers * scale
    return found_KM


def regression_data(num_outputs: int) -> Data:
    names = tuple(f"y{number}" for number in range(num_outputs))
    task = Regression(target_names=names, mean=(0.0,) * num_outputs, std=(1.0,) * num_outputs)
    info = DatasetInfo("numbers", {"x": ArrayInfo(dtype="float32", shape=(NUM_INPUTS,))}, task)
    splits = {
        name: Split(
            np.array([f"{name}/{number}" for number in range(40)]),
            {"x": ArrayColumn(normal(40, NUM_INPUTS))},
            {"targets": ArrayColumn(normal(40, num_outputs))},
        )
        for name in ("train", "test")
    }
    return Data(info, splits)


def file_of(path: Path, data: Data, nodes: list[Any], **weights: np.ndarray) -> OnnxFile:
    tensor = helper.make_tensor_value_info
    ends = [tensor("x", TensorProto.FLOAT, ["N", NUM_INPUTS]), tensor("predictions", TensorProto.FLOAT, ["N", 8])]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], stored)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return OnnxFile(path, data.info.signature)


@pytest.fixture(scope="module")
def numbers() -> Data:
    return regression_data(8)


def outputs(file: OnnxFile, data: Data) -> np.ndarray:
    (batch,) = data.batches("test", batch_size=64)
    with file.predictor(1) as predict:
        return predict(batch.input_arrays())["predictions"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("block_size", "symmetric"), [(16, False), (64, True)])
def test_a_layer_multiplies_by_its_rounded_weights(bits, block_size, symmetric, numbers, run_stage, tmp_path) -> None:
    """With a bias, a transposed weight, and a last block that is not full."""
    weight_KM, bias_M = normal(NUM_INPUTS, 8), normal(8)
    nodes = [helper.make_node("Gemm", ["x", "fc.weight", "fc.bias"], ["predictions"], transB=1)]
    file = file_of(tmp_path / "a.onnx", numbers, nodes, **{"fc.weight": weight_KM.T, "fc.bias": bias_M})
    found = run_stage(quantize_weights, file, numbers, bits=bits, block_size=block_size, symmetric=symmetric)
    (batch,) = numbers.batches("test", batch_size=64)
    x_NK = batch.input_arrays()["x"]
    expected = x_NK @ quantized_matrix(weight_KM, bits, block_size, symmetric) + bias_M
    np.testing.assert_allclose(outputs(found, numbers), expected, atol=2e-4 * np.abs(expected).max())
    assert np.abs(outputs(found, numbers) - outputs(file, numbers)).max() > 1e-4, "rounded"
    assert found.format == f"onnx {bits}-bit weights"


def test_the_text_transformer(transformer_file, words, run_stage: Run, events) -> None:
    sizes = []
    for bits, least_db in ((4, 20), (8, 40)):
        file = run_stage(quantize_weights, transformer_file, words, bits=bits, block_size=16)
        metrics = events.metrics
        assert metrics["top1_agreement"] >= 0.98 and metrics["sqnr_db"] > least_db
        assert metrics["num_quantized_layers"] == 13 and metrics["float_layers"] == []
        assert {"layers.0.query", "layers.1.feed_forward.2", "head.0"} <= set(metrics["quantized_layers"])
        assert (metrics["bits"], metrics["block_size"]) == (bits, 16)
        sizes.append(file.size_bytes)
    assert sizes[0] < sizes[1] < transformer_file.size_bytes


def test_the_attribute_and_the_shapes_are_those_of_the_options(transformer_file, words, run_stage: Run) -> None:
    file = run_stage(quantize_weights, transformer_file, words, block_size=16, accuracy_level=4, symmetric=True)
    nodes = [node for node in onnx.load(file.path).graph.node if node.op_type == "MatMulNBits"]
    options = [{own.name: own.i for own in node.attribute} for node in nodes]
    assert {(own["bits"], own["block_size"], own["accuracy_level"]) for own in options} == {(4, 16, 4)}
    assert {len(node.input) for node in nodes} == {3}, "no zero points"
    domains = {own.domain: own.version for own in onnx.load(file.path).opset_import}
    assert domains.keys() == {"", "com.microsoft"}


def test_skipped_layers_stay_float(transformer_file, words, run_stage: Run, events) -> None:
    run_stage(quantize_weights, transformer_file, words, block_size=16, skip=["layers.0.*", "head.0"])
    assert set(events.metrics["float_layers"]) == {"head.0"} | {
        f"layers.0.{name}" for name in ("query", "key", "value", "out", "feed_forward.0", "feed_forward.2")
    }
    assert events.metrics["num_quantized_layers"] == 6
    with pytest.raises(StageError, match=r"'layers\.2\.\*', which matches no node"):
        run_stage(quantize_weights, transformer_file, words, skip=["layers.2.*"])


def test_a_weight_of_two_layers_is_stored_once(numbers, run_stage: Run, tmp_path, events) -> None:
    weight = normal(NUM_INPUTS, NUM_INPUTS) / 10
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["c"]),
        helper.make_node("Gemm", ["c", "head"], ["predictions"]),
    ]
    file = file_of(tmp_path / "a.onnx", numbers, nodes, w=weight, head=normal(NUM_INPUTS, 8))
    found = run_stage(quantize_weights, file, numbers, bits=8)
    assert events.metrics["num_quantized_layers"] == 3 and events.metrics["sqnr_db"] > 35
    stored = onnx.load(found.path).graph.initializer
    assert sum(int(np.prod(own.dims)) for own in stored if own.data_type == TensorProto.UINT8) < 1.2 * weight.size


@pytest.mark.parametrize("transposed", [True, False])
def test_an_embedding_that_is_a_layer_too_is_stored_once(transposed, numbers, run_stage: Run, tmp_path, log) -> None:
    """ONNX Runtime stores the outcome of the Transpose that exporters write."""
    table = normal(200, NUM_INPUTS)
    nodes = [
        helper.make_node("ArgMax", ["x"], ["ids"], axis=1, keepdims=0),
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
        helper.make_node("Transpose", ["table"], ["table_KN"], perm=[1, 0]),
        helper.make_node("MatMul", ["embedded", "table_KN"], ["scores"], "tied"),
        helper.make_node("MatMul", ["scores", "head"], ["predictions"], "head"),
    ]
    weights = {"table": table, "head": normal(200, 8)}
    if not transposed:
        del nodes[2]
        weights["table_KN"] = np.ascontiguousarray(table.T)
    file = file_of(tmp_path / "a.onnx", numbers, nodes, **weights)
    found = run_stage(quantize_weights, file, numbers, bits=8)
    assert found.size_bytes < 4 * table.size + 4000 < file.size_bytes
    assert "tied stays float: its weight is also used otherwise" in log()


def test_a_file_that_is_no_smaller_is_reported(numbers, run_stage: Run, tmp_path, events) -> None:
    """One small layer, beside what any quantized file has."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("MatMul", ["y", "head"], ["predictions"]),
    ]
    file = file_of(tmp_path / "a.onnx", numbers, nodes, w=normal(NUM_INPUTS, 1), head=normal(1, 8))
    found = run_stage(quantize_weights, file, numbers, bits=8, block_size=64)
    assert found.size_bytes >= file.size_bytes
    assert any("is no smaller than the one that it was made of" in str(event) for event in events)


def test_what_would_not_become_smaller_stays_float(numbers, run_stage: Run, tmp_path, log) -> None:
    """Layers with few inputs, and a weight that a lookup reads too, by an index that comes from the input."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["index"], axis=1, keepdims=0),
        helper.make_node("Gather", ["table", "index"], ["row"]),
        helper.make_node("MatMul", ["row", "table"], ["a"]),
        helper.make_node("MatMul", ["a", "head"], ["predictions"]),
    ]
    arrays = {"table": normal(NUM_INPUTS, NUM_INPUTS) / 10, "head": normal(NUM_INPUTS, 8)}
    file = file_of(tmp_path / "a.onnx", numbers, nodes, **arrays)
    run_stage(quantize_weights, file, numbers, bits=8, block_size=16)
    assert "also used otherwise, as that of an embedding" in log()
    small = [
        helper.make_node("Slice", ["x", "zero", "ten", "one"], ["few"]),
        helper.make_node("MatMul", ["few", "w"], ["predictions"]),
    ]
    ends = {name: np.array([value]) for name, value in (("zero", 0), ("ten", 10), ("one", 1))}
    file = file_of(tmp_path / "b.onnx", numbers, small, w=normal(10, 8), **ends)
    with pytest.raises(
        StageError, match=r"no linear layer whose weights become smaller.*256 are no smaller than its 10"
    ):
        run_stage(quantize_weights, file, numbers, bits=8, block_size=256)


def test_a_quantized_file_is_refused(transformer_file, words, run_stage: Run) -> None:
    file = run_stage(quantize_weights, transformer_file, words, block_size=16)
    for stage in (quantize_weights, quantize_onnx):
        with pytest.raises(StageError, match="4-bit weights already; take the float one"):
            run_stage(stage, file, words)


def test_importing_the_quantizer_leaves_logging_alone(transformer_file, words, tmp_path) -> None:
    """In a process of its own: at import the quantizer configures the root logger, the first time alone."""
    code = f"""
import logging
from pathlib import Path
from ptpipe import Context
from ptpipe_onnx.quantization.tools import quantizer_tools
with quantizer_tools(Context("a", "a.b", 7, Path({str(tmp_path)!r})), "no"):
    import onnxruntime.quantization.matmul_nbits_quantizer
print(logging.getLogger().handlers, logging.getLogger().level)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"[] {logging.WARNING}\n"


def test_options_are_explained() -> None:
    assert all(field.description for field in WeightOnlyConfig.model_fields.values())


def test_branches_that_read_weights_of_the_graph_around(
    file_of: Callable[..., OnnxFile], digits: Data, run_stage: Run
) -> None:
    def branch(weight: str) -> GraphProto:
        output = helper.make_tensor_value_info(f"{weight}_sums", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("MatMul", ["x", weight], [output.name])], weight, [], [output])

    nodes = [
        helper.make_node("Flatten", ["images"], ["x"]),
        helper.make_node("ReduceMax", ["images"], ["largest"], keepdims=0),
        helper.make_node("Greater", ["largest", "zero"], ["condition"]),
        helper.make_node("If", ["condition"], ["chosen"], then_branch=branch("w"), else_branch=branch("w2")),
        helper.make_node("Gemm", ["x", "w3", "b"], ["other"]),
        helper.make_node("Add", ["chosen", "other"], ["logits"]),
    ]
    arrays = {name: normal(256, 10) for name in ("w", "w2", "w3")}
    arrays |= {"b": normal(10), "zero": np.array(0, np.float32)}
    quantized = run_stage(quantize_weights, file_of(nodes, arrays), digits)
    assert quantized.parity["sqnr_db"] > 15
