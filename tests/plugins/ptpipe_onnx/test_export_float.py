from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from ptpipe import StageError
from ptpipe_onnx import export as export_module
from ptpipe_onnx.checks import unsupported_opset
from ptpipe_torch import (
    Classification,
    ColumnInfo,
    Data,
    FunctionRef,
    ImageInfo,
    Model,
    OnnxFile,
    Recipe,
    Task,
    builder,
    transform,
)

from ...signatures import classifier
from .conftest import Exported

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]


@builder
def made(source: str) -> nn.Module:
    """A network whose forward pass is this expression of `x`."""
    module = nn.Module()
    module.forward = eval(f"lambda x: {source}", {"torch": torch})  # type: ignore[method-assign]
    return module


def model_of(source: str, num_classes: int = 10) -> Model:
    return Model(Recipe(FunctionRef.to(made, source=source), classifier((1, 16, 16), num_classes)), {})


@pytest.mark.parametrize("name", ["cnn", "residual", "mobile", "rows"])
def test_the_file_computes_what_torch_computes(
    name: str, exported: Callable[..., Exported], digits: Data, run_onnx: Callable[..., np.ndarray]
) -> None:
    made = exported(name)
    model, file = made.model, made.file
    (batch,) = digits.batches("test", batch_size=300)
    with torch.inference_mode():
        expected_NK = model.build()(batch.inputs["images"]).numpy()
    for optimize in (False, True):
        found_NK = run_onnx(file.path, batch.inputs["images"].numpy(), optimize=optimize)
        np.testing.assert_allclose(found_NK, expected_NK, atol=2e-5 * np.abs(expected_NK).max())
    assert file.parity["top1_agreement"] == 1.0
    assert file.parity["num_samples"] == 200
    assert (file.format, file.signature) == ("onnx float32", classifier((1, 16, 16), 10))


def test_any_batch_size(exported: Callable[..., Exported], run_onnx: Callable[..., np.ndarray]) -> None:
    file = exported("cnn").file
    images_NCHW = np.random.default_rng(0).normal(size=(37, 1, 16, 16)).astype(np.float32)
    all_NK = run_onnx(file.path, images_NCHW)
    assert all_NK.shape == (37, 10)
    np.testing.assert_allclose(run_onnx(file.path, images_NCHW[5:6]), all_NK[5:6], atol=1e-5)
    assert run_onnx(file.path, images_NCHW[:0]).shape == (0, 10)


def test_metadata_of_the_file(exported: Callable[..., Exported]) -> None:
    file, metrics = exported("cnn").file, exported("cnn").events.metrics
    model = onnx.load(file.path)
    (input_,), (output,) = model.graph.input, model.graph.output
    assert [(d.dim_param or d.dim_value) for d in input_.type.tensor_type.shape.dim] == ["batch", 1, 16, 16]
    assert [(d.dim_param or d.dim_value) for d in output.type.tensor_type.shape.dim] == ["batch", 10]
    assert (input_.name, output.name, model.producer_name) == ("images", "logits", "ptpipe")
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata["signature"] == str(file.signature) == str(classifier((1, 16, 16), 10))
    image = ImageInfo(shape_CHW=(1, 16, 16), mean=(0.31,), std=(0.38,))
    inputs = {name: ColumnInfo.from_json(facts) for name, facts in json.loads(metadata["inputs"]).items()}
    assert inputs == {"images": image}
    assert Task.from_json(json.loads(metadata["task"])) == Classification(class_names=tuple("0123456789"))
    assert (metadata["backend"], metadata["precision"], metadata["data"]) == ("", "float32", "digits")
    assert ([entry.version for entry in model.opset_import], model.ir_version) == ([18], 10)
    assert metrics["size_bytes"] == file.path.stat().st_size
    assert metrics["opset"] == 18


def test_ir_version(run_export: Export, float_model: Make) -> None:
    assert onnx.load(run_export(float_model("cnn"), ir_version=9, num_samples=8).path).ir_version == 9


def test_batch_norm_is_folded_and_nothing_else_is_in_the_file(exported: Callable[..., Exported]) -> None:
    model, file = exported("cnn").model, exported("cnn").file
    graph = onnx.load(file.path).graph
    assert [node.op_type for node in graph.node].count("Conv") == 2
    assert {node.op_type for node in graph.node} == {"Conv", "Relu", "MaxPool", "Reshape", "Gemm"}
    num_weights = sum(tensor.numel() for name, tensor in model.tensors.items() if "running" not in name)
    assert file.size_bytes < 4 * num_weights + 4000
    content = file.path.read_bytes()
    for trace in (b"site-packages", b"/tests/", b"stack_trace", b"fx_node", str(Path.home()).encode()):
        assert trace not in content


def test_the_same_model_gives_the_same_bytes(
    run_export: Export, exported: Callable[..., Exported], float_model: Make
) -> None:
    first = exported("cnn").file.path.read_bytes()
    assert run_export(float_model("cnn")).path.read_bytes() == first


