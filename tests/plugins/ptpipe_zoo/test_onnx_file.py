"""`model.onnx`: files that other programs wrote. Shape legend: N samples, C channels, K classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe import ManifestError, StageError
from ptpipe.testing import Bench
from ptpipe_torch import Data, OnnxFile
from ptpipe_zoo import OnnxModelConfig, onnx_model

pytest_plugins = ["ptpipe.testing"]

WEIGHTS_KD = np.random.default_rng(3).normal(size=(5, 144)).astype(np.float32)


def value(name: str, *shape: Any, type_: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, type_, shape)


def linear(source: str = "x", result: str = "y") -> list[Any]:
    return [
        helper.make_node("Flatten", [source], ["flat"]),
        helper.make_node("Gemm", ["flat", "weights"], [result], transB=1),
    ]


def write(
    path: Path,
    nodes: list[Any] | None = None,
    inputs: list[Any] | None = None,
    outputs: list[Any] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
) -> Path:
    graph = helper.make_graph(
        nodes or linear(),
        "linear",
        inputs or [value("x", "N", 1, 12, 12)],
        outputs or [value("y", "N", 5)],
        [numpy_helper.from_array(WEIGHTS_KD, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    onnx.save(model, path)
    return path


@pytest.fixture
def load(bench: Bench, make_data: Any, tmp_path: Path) -> Any:
    def load(data: Any = None, **options: Any) -> OnnxFile:
        return bench.run(onnx_model, {"file": str(tmp_path / "a.onnx"), **options}, data=data or make_data())

    return load


def images_NCHW(num: int = 3) -> Any:
    return np.random.default_rng(4).normal(size=(num, 1, 12, 12)).astype(np.float32)


def assert_predicts(file: OnnxFile) -> None:
    with file.predictor(1) as predict:
        outputs = predict({"images": images_NCHW()})
    assert list(outputs) == ["logits"]
    np.testing.assert_allclose(outputs["logits"], images_NCHW().reshape(3, 144) @ WEIGHTS_KD.T, rtol=1e-4, atol=1e-5)


def test_the_only_input_and_output_are_the_data_sets(load: Any, bench: Bench, tmp_path: Path) -> None:
    write(tmp_path / "a.onnx")
    file = load()
    assert str(file.signature) == "images (batch, 1, 12, 12) float32 -> logits (batch, 5) float32"
    assert file.format == "onnx float32" and bench.metrics == {"num_parameters": 5 * 144}
    assert_predicts(file)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_file_for_one_batch_size_predicts_all(load: Any, bench: Bench, tmp_path: Path, size: int) -> None:
    write(tmp_path / "a.onnx", None, [value("x", size, 1, 12, 12)], [value("y", size, 5)])
    assert_predicts(load())
    assert bench.notices == [f"a.onnx takes batches of {size} alone: others are predicted in pieces of that size"]


def test_a_negative_size_is_any(load: Any, bench: Bench, tmp_path: Path) -> None:
    """Paddle writes -1."""
    write(tmp_path / "a.onnx", None, [value("x", -1, 1, 12, 12)], [value("y", -1, 5)])
    assert_predicts(load())
    assert bench.notices == []


def test_an_output_that_is_no_tensor_is_refused_with_the_remedy(load: Any, tmp_path: Path) -> None:
    """scikit-learn's probabilities are a sequence of maps, unless told otherwise."""
    outputs = [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)]
    write(
        tmp_path / "a.onnx", [*linear(result="z"), helper.make_node("SequenceConstruct", ["z"], ["y"])], None, outputs
    )
    with pytest.raises(StageError, match=r"^a\.onnx: y is no tensor: convert with options={'zipmap': False}, if it is"):
        load()


def test_weights_may_be_constants(load: Any, bench: Bench, tmp_path: Path) -> None:
    path = write(tmp_path / "a.onnx")
    content = onnx.load(path)
    weights = content.graph.initializer.pop()
    content.graph.node.insert(0, helper.make_node("Constant", [], ["weights"], value=weights))
    content.graph.node.insert(0, helper.make_node("Constant", [], ["unread"], value_float=1.0))
    onnx.save(content, path)
    assert_predicts(load())
    assert bench.metrics == {"num_parameters": 5 * 144}


def test_a_file_whose_names_fit_stays_as_it_is(load: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.onnx", linear("images", "logits"), [value("images", "N", 1, 12, 12)], [value("logits", "N", 5)]
    )
    stored = path.read_bytes() + b"\x92\x03\x02hi"  # a field of a later version of the format
    path.write_bytes(stored)
    assert load().path.read_bytes() == stored


