"""Preprocessing inside a file, which then takes raw values: bytes of images, numbers as a table has them.

Shape legend: B samples of a batch, C places of axis 1, which have a scale and an offset each, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from PIL import Image

from ptpipe import StageError
from ptpipe_onnx.graph import add_initializer, consumers, insert_node
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.resizing import add_resizing, image_axes
from ptpipe_torch import RawForm
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

_IR_VERSION = 10
_MAX_RESIZING_DIFFERENCE = 2
"""In levels of 255. ONNX Runtime rounds to bytes after either axis as Pillow does, but computes weights in float32: of
1,500 random images and sizes, 26 had a byte that differed by 2, none by more."""
_MAX_ROUNDING = 0.45
"""Distance of a value from its byte, in bytes. It is rounded to another from 0.5 on."""
TRIED_SIZES = ((2.3, 1.7), (1.3, 2.9), (0.6, 0.8), (0.5, 1.1))
"""Of images to compare the resizing on: height and width as multiples of the data set's."""


def add_preprocessing(graph: ir.Graph, forms: Mapping[str, RawForm]) -> None:
    """Make the graph take raw values. `forms`: of its inputs, which keep their names.

    Bytes that normalization and the rounding of the first layer turn into themselves are taken as they are: those of
    images that are scaled to [0, 1], or have one channel, where the calibration has seen black and white.
    """
    first = next(iter(graph))
    for position, former in enumerate(list(graph.inputs)):
        form = forms[str(former.name)]
        if not form.scale_C:
            continue
        raw = ir.Value(name=former.name, shape=ir.Shape(form.spec.shape), type=_type(form.spec.dtype))
        former.name = f"{raw.name}.normalized"
        graph.inputs[position] = raw
        readers, insertion = consumers(former), _Insertion(graph, first, raw, former, form)
        if not former.is_graph_output() and all(_rounds_to_itself(reader, form) for reader in readers):
            integers = insertion.transposed()
            for quantize in readers:
                quantize.outputs[0].replace_all_uses_with(integers)
                graph.remove(quantize, safe=True)
        else:
            former.replace_all_uses_with(insertion.normalized(), replace_graph_outputs=True)


def _rounds_to_itself(reader: ir.Node, form: RawForm) -> bool:
    """Return whether an operator rounds each normalized byte to that byte, whatever a processor rounds before."""
    grid = Grid.of(reader) if reader.op_type == "QuantizeLinear" else None
    if grid is None or form.spec.dtype != "uint8" or grid.limits != (0, 255) or reader.outputs[0].is_graph_output():
        return False
    levels = np.arange(256.0)
    scale_C, offset_C = (np.array(values).reshape(-1, 1) for values in (form.scale_C, form.offset_C))
    steps = (levels * scale_C + offset_C) / float(grid.scale) + float(grid.zero_point)
    return bool((np.abs(steps - levels) < _MAX_ROUNDING).all())


