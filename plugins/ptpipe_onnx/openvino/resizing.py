"""Resizing inside a file, as OpenVINO computes it, and its comparison with ONNX Runtime's.

OpenVINO (2026.4) ignores ONNX's `antialias` and `exclude_outside`; its own mode `bilinear_pillow` has both. And it has
no float64: of a graph with that arithmetic, stored and read again, it computed sizes that were wrong, or absurd.

Shape legend: N samples, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError
from ptpipe_onnx.openvino.model import OpenVinoModel
from ptpipe_onnx.preprocessing import TRIED_SIZES
from ptpipe_torch import Data, OnnxFile, Predictor

Arrays = Mapping[str, npt.NDArray[Any]]
_NUM_SAMPLES = 8
_LEVELS = 2
"""Of 255, that the resized bytes may differ by: the weights' rounding differs."""


def use_pillows(runtime: Any, model: Any) -> bool:
    """Resize bytes as Pillow does, in the place of what OpenVINO reads from `add_resizing`; return whether any are.

    `runtime`: the module. `model`: its model, which is changed.
    """
    own = runtime.opset11
    found = [node for node in model.get_ordered_ops() if node.get_type_name() == "Interpolate" and _is_own(node)]
    for node in found:
        images, sizes, axes = node.input_values()
        _use_integers(own, images, sizes.get_node(), axes)
        zeros = [0] * len(images.get_partial_shape())
        resized = own.interpolate(
            images, sizes, "bilinear_pillow", "sizes", pads_begin=zeros, pads_end=zeros, axes=axes
        )
        node.output(0).replace(resized.output(0))
    model.validate_nodes_and_infer_types()
    return bool(found)


def _is_own(node: Any) -> bool:
    attributes, images = node.get_attributes(), node.input_value(0)
    is_antialiased = bool(attributes["antialias"]) and attributes["shape_calculation_mode"] == "sizes"
    return is_antialiased and images.get_element_type().get_type_name() == "u8"


def _use_integers(own: Any, images: Any, sizes: Any, axes: Any) -> None:
    """Compute `round(side * (shorter_side / min(sides)))`, halves to even, in integers; see `add_resizing`."""
    if sizes.get_type_name() != "Select":  # they are constant
        return
    rounded, shorter_side = sizes.input_value(2).get_node().input_values()
    two = own.constant(np.array([2], np.int64))
    sides = own.gather(own.shape_of(images, "i64"), axes, np.array(0))
    shortest = own.reduce_min(sides, np.array([0]), True)
    dividend = own.add(own.multiply(own.multiply(sides, shorter_side), two), shortest)
    divisor = own.multiply(shortest, two)
    nearest = own.divide(dividend, divisor)
    is_half = own.convert(own.equal(own.multiply(nearest, divisor), dividend), "i64")
    is_odd = own.subtract(nearest, own.multiply(own.divide(nearest, two), two))
    rounded.replace(own.subtract(nearest, own.multiply(is_half, is_odd)).output(0))


def check_sizes(ctx: Context, file: OnnxFile, model: OpenVinoModel, data: Data, split: str) -> None:
    """Compare on images of other sizes than the data set's. Raises StageError for more than rounding of their bytes."""
    order_N = np.arange(min(_NUM_SAMPLES, len(data.splits[split])))
    (batch,) = data.batches(split, order_N=order_N, batch_size=len(order_N), input_form=file.input_form)
    own = batch.input_arrays()
    with file.with_exact_sums().predictor() as expect, model.predictor() as predict:
        same = _differences(expect(own), predict(own))
        for by_height, by_width in TRIED_SIZES:
            given = {name: _scaled(file, name, array, by_height, by_width) for name, array in own.items()}
            expected = expect(given)
            allowed = _effect_of_levels(expect, given, expected)
            for name, found in _differences(expected, predict(given)).items():
                if not found <= 2 * (allowed[name] + same[name]):
                    sizes = " and ".join("x".join(map(str, array.shape)) for array in given.values())
                    raise StageError(
                        f"{ctx.kind}: for images that the file has to resize ({sizes}), {name} differs from ONNX "
                        f"Runtime's by {found:.4g}, where {2 * (allowed[name] + same[name]):.4g} is allowed: OpenVINO "
                        "resizes in another way. Resize before the model (export.onnx with `resize: false`)"
                    )


def _effect_of_levels(predict: Predictor, given: Arrays, expected: Arrays) -> dict[str, float]:
    """Return by how much outputs change where all bytes change by a few levels, in one direction or in any."""
    random, largest = np.random.default_rng(0), dict.fromkeys(expected, 0.0)
    for signs in (1, -1, None):
        changed = {}
        for name, array in given.items():
            change = _LEVELS * (random.choice((-1, 1), array.shape) if signs is None else signs)
            is_image = array.dtype == np.uint8
            changed[name] = (array.astype(np.int16) + change).clip(0, 255).astype(np.uint8) if is_image else array
        for name, difference in _differences(expected, predict(changed)).items():
            largest[name] = max(largest[name], difference)
    return largest


def _differences(first: Arrays, second: Arrays) -> dict[str, float]:
    return {
        name: float(np.abs(first[name].astype(np.float64) - second[name]).max())
        for name in first
        if first[name].dtype.kind == "f"
    }


def _scaled(file: OnnxFile, name: str, images: npt.NDArray[Any], by_height: float, by_width: float) -> npt.NDArray[Any]:
    """Return images of another size, each pixel repeated or left out; what is no image of any size, as it is."""
    (spec,) = (spec for spec in file.own_signature.inputs if spec.name == name)
    if images.dtype != np.uint8 or not spec.symbols:
        return images
    axes = (1, 2) if file.input_form == "nhwc" else (2, 3)
    for axis, factor in zip(axes, (by_height, by_width), strict=True):
        size = images.shape[axis]
        places = (np.arange(max(1, round(size * factor))) / factor).astype(np.int64).clip(0, size - 1)
        images = images.take(places, axis)
    return np.ascontiguousarray(images)