@pytest.mark.parametrize(
    ("stored", "meaning"),
    [
        ('{"y": ["a", "b", "c", "d", "e"]}', ("a", "b", "c", "d", "e")),
        ('{"else": ["a"]}', None),
        ("[" * 100_000, None),
        ('{"y": [1]}', None),
        ("", None),
    ],
)
def test_what_the_file_says_of_its_classes(
    load: Any, make_data: Any, tmp_path: Path, stored: str, meaning: tuple[str, ...] | None
) -> None:
    model = onnx.load(write(tmp_path / "a.onnx"))
    model.metadata_props.add(key="meanings", value=stored)
    onnx.save(model, tmp_path / "a.onnx")
    assert load().signature.meanings.get("logits") == meaning
    data = make_data()
    swapped = data.info.task.model_copy(update={"class_names": ("b", "a", "c", "d", "e")})
    other = Data(replace(data.info, task=swapped), data.splits)
    if meaning is None:
        assert load(other).signature.meanings == {}
    else:
        with pytest.raises(StageError, match=r"a.onnx returns logits of \[a, b, c, d, e\]; .* has \[b, a, c, d, e\]"):
            load(other)


@pytest.mark.parametrize("shape", [("N", 1, 12, 12), (None, None, None, None), ("a", "b", 12, "c")])
def test_names_and_symbols_of_the_file(load: Any, tmp_path: Path, shape: tuple[Any, ...]) -> None:
    write(tmp_path / "a.onnx", linear("images", "logits"), [value("images", *shape)], [value("logits", "N", None)])
    assert_predicts(load())


def test_further_outputs_are_left_out(load: Any, tmp_path: Path) -> None:
    nodes = [*linear(), helper.make_node("Relu", ["y"], ["z"])]
    write(tmp_path / "a.onnx", nodes, None, [value("z", "N", 5), value("y", "N", 5)])
    with pytest.raises(StageError, match=r"the data set's logits is no output of a.onnx, which has z, y: say which"):
        load()
    assert_predicts(load(outputs={"y": "logits"}))


FORMS = {"nhwc": (12, 12, 1), "nchw": (1, 12, 12)}


def write_of_bytes(path: Path, form: str) -> Path:
    """Write a file that takes images as bytes, and normalizes them otherwise than the data set does."""
    nodes = [
        helper.make_node("Cast", ["x"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["float", "float_max"], ["scaled"]),
        helper.make_node("Constant", [], ["float_max"], value_float=255.0),
    ]
    inputs = [value("x", "N", *FORMS[form], type_=TensorProto.UINT8)]
    return write(path, [nodes[2], *nodes[:2], *linear("scaled")], inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("said", ["by the option", "in the file"])
def test_a_file_that_takes_bytes(load: Any, make_data: Any, tmp_path: Path, form: str, said: str) -> None:
    path, data = write_of_bytes(tmp_path / "a.onnx", form), make_data()
    if said == "in the file":
        model = onnx.load(path)
        model.metadata_props.add(key="preprocessing", value=form)
        onnx.save(model, path)
    file = load(data, **({"preprocessing": form} if said == "by the option" else {}))
    assert file.input_form == form and file.own_signature.inputs[0].dtype == "uint8"
    batch = next(data.batches("train", input_form=file.input_form))
    images = batch.input_arrays()["images"]
    assert images.shape[1:] == FORMS[form] and images.max() > 1
    with file.predictor(1) as predict:
        outputs = predict({"images": images})
    expected = (images.reshape(len(images), 144) / 255) @ WEIGHTS_KD.T
    np.testing.assert_allclose(outputs["logits"], expected, rtol=1e-4, atol=1e-5)


def test_another_order_of_axes_is_refused(load: Any, tmp_path: Path) -> None:
    write_of_bytes(tmp_path / "a.onnx", "nchw")
    with pytest.raises(StageError, match=r"\(\?, 1, 12, 12\); the data set needs images \(batch, 12, 12, 1\) uint8"):
        load(preprocessing="nhwc")


def test_weights_that_are_listed_as_inputs(load: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.onnx", None, [value("x", "N", 1, 12, 12), value("weights", 5, 144)], ir_version=3, opset=11)
    assert_predicts(load())


def test_names_inside_branches_are_renamed(load: Any, tmp_path: Path) -> None:
    branches = {
        name: helper.make_graph([helper.make_node("Mul", ["x", factor], [f"{name}_x"])], name, [], [value(f"{name}_x")])
        for name, factor in (("then_branch", "one"), ("else_branch", "two"))
    }
    constants = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(number)))
        for name, number in (("yes", np.bool_(True)), ("one", np.float32(1)), ("two", np.float32(2)))
    ]
    nodes = [*constants, helper.make_node("If", ["yes"], ["scaled"], **branches), *linear("scaled")]
    write(tmp_path / "a.onnx", nodes)
    assert_predicts(load())


