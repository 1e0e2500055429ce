"""What ONNX Runtime's quantizers need before they start: a float file, nodes with names, shapes, folded constants."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, version_converter

from ptpipe import Context, StageError
from ptpipe_onnx.quantization.config import QuantizerConfig
from ptpipe_onnx.quantization.float32 import OTHER_PRECISIONS
from ptpipe_onnx.quantization.gemms import write_plain_gemms
from ptpipe_onnx.quantization.nodes import name_nodes
from ptpipe_onnx.quantization.tools import quantizer_tools
from ptpipe_torch import Data, OnnxFile
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort

MIN_OPSET = 13
"""The first one in which QuantizeLinear takes a scale for each channel."""
_MIN_IR_VERSION = 4
"""The first one in which weights need not be inputs, too: none that a quantizer adds is."""
_BIASED = ("Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization")
"""Operators whose third input the quantizer takes for a bias."""


def check_inputs(config: QuantizerConfig, ctx: Context, model: OnnxFile, data: Data) -> None:
    """Raise StageError for a file that is quantized, and for data that the file doesn't take, or without samples."""
    if model.precision not in ("float32", *OTHER_PRECISIONS):
        raise StageError(f"{ctx.kind}: the file is {model.precision} already; take the float one")
    if model.interface is not None:
        raise StageError(
            f"{ctx.kind}: the file has its preprocessing or postprocessing inside, which is not to be quantized; take "
            "an export without"
        )
    data.info.check_fit("the file", model.signature)
    if not len(data.splits[config.compare_split]):
        raise StageError(
            f"{ctx.kind}: the data has no samples in {config.compare_split} to compare the file on: choose another "
            "`compare_split`"
        )


def preprocessed(ctx: Context, source: Path) -> Path:
    """Return the file as the quantizers want it: shapes inferred, constants computed, batch norms folded.

    Shapes are those that ONNX infers. ONNX Runtime's symbolic inference adds none that quantizers need, fails on
    graphs of torch's exporter, and then writes files into the working directory.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    named, path = ctx.scratch / "named.onnx", ctx.scratch / "preprocessed.onnx"
    content = _updated(ctx, onnx.load(source, load_external_data=False))
    name_nodes(content.graph)
    onnx.save_model(content, named)
    with quantizer_tools(ctx, "ONNX Runtime can't prepare the file for quantization"):
        quant_pre_process(str(named), str(path), skip_symbolic_shape=True)
    named.unlink()
    return path


def _updated(ctx: Context, content: ModelProto) -> ModelProto:
    """Return a file of an opset with scales for each channel, whose weights are no inputs."""
    content.ir_version = max(content.ir_version, _MIN_IR_VERSION)
    stored = {tensor.name for tensor in content.graph.initializer}
    inputs = [value for value in content.graph.input if value.name not in stored]
    del content.graph.input[:]
    content.graph.input.extend(inputs)
    opset = max((own.version for own in content.opset_import if own.domain in ("", "ai.onnx")), default=MIN_OPSET)
    if opset >= MIN_OPSET:
        return content
    ctx.log(f"converted from opset {opset} to {MIN_OPSET}")
    failed = f"the file has opset {opset}, and can't be converted to {MIN_OPSET}: export it with a later one"
    with quantizer_tools(ctx, failed):
        return version_converter.convert_version(content, MIN_OPSET)


def load_preprocessed(ctx: Context, model: OnnxFile) -> ModelProto:
    """Return the content of a file after `preprocessed`, and leave no file behind."""
    path = preprocessed(ctx, model.path)
    content = onnx.load(path, load_external_data=False)
    _declare_opsets_once(content)
    name_nodes(content.graph)  # the optimizer makes nodes of its own
    write_plain_gemms(content.graph)
    path.unlink()
    return content


def fit_for_quantizer(ctx: Context, content: ModelProto) -> None:
    """Write what ONNX Runtime's quantizer of activations fails on in another form, in place."""
    _separate_biases(content.graph)
    with quantizer_tools(ctx, "ONNX Runtime can't run the file after its own pre-processing"):
        _declare_types(content)


def _declare_opsets_once(content: ModelProto) -> None:
    """Leave one declaration of each domain, ONNX's own among them: the quantizer takes no file with none or several.

    scikit-learn's converter writes it twice.
    """
    versions = {"": MIN_OPSET} | {
        "" if own.domain == "ai.onnx" else own.domain: own.version for own in content.opset_import
    }
    del content.opset_import[:]
    content.opset_import.extend(helper.make_opsetid(*own) for own in versions.items())


def _declare_types(content: ModelProto) -> None:
    """Declare float tensors behind operators of other domains, as those of scikit-learn, whose types ONNX can't infer.

    The quantizer leaves out tensors of no declared type, or fails.
    """
    graph = content.graph
    known = {value.name for value in (*graph.value_info, *graph.input, *graph.output)}
    missing = {name for node in graph.node for name in node.output if name} - known
    if not missing:
        return
    asked = ModelProto.FromString(content.SerializeToString())
    asked.graph.output.extend(ValueInfoProto(name=name) for name in sorted(missing))
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(asked.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for value in session.get_outputs():
        if value.name in missing and value.type == "tensor(float)":
            shape = value.shape or None
            graph.value_info.append(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, shape))


def _separate_biases(graph: GraphProto) -> None:
    """Give each node a bias of its own: the quantizer's copies (1.32) may have the name of another tensor.

    That of `val_33` is `val_330`.
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    taken = {*stored, *(name for node in graph.node for name in node.output)}
    read: set[str] = set()
    for node in graph.node:
        if node.op_type not in _BIASED or len(node.input) < 3 or (bias := stored.get(node.input[2])) is None:
            continue
        if bias.name in read:
            own = TensorProto.FromString(bias.SerializeToString())
            own.name = f"{node.name}.bias"
            while own.name in taken:
                own.name += "_"
            taken.add(own.name)
            node.input[2] = own.name
            graph.initializer.append(own)
        read.add(bias.name)


def only_batch_size(content: ModelProto) -> int | None:
    """Return the batch size of a file that takes no other; None where it takes any."""
    axes = [value.type.tensor_type.shape.dim[:1] for value in content.graph.input]
    return min((axis[0].dim_value for axis in axes if axis and axis[0].dim_value > 0), default=None)
