"""What the exporter of torch can't translate, written otherwise before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn

from ptpipe_onnx import torch_exporter
from ptpipe_torch import BATCH, Signature, TensorSpec


class Mask(nn.Module):
    """Subtracts integers from a float, as masks are inverted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 - (x > 0).long()) + (2 - (x > 1).long())


def test_integers_that_are_subtracted_from_a_float(run_onnx: Callable[..., np.ndarray]) -> None:
    signature = Signature((TensorSpec("x", "float32", (BATCH, 3)),), (TensorSpec("y", "float32", (BATCH, 3)),))
    model = torch_exporter.optimize(torch_exporter.export(Mask().eval(), signature, 18))
    x = np.float32([[-1, 0, 3], [1, 2, -3]])
    found = run_onnx(ir.to_proto(model).SerializeToString(), x)
    np.testing.assert_array_equal(found, Mask()(torch.from_numpy(x)).numpy())


class Repeated(nn.Module):
    """Returns a tensor twice, its inputs, one of them twice, and what differs from them by operators without effect."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        y = (a + b).relu()
        return {"first": b, "y": y, "again": y, "b_again": b, "same": a * 1, "a_itself": a, "third": y}


def test_outputs_that_are_inputs_or_other_outputs() -> None:
    names = ("y", "again", "third", "first", "b_again", "same", "a_itself")  # in another order than they are returned
    inputs, outputs = (tuple(TensorSpec(own, "float32", (BATCH, 3)) for own in of) for of in (("a", "b"), names))
    model = torch_exporter.optimize(torch_exporter.export(Repeated().eval(), Signature(inputs, outputs), 18))
    serialized = ir.to_proto(model).SerializeToString()
    onnx.checker.check_model(serialized, full_check=True)
    session = onnxruntime.InferenceSession(serialized, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["a", "b"]
    a, b = np.float32([[1, -2, 3]]), np.float32([[-4, 1, 1]])
    found = dict(zip(names, session.run(list(names), {"a": a, "b": b}), strict=True))
    for name, expected in Repeated()(torch.from_numpy(a), torch.from_numpy(b)).items():
        np.testing.assert_array_equal(found[name], expected.numpy())
    assert sum(node.op_type != "Identity" for node in model.graph) == 2