def test_the_precision_is_that_of_the_operators(load: Any, tmp_path: Path) -> None:
    scale = [
        helper.make_node("Constant", [], ["scale"], value=numpy_helper.from_array(np.array(0.1, np.float32))),
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["d"]),
    ]
    write(tmp_path / "a.onnx", [*scale, *linear("d")])
    assert load().format == "onnx int8"
    dynamic = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
    ]
    write(tmp_path / "a.onnx", [*dynamic, *linear("d")])
    assert load().format == "onnx int8 dynamic"


@pytest.mark.parametrize("type_", ["float16", "bfloat16", "double"])
def test_the_precision_of_a_float_file_is_that_of_its_weights(load: Any, tmp_path: Path, type_: str) -> None:
    path = write(tmp_path / "a.onnx", [helper.make_node("Cast", ["half"], ["weights"], to=1), *linear()])
    content = onnx.load(path)
    stored = helper.make_tensor("half", TensorProto.DataType.Value(type_.upper()), (5, 144), WEIGHTS_KD)
    content.graph.initializer[0].CopyFrom(stored)
    onnx.save(content, path)
    assert load().format == f"onnx {type_.replace('double', 'float64')}"


def test_weights_of_few_bits_are_told_from_int8(load: Any, tmp_path: Path) -> None:
    packed = numpy_helper.from_array(np.full((5, 9, 8), 0x99, np.uint8), "packed")
    scales = numpy_helper.from_array(np.ones((5, 9), np.float32), "scales")
    options = {"K": 144, "N": 5, "bits": 4, "block_size": 16}
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMulNBits", ["flat", "packed", "scales"], ["y"], domain="com.microsoft", **options),
    ]
    graph = helper.make_graph(nodes, "linear", [X], [value("y", "N", 5)], [packed, scales])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "a.onnx")
    assert load().format == "onnx 4-bit weights"


