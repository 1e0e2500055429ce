"""Shapes and dtypes of the tensors of an ONNX graph: by inference, and by running it once where that is not enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, shape_inference

from ptpipe_torch.model.onnx_file import session_options

_WEIGHTS_BYTES = 4096
"""Larger tensors are weights: none that a shape follows from."""


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a tensor."""

    dtype: str
    """As NumPy calls it; `unknown`."""
    shape: Sequence[int] | None
    """None: not known."""


def drop_weights(model: ModelProto) -> None:
    """Clear the values of large stored tensors, which inference of shapes would copy six times without a need."""
    for tensor in model.graph.initializer:
        if tensor.ByteSize() > _WEIGHTS_BYTES:
            for field, _ in tensor.ListFields():
                if field.name.endswith("_data"):
                    tensor.ClearField(field.name)


def infer_tensors(
    model: ModelProto,
    feed: Mapping[str, npt.NDArray[Any]],
    wanted: Collection[str],
    read_whole: Callable[[], ModelProto],
) -> dict[str, TensorFacts]:
    """Return the facts of the graph's tensors when it is fed with these inputs.

    `wanted`: tensors whose shapes are needed. Shapes that follow from values computed on the way are found by running
    the graph once, as they are for this input; where that fails they stay unknown. `read_whole` returns the model to
    run; in `model`, weights may have no values.
    """
    sized = ModelProto()
    sized.CopyFrom(model)
    _set_input_shapes(sized, feed)
    try:
        inferred = shape_inference.infer_shapes(sized, data_prop=True)
    except Exception:  # noqa: BLE001  # of inconsistent files, of larger ones than protobuf can hold
        inferred = sized
    graph = inferred.graph
    found = {value.name: _facts(value) for value in (*graph.value_info, *graph.input, *graph.output)}
    found |= {own.name: TensorFacts(_dtype(own.data_type), tuple(own.dims)) for own in graph.initializer}
    makers = {name for node in model.graph.node for name in node.output}
    missing = [name for name in wanted if name in makers and (name not in found or found[name].shape is None)]
    return found | _measured(read_whole(), feed, missing) if missing else found


def _set_input_shapes(model: ModelProto, feed: Mapping[str, npt.NDArray[Any]]) -> None:
    """Give the inputs these shapes; other shapes are to be found."""
    for value in model.graph.input:
        if value.name in feed:
            shape = value.type.tensor_type.shape
            del shape.dim[:]
            for size in feed[value.name].shape:
                shape.dim.add().dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]


def _measured(model: ModelProto, feed: Mapping[str, npt.NDArray[Any]], wanted: Sequence[str]) -> dict[str, TensorFacts]:
    """Run the graph, which is consumed, with these tensors as outputs."""
    from ptpipe_torch.ort import ort

    _set_input_shapes(model, feed)
    del model.graph.output[:]
    model.graph.output.extend(ValueInfoProto(name=name) for name in wanted)
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        arrays = session.run(wanted, {value.name: feed[value.name] for value in session.get_inputs()})
    except Exception:  # noqa: BLE001  # ONNX Runtime's have no common base class; what is unknown stays so
        return {}
    return {name: TensorFacts(str(array.dtype), array.shape) for name, array in zip(wanted, arrays, strict=True)}


def _facts(value: ValueInfoProto) -> TensorFacts:
    tensor = value.type.tensor_type
    sizes = [axis.dim_value if axis.HasField("dim_value") else None for axis in tensor.shape.dim]
    known = tensor.HasField("shape") and None not in sizes
    return TensorFacts(_dtype(tensor.elem_type), tuple(size for size in sizes if size is not None) if known else None)


def _dtype(elem_type: int) -> str:
    if elem_type == TensorProto.UNDEFINED:
        return "unknown"
    return str(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
