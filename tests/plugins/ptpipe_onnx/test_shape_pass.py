"""Computed shapes of Reshape become constants where the reshaped value decides them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ptpipe_onnx.graph import constant, nodes, remove_unused
from ptpipe_onnx.shape_pass import use_constant_shapes


def model_of(wanted: str, given: str = "batch, length, 6") -> ir.Model:
    """Reshape x to `wanted`: numbers; B and L, the sizes of `tokens`; B_L, their product; x_shape, all sizes of x."""
    parts = [part.strip() for part in wanted.split(",")]
    numbers = [
        f"c{index} = Constant<value_ints = [{part}]>()" for index, part in enumerate(parts) if part[-1].isdigit()
    ]
    names = [f"c{index}" if part[-1].isdigit() else part for index, part in enumerate(parts)]
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
        g (int64[batch, length] tokens, float[{given}] x) => (y) {{
            B = Shape<start = 0, end = 1>(tokens)
            L = Shape<start = 1, end = 2>(tokens)
            x_shape = Shape(x)
            B_L = Mul(B, L)
            {"; ".join(numbers).replace("; ", chr(10))}
            shape = Concat<axis = 0>({", ".join(names)})
            y = Reshape<allowzero = 1>(x, shape)
        }}"""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    return ir.serde.deserialize_model(model)


def constant_shape(model: ir.Model) -> list[int] | None:
    (reshape,) = nodes(model.graph, "Reshape")
    found = constant(reshape.inputs[1])
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        ("B, L, 2, 3", [0, 0, 2, 3]),
        ("B, L, 2, -1", [0, 0, 2, -1]),
        ("B, 24", [0, 24]),
        ("B_L, 6", [-1, 6]),
        ("L, B, 6", None),  # each is the size of another axis
        ("B_L, -1", None),
        ("x_shape, 1", [0, 0, 6, 1]),
        ("1, x_shape", None),  # no size is at its place
    ],
)
def test_shapes(wanted: str, shape: list[int] | None) -> None:
    model = model_of(wanted)
    before = result(model)
    use_constant_shapes(model.graph)
    assert constant_shape(model) == shape
    remove_unused(model)
    assert (shape is None) == bool(nodes(model.graph, "Shape"))
    np.testing.assert_array_equal(result(model), before)


def result(model: ir.Model) -> np.ndarray:
    content = ir.serde.serialize_model(model).SerializeToString()
    tokens, x = np.zeros((3, 4), np.int64), np.arange(72, dtype=np.float32).reshape(3, 4, 6)
    (y,) = ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, {"tokens": tokens, "x": x})
    return y


@pytest.mark.parametrize("given", ["N, length, 6", "batch, M, 6", "length, batch, 6"])
def test_a_size_with_another_name_is_not_taken_for_the_same(given: str) -> None:
    model = model_of("B, L, 2, 3", given)
    use_constant_shapes(model.graph)
    assert constant_shape(model) in (None, [-1, 0, 2, 3], [0, -1, 2, 3])


def test_a_size_of_zero_is_none_to_copy() -> None:
    model = model_of("B, 0, 5")
    use_constant_shapes(model.graph)
    assert constant_shape(model) is None
