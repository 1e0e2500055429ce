"""Integer inputs of somebody's ONNX file, of another width than the data set's: TensorFlow's ids are int32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from ptpipe_torch.model.signature import TensorSpec

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def cast_integers(
    graph: GraphProto,
    pairs: Iterable[tuple[ValueInfoProto, TensorSpec]],
    rename: Callable[[dict[str, str]], None],
) -> list[str]:
    """Let inputs take the data set's integers and cast them, in place; return what to say of each.

    `pairs`: the graph's inputs, and what the data set feeds them. `rename`: renames tensors of the graph.
    """
    cast = []
    for value, spec in pairs:
        own, needed = value.type.tensor_type.elem_type, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        if own == needed or own not in _INTEGERS or needed not in _INTEGERS:
            continue
        name, inside = value.name, f"{value.name}_{_shown(own)}"
        rename({name: inside})
        value.name, value.type.tensor_type.elem_type = name, needed
        cast.append(f"{name} as {_shown(own)}: the run's copy takes the data set's {spec.dtype}, and casts it")
        graph.node.insert(0, helper.make_node("Cast", [name], [inside], f"{inside}_cast", to=own))
    return cast


def _shown(type_: int) -> str:
    name: str = TensorProto.DataType.Name(type_)
    return name.lower()
