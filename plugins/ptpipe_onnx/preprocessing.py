"""Normalization inside a file, which then takes raw values: bytes of images, numbers as a table has them.

Shape legend: B samples of a batch, C places of axis 1, which have a scale and an offset each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from ptpipe import StageError
from ptpipe_onnx.graph import add_initializer
from ptpipe_torch import RawForm
from ptpipe_torch.model.onnx_file import session_options

_IR_VERSION = 10


def add_preprocessing(graph: ir.Graph, forms: Mapping[str, RawForm]) -> None:
    """Make the graph take raw values. `forms`: of its inputs, which keep their names."""
    first = next(iter(graph))
    for position, former in enumerate(list(graph.inputs)):
        form = forms[str(former.name)]
        if not form.scale_C:
            continue
        raw = ir.Value(name=former.name, shape=ir.Shape(form.spec.shape), type=_type(form.spec.dtype))
        former.name = f"{raw.name}.normalized"
        graph.inputs[position] = raw
        former.replace_all_uses_with(_normalized(graph, first, raw, former, form), replace_graph_outputs=True)


def _normalized(graph: ir.Graph, before: ir.Node, raw: ir.Value, former: ir.Value, form: RawForm) -> ir.Value:
    """Insert the nodes that compute the normalized values, in front of a node."""
    assert former.shape is not None
    per_place = (len(form.scale_C), *(1 for _ in former.shape.dims[2:]))
    name, dtype = str(raw.name), np.dtype(form.dtype)
    scale, offset = (
        add_initializer(graph, f"{name}.{what}", np.array(values, dtype).reshape(per_place))
        for what, values in (("scale", form.scale_C), ("offset", form.offset_C))
    )
    value = raw

    def insert(op_type: str, *further: ir.Value, **attributes: Any) -> None:
        nonlocal value
        node = ir.node(op_type, [value, *further], attributes, name=f"{name}.{op_type}.{form.dtype}")
        graph.insert_before(before, node)
        value = node.outputs[0]

    if form.transpose:
        insert("Transpose", perm=form.transpose)  # of bytes: they are a quarter of the floats
    if form.spec.dtype != form.dtype:
        insert("Cast", to=_onnx_type(form.dtype))
    insert("Mul", scale)
    insert("Add", offset)
    if form.dtype != "float32":
        insert("Cast", to=ir.DataType.FLOAT)
    value.name, value.shape, value.type = former.name, former.shape, former.type
    return value


def check_preprocessing(
    forms: Mapping[str, RawForm],
    raw: Mapping[str, npt.NDArray[Any]],
    normalized: Mapping[str, npt.NDArray[Any]],
    opset: int,
) -> float:
    """Run the normalization alone, and return the largest difference from what the data set's own gives.

    Both round a product and a sum of equal constants, or only the sum where the processor fuses them: each rounding is
    of half a unit in the last place of the product or of the offset. Raises StageError for more than that.
    """
    largest = 0.0
    for name, form in forms.items():
        if not form.scale_C:
            continue
        found = _run(form, name, raw[name], normalized[name].shape, opset)
        sizes = [1] * found.ndim
        sizes[1] = -1
        scale, offset = (np.abs(np.array(of)).reshape(sizes) for of in (form.scale_C, form.offset_C))
        values = raw[name].transpose(form.transpose) if form.transpose else raw[name]
        rounding = 2 * float(np.finfo(form.dtype).eps) * (np.abs(values) * scale + offset)
        allowed = rounding + float(np.finfo(np.float32).eps) * np.abs(normalized[name])
        difference = np.abs(found.astype(np.float64) - normalized[name])
        if not (difference <= allowed).all():
            raise StageError(
                f"the preprocessing of {name} in the file differs from the data set's by {difference.max():.4g}, where "
                f"{allowed.max():.4g} is allowed (rounding): the column's raw_form has another normalization"
            )
        largest = max(largest, float(difference.max()))
    return largest


def _run(form: RawForm, name: str, raw: npt.NDArray[Any], shape: tuple[int, ...], opset: int) -> npt.NDArray[Any]:
    former = ir.Value(name=name, shape=ir.Shape(["batch", *shape[1:]]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Identity", [former])
    (output,) = node.outputs
    output.name, output.shape, output.type = "output", former.shape, former.type
    graph = ir.Graph([former], [output], nodes=[node], opset_imports={"": opset}, name="preprocessing")
    add_preprocessing(graph, {name: form})
    content = ir.serde.serialize_model(ir.Model(graph, ir_version=_IR_VERSION)).SerializeToString()
    session = ort.InferenceSession(content, session_options(1), providers=["CPUExecutionProvider"])
    found: npt.NDArray[Any] = session.run(None, {name: raw})[0]
    return found


def _onnx_type(dtype: str) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(dtype))


def _type(dtype: str) -> ir.TensorType:
    return ir.TensorType(_onnx_type(dtype))