@pytest.mark.parametrize("opset", [18, 21, 23])
def test_the_file_has_the_opset_that_was_asked_for(opset: int, run_export: Export, float_model: Make) -> None:
    if (message := unsupported_opset(opset)) is not None:
        pytest.skip(message)
    file = run_export(float_model("mobile"), opset=opset)
    assert onnx.load(file.path).opset_import[0].version == opset


def test_nothing_is_printed_and_torch_is_left_as_it_was(
    run_export: Export, float_model: Make, int8_model: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    models = [float_model("cnn"), int8_model("mobile")]
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]

    def state() -> tuple[object, ...]:
        return (
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.backends.quantized.engine,
            getattr(torch.fx.config, "do_not_emit_stack_traces", False),
            list(warnings.filters),
            [logger.level for logger in loggers],
        )

    before = state()
    for model in models:
        tensors = {name: tensor.clone() for name, tensor in model.tensors.items()}
        run_export(model)
        assert all(torch.equal(tensor, model.tensors[name]) for name, tensor in tensors.items())
    assert state() == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "x.flatten(1)[:, :10] * (1 if x.sum() > 0 else 2)",
            r"ONNX: a branch, a loop or a size depends on values of tensors \(<string>:1\)\. .* torch\.where",
        ),
        ("x.reshape(2, -1)[:, :10]", "can't be exported to ONNX"),
        (
            "x.flatten(1)[torch.arange(int(x.shape[0])), :10]",
            r"a constant of the size of the axis batch, as int\(x.shape\[0\]\) and torch.take_along_dim do: write x",
        ),
        (
            "torch.take_along_dim(x.flatten(1), x.flatten(1)[:1, :10].long(), 1)",
            r"and torch.take_along_dim do: write x.shape\[0\], and x.gather in its place",
        ),
        (
            "torch.cat(x.chunk((x.shape[0] + 127) // 128)).flatten(1)[:, :10]",
            "which operators it runs depends on the size of the axis batch: take the same ones for all sizes",
        ),
        ("torch.linalg.eigvals(x).real.flatten(1)[:, :10]", "can't be exported to ONNX"),
        ("x.flatten(1)[:, :9]", r"logits of shape \(\?, 9\); it must return logits \(batch, 10\)"),
        ("(x.flatten(1)[:, :10], x)", "returns 2 tensors"),
        ("x.flatten(1)[:, :10] / 0", "not finite"),
    ],
)
def test_networks_that_cannot_be_exported(
    source: str, words: str, run_export: Export, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StageError, match=words) as caught:
        run_export(model_of(source))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "torch prints graphs"


@pytest.mark.parametrize(
    ("arguments", "opset"),
    [
        ("y, y, y", 18),
        ("y, y, y", 23),
        ("y, y * 2, y + 1, torch.ones(16, 16).tril() > 0", 18),
        ("y, y[:, :8], y[:, :8], y[:, :, :8]", 18),
        ("y, y, y, is_causal=True", 18),
        ("y[:, None], y[:, None], y[:, None]", 18),
    ],
)
def test_attention_without_heads(arguments: str, opset: int, run_export: Export) -> None:
    if (message := unsupported_opset(opset)) is not None:
        pytest.skip(message)
    attention = f"torch.nn.functional.scaled_dot_product_attention({arguments})"
    file = run_export(model_of(f"(lambda y: {attention}.flatten(1, -2).mean(1)[:, :10])(x.squeeze(1))"), opset=opset)
    assert file.parity["num_samples"] == 200


def test_inputs_that_do_not_fit(run_export: Export, float_model: Make, int8_model: Make, digits: Data) -> None:
    with pytest.raises(StageError, match=r"no samples in val.*another `split`"):
        run_export(float_model("cnn"), split="val")
    with pytest.raises(StageError, match=r"not converted: put a quant\.convert"):
        run_export(int8_model("cnn").with_recipe(convert=()))
    with pytest.raises(StageError, match=r"random numbers in eval mode too \(.*dropout"):
        run_export(model_of("torch.nn.functional.dropout(x, 0.5).flatten(1)[:, :10]"))
    recipe = float_model("cnn").recipe
    other = Model(Recipe(recipe.builder, classifier((3, 16, 16), 10)), {})
    with pytest.raises(StageError, match=r"takes images \(batch, 3, 16, 16\)"):
        run_export(other)


def test_more_than_a_file_can_hold(run_export: Export, float_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "MAX_BYTES", 20_000)
    with pytest.raises(StageError, match=r"weights are [0-9,]+ bytes; one ONNX file holds less than 2 GiB"):
        run_export(float_model("cnn"))


def test_few_samples_and_another_split(run_export: Export, float_model: Make) -> None:
    assert run_export(float_model("cnn"), num_samples=1).parity["num_samples"] == 1
    assert run_export(float_model("cnn"), split="calibration", num_samples=9999).parity["num_samples"] == 300