X = value("x", "N", 1, 12, 12)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an input too many": (
        {"inputs": [X, value("mask", "N", 5)]},
        {"inputs": {"x": "images"}},
        "a.onnx has an input that no column of the data set feeds: mask",
    ),
    "two unknown inputs": (
        {"inputs": [X, value("mask", "N", 5)]},
        {},
        r"the data set's images feeds no input of a.onnx, which has x, mask: say which by inputs, \{x: images\}",
    ),
    "several batch sizes": (
        {"inputs": [value("x", 1, 1, 12, 12)], "outputs": [value("y", 2, 5)]},
        {},
        "a.onnx has inputs and outputs of 1 and 2 samples",
    ),
    "another shape": (
        {"inputs": [value("x", "N", 3, 12, 12)]},
        {},
        r"x has the shape \(\?, 3, 12, 12\); the data set needs images \(batch, 1, 12, 12\) float32",
    ),
    "channels last": (
        {"inputs": [value("x", "N", 12, None, 1)]},
        {},
        r"x has the shape \(\?, 12, \?, 1\); .* float32: export it with channels on the second axis \(tf2onnx: "
        r"--inputs-as-nchw x\)",
    ),
    "other axes": ({"inputs": [value("x", "N", 144)]}, {}, r"x has the shape \(\?, 144\); the data set needs"),
    "other classes": ({"outputs": [value("y", "N", 6)]}, {}, r"y has the shape \(\?, 6\); the data set needs logits"),
    "another type": (
        {"inputs": [value("x", "N", 1, 12, 12, type_=TensorProto.DOUBLE)]},
        {},
        r"a.onnx: x is double, the data set's images \(batch, 1, 12, 12\) float32 is not",
    ),
    "bytes": (
        {"inputs": [value("x", "N", 12, 12, 1, type_=TensorProto.UINT8)]},
        {},
        r"x is uint8, the data set's .* is not; preprocessing: nhwc \(or nchw\) says that the file takes raw images",
    ),
    "an unknown name": ({}, {"inputs": {"xx": "images"}}, r"inputs: 'xx' is neither in a.onnx nor in the data set"),
    "an unknown column": (
        {},
        {"inputs": {"x": "image"}},
        r"inputs: 'image' is neither in a.onnx nor in the data set \(did you mean 'images'\?\)",
    ),
    "a tensor of that name": (
        {"nodes": [helper.make_node("Relu", ["x"], ["images"]), *linear("images")]},
        {},
        "a.onnx has another tensor called 'images'",
    ),
    "an unknown operator": (
        {"nodes": [helper.make_node("Nothing", ["x"], ["y"])]},
        {},
        "ONNX Runtime can't run a.onnx",
    ),
    "a later opset": ({"opset": 900}, {}, "ONNX Runtime can't run a.onnx"),
    "a later format": ({"ir_version": 900}, {}, "ONNX Runtime can't run a.onnx"),
    "less than it says": (
        {"nodes": [helper.make_node("Relu", ["x"], ["y"])], "outputs": [value("y", "N", None)]},
        {},
        "ONNX Runtime can't run|returned something other than logits",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit(load: Any, tmp_path: Path, case: str) -> None:
    file, options, message = CASES[case]
    write(tmp_path / "a.onnx", **file)
    with pytest.raises(StageError, match=message) as raised:
        load(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\xff" * 40])
def test_what_is_no_onnx_file(load: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(content)
    with pytest.raises(StageError, match=r"a.onnx (is no ONNX file that can be read|has)|the data set's images feeds"):
        load()


def test_its_bytes_are_in_the_key(tmp_path: Path) -> None:
    config = OnnxModelConfig(file=str(write(tmp_path / "a.onnx")))
    before = onnx_model.fingerprint(config)
    write(tmp_path / "a.onnx", outputs=[value("y", "M", 5)])
    assert onnx_model.fingerprint(config) != before
    with pytest.raises(StageError, match=r"can't read .*/gone.onnx: No such file"):
        onnx_model.fingerprint(OnnxModelConfig(file=str(tmp_path / "gone.onnx")))


def test_a_column_is_named_once(load: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.onnx")
    with pytest.raises(ManifestError, match="name each tensor once"):
        load(inputs={"x": "images", "z": "images"})


def detector(path: Path, *, batch: int | str = "N") -> Path:
    """Boxes and scores of names that are no identifiers, and the boxes above a threshold: as many as there are."""
    nodes = [
        *linear(result="/head/y.0"),
        helper.make_node("Unsqueeze", ["/head/y.0", "axis"], ["2d"]),
        helper.make_node("NonZero", ["/head/y.0"], ["kept"]),
    ]
    outputs = [value("/head/y.0", batch, 5), value("2d", batch, 1, 5), value("kept", 2, "M", type_=TensorProto.INT64)]
    write(path, nodes, [value("x", batch, 1, 12, 12)], outputs)
    content = onnx.load(path)
    content.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    onnx.save(content, path)
    return path


def test_unlabeled_data_takes_all_outputs_or_those_that_count(load: Any, unlabeled: Data, tmp_path: Path) -> None:
    detector(tmp_path / "a.onnx")
    with pytest.raises(
        StageError, match=r"^a.onnx: kept has the shape .* and not a row of one size for each: name"
    ) as e:
        load(unlabeled)
    assert str(e.value).endswith("outputs: {/head/y.0: _head_y_0, 2d: _2d}")
    file = load(unlabeled, outputs={"/head/y.0": "scores", "2d": "boxes"})
    assert [str(spec) for spec in file.signature.outputs] == [
        "scores (batch, 5) float32", "boxes (batch, 1, 5) float32",
    ]  # fmt: skip
    with file.predictor(1) as predict:
        outputs = predict({"images": images_NCHW()})
    np.testing.assert_allclose(outputs["scores"], images_NCHW().reshape(3, 144) @ WEIGHTS_KD.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(outputs["boxes"][:, 0], outputs["scores"])
    renamed = load(unlabeled, outputs={"2d": "_2d"})
    assert [spec.name for spec in renamed.signature.outputs] == ["_2d"]


def test_unlabeled_data_and_a_file_for_one_batch_size(load: Any, unlabeled: Data, tmp_path: Path) -> None:
    detector(tmp_path / "a.onnx", batch=2)
    file = load(unlabeled, outputs={"2d": "boxes"})
    with file.predictor(1) as predict:
        assert predict({"images": images_NCHW(5)})["boxes"].shape == (5, 1, 5)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"kepd": "boxes"}, r"outputs: 'kepd' is not in a.onnx \(did you mean 'kept'\?\)"),
        ({"2d": "my boxes"}, "outputs: 'my boxes' is no name of letters"),
        ({"2d": "images"}, "outputs: 'images' is an input of the data set: call the output otherwise"),
    ],
)
def test_wrong_names_of_outputs(load: Any, unlabeled: Data, tmp_path: Path, outputs: Any, message: str) -> None:
    detector(tmp_path / "a.onnx")
    with pytest.raises(StageError, match=message):
        load(unlabeled, outputs=outputs)