class _Insertion:
    """Inserts the nodes that compute normalized values, in front of a node.

    Between two Reshapes ONNX Runtime (1.32) transposes images first and normalizes channel after channel: 0.3 ms, up to
    the first int8 convolution, of 224 x 224. Without, it transposes last, and normalizes 3 values at a time: 1.4 ms.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node, raw: ir.Value, former: ir.Value, form: RawForm) -> None:
        assert former.shape is not None
        self._graph, self._before, self._former, self._form = graph, before, former, form
        self._name = str(raw.name)
        self._dims = former.shape.dims[2:]
        self._merges = bool(form.transpose)
        self._raw = raw
        self._value = raw if form.resizing is None else add_resizing(graph, before, raw, form, _size(former))

    def normalized(self) -> ir.Value:
        """Return the normalized values."""
        form, former = self._form, self._former
        num_places = len(form.scale_C)
        per_place = (num_places, 1) if self._merges else (num_places, *(1 for _ in self._dims))
        self._transpose()
        if form.spec.dtype != form.dtype:
            self._insert("Cast", to=_onnx_type(form.dtype))
        self._insert("Mul", self._constant("scale", form.scale_C, form.dtype, *per_place))
        self._insert("Add", self._constant("offset", form.offset_C, form.dtype, *per_place))
        self._separate_axes()
        if form.dtype != "float32":
            self._insert("Cast", suffix="float32", to=ir.DataType.FLOAT)
        value = self._value
        value.name, value.shape, value.type = former.name, former.shape, former.type
        return value

    def transposed(self) -> ir.Value:
        """Return the raw values in the order of the normalized ones."""
        self._transpose()
        self._separate_axes()
        return self._value

    def _transpose(self) -> None:
        if self._merges and len(self._form.scale_C) > 1:
            self._insert("Reshape", self._constant("positions", (0, -1, len(self._form.scale_C)), np.int64, -1))
            self._insert("Transpose", perm=(0, 2, 1))

    def _separate_axes(self) -> None:
        if self._merges:
            self._insert("Reshape", self._sizes(), suffix="sizes")

    def _sizes(self) -> ir.Value:
        """Return the sizes of the normalized values: those of axes that may have any are read from the raw ones."""
        known, num_places = [size for size in self._dims if isinstance(size, int)], len(self._form.scale_C)
        if len(known) == len(self._dims):
            return self._constant("sizes", (0, num_places, *known), np.int64, -1)
        first, last = self._form.transpose[2], self._form.transpose[-1]
        rest = insert_node(self._before, "Shape", [self._raw], start=first, end=last + 1).outputs[0]
        return insert_node(
            self._before, "Concat", [self._constant("sizes", (0, num_places), np.int64, -1), rest], axis=0
        ).outputs[0]

    def _constant(self, what: str, values: Sequence[float], dtype: npt.DTypeLike, *shape: int) -> ir.Value:
        return add_initializer(self._graph, f"{self._name}.{what}", np.array(values, dtype).reshape(shape))

    def _insert(self, op_type: str, *further: ir.Value, suffix: str = "", **attributes: Any) -> None:
        name = f"{self._name}.{op_type}.{suffix or self._form.dtype}"
        node = ir.node(op_type, [self._value, *further], attributes, name=name)
        self._graph.insert_before(self._before, node)
        self._value = node.outputs[0]


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


def check_resizing(forms: Mapping[str, RawForm], raw: Mapping[str, npt.NDArray[Any]], opset: int) -> int:
    """Run the resizing alone, and return the largest difference from what the data set's own gives, in levels of 255.

    The images are samples of the data set, `raw`, made larger and smaller. Raises StageError for more than rounding.
    """
    largest = 0
    for name, form in forms.items():
        if form.resizing is None:
            continue
        height, width = (raw[name].shape[axis] for axis in image_axes(form))
        for sample, (by_height, by_width) in zip(cycle(raw[name]), TRIED_SIZES, strict=False):
            size = max(1, round(width * by_width)), max(1, round(height * by_height))
            image = _image(form, sample).resize(size, Image.Resampling.NEAREST)
            difference = _resizing_difference(form, name, image, (height, width), opset)
            if difference > _MAX_RESIZING_DIFFERENCE:
                raise StageError(
                    f"the resizing of {name} in the file differs from the data set's by {difference} of 255 levels, "
                    f"for an image of {size[1]} x {size[0]} (rounding: at most {_MAX_RESIZING_DIFFERENCE})"
                )
            largest = max(largest, difference)
    return largest


def _resizing_difference(form: RawForm, name: str, image: PILImage, size_HW: tuple[int, int], opset: int) -> int:
    assert form.resizing is not None
    expected_CHW, given_CHW = _bytes_of(form.resizing.fit(image, size_HW)), _bytes_of(image)
    given = given_CHW.transpose(1, 2, 0) if form.transpose else given_CHW
    num_channels = len(expected_CHW)
    without_normalization = replace(form, scale_C=(1.0,) * num_channels, offset_C=(0.0,) * num_channels)
    found = _run(without_normalization, name, np.ascontiguousarray(given)[np.newaxis], (1, *expected_CHW.shape), opset)
    return int(np.abs(found[0] - expected_CHW).max())


def _image(form: RawForm, sample: npt.NDArray[np.uint8]) -> PILImage:
    sample_HWC = sample if form.transpose else sample.transpose(1, 2, 0)
    return Image.fromarray(sample_HWC[:, :, 0] if sample_HWC.shape[2] == 1 else np.ascontiguousarray(sample_HWC))


def _bytes_of(image: PILImage) -> npt.NDArray[np.uint8]:
    bytes_HWC = np.asarray(image).reshape(image.height, image.width, -1)
    return bytes_HWC.transpose(2, 0, 1)


def _size(normalized: ir.Value) -> tuple[int, int]:
    assert normalized.shape is not None
    height, width = normalized.shape[2:4]
    assert isinstance(height, int)
    assert isinstance(width, int)
    return height, width


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