def test_a_float_transform_is_part_of_the_model(run_export: Export, float_model: Make) -> None:
    doubled = float_model("cnn").with_recipe(convert=(FunctionRef.to(doubling),))
    file = run_export(doubled)
    assert file.precision == "float32"
    assert any(node.op_type in ("Mul", "Add") for node in onnx.load(file.path).graph.node)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2 + 1


@transform
def doubling(module: nn.Module) -> nn.Module:
    return Doubled(module)


class SharedMemory(nn.Module):
    """The activation changes what the addition reads: `y + rows` is twice the activation."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3)
        self.activation = getattr(nn, activation)(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.conv(x)
        y = self.activation(rows)
        return (y + rows).mean((2, 3))


@builder
def shared_memory(activation: str) -> nn.Module:
    return SharedMemory(activation)


@builder
def padded(mode: str) -> nn.Module:
    convolutions = [nn.Conv2d(1, 4, 3, padding=(2, 1), padding_mode=mode), nn.Conv2d(4, 10, 1)]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class OfLength(nn.Module):
    """Reads the batch size as the length of its input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.reshape(len(x), -1) + torch.zeros(len(x), 1))


@builder
def of_length(features: int) -> nn.Module:
    return OfLength(features)


@builder
def orthogonal(*, features: int) -> nn.Module:
    """A layer whose weight is computed by an operator without an ONNX form."""
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(256, features))
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(features, 10)))


@pytest.mark.parametrize(
    "reference",
    [
        FunctionRef.to(of_length, features=256),
        FunctionRef.to(orthogonal, features=16),
        FunctionRef.to(shared_memory, activation="ReLU"),
        FunctionRef.to(shared_memory, activation="ReLU6"),
        FunctionRef.to(padded, mode="reflect"),
        FunctionRef.to(padded, mode="circular"),
    ],
    ids=lambda reference: "-".join(map(str, reference.arguments.values())),
)
def test_unusual_spellings_of_usual_networks(
    reference: FunctionRef, run_export: Export, run_onnx: Callable[..., np.ndarray], digits: Data
) -> None:
    torch.manual_seed(1)
    model = Model.from_module(
        Recipe(reference, classifier((1, 16, 16), 10)), reference.resolve("builder")(**reference.arguments)
    )
    file = run_export(model)
    (batch,) = digits.batches("test", batch_size=300)
    with torch.inference_mode():
        expected_NK = model.build()(batch.inputs["images"]).numpy()
    found_NK = run_onnx(file.path, batch.inputs["images"].numpy())
    np.testing.assert_allclose(found_NK, expected_NK, atol=2e-5 * np.abs(expected_NK).max())


def test_rows_in_the_order_of_nearly_equal_scores(run_export: Export) -> None:
    """Columns of a softmax have the sum 1, up to rounding, which decides the order."""
    scores = "(x.flatten(1)[:, :, None] * x.flatten(1)[:, None]).softmax(1).sum(1)"
    file = run_export(model_of(f"x.flatten(1).gather(1, {scores}.topk(10)[1])"))
    assert file.parity["max_abs_logit_difference"] == 0
    assert [spec.name for spec in file.signature.outputs] == ["logits"]


def ranks_the_smallest(model: onnx.ModelProto, ranking: onnx.NodeProto) -> None:
    (largest,) = (attribute for attribute in ranking.attribute if attribute.name == "largest")
    largest.i = 0


def ranks_in_other_places(model: onnx.ModelProto, ranking: onnx.NodeProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.arange(256)[::-1].copy(), "places"))
    moved = onnx.helper.make_node("Gather", [ranking.input[0], "places"], ["moved"], axis=1)
    model.graph.node.insert(list(model.graph.node).index(ranking), moved)
    ranking.input[0] = "moved"


@pytest.mark.parametrize("fault", [ranks_the_smallest, ranks_in_other_places])
def test_a_file_that_ranks_otherwise_is_refused(
    fault: Callable[..., None], run_export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export_module.graph.write

    def write_badly(content: object, path: Path) -> None:
        write(content, path)
        model = onnx.load(path)
        (ranking,) = (node for node in model.graph.node if node.op_type == "TopK")
        fault(model, ranking)
        onnx.save(model, path)

    monkeypatch.setattr(export_module.graph, "write", write_badly)
    with pytest.raises(StageError, match=r"^where values are ranked .* disagree: .*\. The network ranks values"):
        run_export(model_of("x.flatten(1).gather(1, x.flatten(1).cumsum(1).topk(10)[1])"))


def test_rankings_that_the_file_leaves_out(run_export: Export) -> None:
    """Then positions can't be imposed one by one, and the outputs are compared as they are."""
    file = run_export(model_of("(x.flatten(1).topk(10), x.flatten(1).cumsum(1).topk(10)[0])[1]"))
    assert [node.op_type for node in onnx.load(file.path).graph.node].count("TopK") == 1


def test_a_value_that_is_flattened_twice(run_export: Export) -> None:
    """As by two heads: a rule of onnxscript calls both shapes alike."""
    run_export(model_of("x.flatten(1)[:, :10] + 2 * x.flatten(1)[:, 10:20]"))
