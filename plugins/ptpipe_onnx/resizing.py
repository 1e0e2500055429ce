"""Resizing inside a file, which then takes images of any height and width.

Shape legend: H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ptpipe import StageError
from ptpipe_onnx.graph import add_initializer, insert_node
from ptpipe_torch import Data, RawForm, Signature


def image_axes(form: RawForm) -> tuple[int, int]:
    """Return the axes of height and width of an image's raw form."""
    return (1, 2) if form.transpose else (2, 3)


def of_any_size(data: Data, forms: Mapping[str, RawForm]) -> dict[str, RawForm]:
    """Return raw forms that take images of any height and width. Raises StageError where no image can be resized."""
    if not any(form.resizing for form in forms.values()):
        raise StageError(
            f"resize: {data.info.name} does not say how images are resized, as data.image_folder, data.shards and "
            "data.segmentation_folder with image_size do: leave resize out"
        )
    return {name: _of_any_size(name, form) if form.resizing else form for name, form in forms.items()}


def _of_any_size(name: str, form: RawForm) -> RawForm:
    symbols = dict(zip(image_axes(form), (f"{name}_height", f"{name}_width"), strict=True))
    shape = tuple(symbols.get(axis, size) for axis, size in enumerate(form.spec.shape))
    return replace(form, spec=replace(form.spec, shape=shape))


def add_resizing(graph: ir.Graph, before: ir.Node, raw: ir.Value, form: RawForm, size_HW: tuple[int, int]) -> ir.Value:
    """Insert the nodes that resize, in front of a node, and return the images of the data set's size.

    Images that have it are taken as they are: stages feed the file with what they feed all others. Else as
    `ptpipe_torch.Resizing`, with sizes in float64 as in Python.
    """
    assert form.resizing is not None
    shorter_side, axes = form.resizing.shorter_side, image_axes(form)

    def constant(what: str, *values: float, dtype: str = "int64") -> ir.Value:
        return add_initializer(graph, f"{raw.name}.{what}", np.array(values, dtype))

    def insert(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return insert_node(before, op_type, inputs, **attributes).outputs[0]

    def resize(sizes: ir.Value) -> ir.Value:
        # Weights of places outside the image go to those inside, as in Pillow.
        return insert("Resize", raw, None, None, sizes, mode="linear", antialias=1, exclude_outside=1, axes=axes)

    size = constant("size", *size_HW)
    if shorter_side is None:
        result = resize(size)
    else:
        own_size = insert("Shape", raw, start=axes[0], end=axes[1] + 1)
        resized_size = _resized_size(insert, constant, own_size, size, shorter_side)
        start = insert("Div", insert("Sub", resized_size, size), constant("two", 2))
        end = insert("Add", start, size)
        result = insert("Slice", resize(resized_size), start, end, constant("axes", *axes))
    assert raw.shape is not None
    result.shape = ir.Shape([dict(zip(axes, size_HW, strict=True)).get(axis, of) for axis, of in enumerate(raw.shape)])
    result.type = raw.type
    return result


def _resized_size(
    insert: Callable[..., ir.Value],
    constant: Callable[..., ir.Value],
    own_size: ir.Value,
    size: ir.Value,
    shorter_side: int,
) -> ir.Value:
    """Insert the computation of height and width before the crop, int64 (2,)."""
    sides = insert("Cast", own_size, to=ir.DataType.DOUBLE)
    scale = insert("Div", constant("shorter_side", shorter_side, dtype="float64"), insert("ReduceMin", sides))
    scaled = insert("Cast", insert("Round", insert("Mul", sides, scale)), to=ir.DataType.INT64)
    scaled = insert("Max", scaled, constant("smallest", shorter_side))
    num_equal = insert("ReduceSum", insert("Cast", insert("Equal", own_size, size), to=ir.DataType.INT64))
    return insert("Where", insert("Equal", num_equal, constant("both", 2)), size, scaled)


def described(signature: Signature, forms: Mapping[str, RawForm]) -> str:
    """Return how images are resized, in words. `signature`: of the network, with normalized inputs."""
    words = []
    for spec in signature.inputs:
        resizing = forms[spec.name].resizing if forms else None
        if resizing is not None:
            height, width = (int(size) for size in spec.shape[2:4])
            words.append(f"{spec.name}: {resizing.describe((height, width))}")
    return "; ".join(words)
