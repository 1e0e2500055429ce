"""Files that also return tensors of their own graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from onnxscript import ir

from ptpipe import StageError
from ptpipe_onnx import torch_exporter
from ptpipe_onnx.probes import RankedFile, rankings_named, rankings_of, write_probe
from ptpipe_torch import BATCH, OnnxFile, Signature, TensorSpec
from ptpipe_torch.parity.rankings import RankedTensors

X = np.array([[3, -1, 2], [-5, 4, 1]], np.float32)


def file_of(path: Path, outputs: Sequence[str], *, ranks: bool = True) -> OnnxFile:
    """A file of the absolute values of `x`, and the two highest of them."""
    nodes = [helper.make_node("Abs", ["x"], ["absolute"])]
    if ranks:
        nodes.append(helper.make_node("TopK", ["absolute", "k"], ["highest", "places"], axis=1))
    sizes = {"absolute": 3, "highest": 2}
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", sizes[name]]) for name in outputs]
    k = helper.make_tensor("k", TensorProto.INT64, [1], [2])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    model = helper.make_model(
        helper.make_graph(nodes, "ranking", [x], types, [k]), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    onnx.save(model, path)
    specs = [TensorSpec(name, "float32", (BATCH, sizes[name])) for name in outputs]
    return OnnxFile(path, Signature((TensorSpec("x", "float32", (BATCH, 3)),), tuple(specs)))


def test_a_probe_returns_further_tensors_behind_the_outputs(tmp_path: Path) -> None:
    file = file_of(tmp_path / "file.onnx", ["highest"])
    write_probe(file.path, ["absolute", "places"], tmp_path / "probe.onnx")
    session = ort.InferenceSession(str(tmp_path / "probe.onnx"), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["highest", "absolute", "places"]
    highest, absolute, places = session.run(None, {"x": X})
    assert (absolute == np.abs(X)).all()
    assert (highest == [[3, 2], [5, 4]]).all() and (places == [[0, 2], [0, 1]]).all()


@pytest.mark.parametrize("outputs", [["absolute"], ["highest"], ["highest", "absolute"]])
def test_predictors_return_what_is_ranked(outputs: list[str], tmp_path: Path) -> None:
    file = file_of(tmp_path / "file.onnx", outputs)
    rankings = rankings_of(file.path)
    assert rankings == [RankedTensors("highest", "places", 1)]
    with RankedFile.of(file, rankings, tmp_path / "probe.onnx").predictor() as predict:
        found = predict({"x": X})
    assert found.keys() == {*outputs, "highest", "places"}
    assert (found["places"] == [[0, 2], [0, 1]]).all()


def test_an_error_of_a_file_that_ranks_says_so(tmp_path: Path) -> None:
    ranking, other = (file_of(tmp_path / f"{ranks}.onnx", ["absolute"], ranks=ranks) for ranks in (True, False))
    with pytest.raises(StageError, match=r"^they differ\. The network ranks values"), rankings_named(ranking.path):
        raise StageError("they differ")
    with pytest.raises(StageError, match=r"^they differ$"), rankings_named(other.path):
        raise StageError("they differ")


class Neighbors(torch.nn.Module):
    """The nearest points of each of 32, as networks of point clouds look them up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, x).topk(4, largest=False).values


def test_of_distances_the_error_says_how_to_make_them_exact(tmp_path: Path) -> None:
    """Each point is at 0 from itself, which products of coordinates miss: torch and the file rank other values."""
    signature = Signature((TensorSpec("x", "float32", (BATCH, 32, 3)),), (TensorSpec("y", "float32", (BATCH, 32, 4)),))
    exported = ir.to_proto(torch_exporter.optimize(torch_exporter.export(Neighbors().eval(), signature, 18)))
    (tmp_path / "points.onnx").write_bytes(exported.SerializeToString())
    message = r'rank it outside of the network\. torch\.cdist .* call it with compute_mode="donot_use_mm'
    with pytest.raises(StageError, match=message), rankings_named(tmp_path / "points.onnx"):
        raise StageError("they differ")
