"""ONNX files and what is made of them: export.onnx, quant.onnx, quant.weight_only, export.openvino.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ptpipe import JSON, Check, Context, Stage, hookimpl, stage
from ptpipe_onnx.config import ExportConfig
from ptpipe_onnx.openvino.config import OpenVinoConfig
from ptpipe_onnx.openvino.model import OpenVinoModel, missing_openvino
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig, WeightOnlyConfig
from ptpipe_torch import Data, Model, OnnxFile
from ptpipe_torch.files import emptied_on_error

if TYPE_CHECKING:
    from ptpipe import Plan, Problem


def _unsupported_opset(config: ExportConfig) -> Iterable[str]:
    from ptpipe_onnx.checks import unsupported_opset

    message = unsupported_opset(config.opset, config.ir_version)
    return [message] if message else []


@stage("export.onnx", packages=("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime"), preflight=_unsupported_opset)
def export_onnx(config: ExportConfig, ctx: Context, model: Model, data: Data) -> OnnxFile:
    """Export a float or int8 model to one ONNX file, and compare it with the torch model on real samples.

    Input `images` (N, C, H, W), output `logits` (N, K), for any N. int8 weights are stored as int8. The file's
    metadata has mean, std, class names and the origin of the model. With `preprocessing` the file takes raw values and
    normalizes them itself, with `resize` images of any size; with `postprocessing` it returns probabilities and
    classes too. The stage fails, with figures, if the file's logits differ from torch's by more than rounding
    explains. It reports which layers ONNX Runtime computes in integers, and which can saturate on x86 processors
    without VNNI. Beside the file, `model.vectors.npz` has samples and their outputs, for `ptpipe check` on the target.
    """
    from ptpipe_onnx.export import export_file

    with emptied_on_error(ctx.scratch):
        return export_file(config, ctx, model, data)


def _reduced_range(config: QuantizeOnnxConfig) -> JSON:
    return {"reduce_range": config.has_reduced_range} if config.reduce_range == "auto" else None


@stage("quant.onnx", packages=("onnx", "onnx-ir", "onnxruntime"), fingerprint=_reduced_range)
def quantize_onnx(config: QuantizeOnnxConfig, ctx: Context, model: OnnxFile, data: Data) -> OnnxFile:
    """Quantize a float ONNX file to int8 by ONNX Runtime's own quantizer, after its pre-processing.

    For files that other programs wrote (`model.onnx`), and to compare with `quant.prepare`, `quant.calibrate` and
    `quant.convert`. The result is compared with the float file on real samples, which is recorded and refused only if
    its outputs are not finite or the same for all samples.
    """
    from ptpipe_onnx.quantization.post_training import quantize

    with emptied_on_error(ctx.scratch):
        return quantize(config, ctx, model, data)


def _missing_quantizer(config: WeightOnlyConfig) -> Iterable[str]:
    from ptpipe_onnx.quantization.weight_only import missing_quantizer

    message = missing_quantizer()
    return [message] if message else []


@stage("quant.weight_only", packages=("onnx", "onnx-ir", "onnxruntime"), preflight=_missing_quantizer)
def quantize_weights(config: WeightOnlyConfig, ctx: Context, model: OnnxFile, data: Data) -> OnnxFile:
    """Quantize the weights of a float ONNX file's linear layers to 4 or 8 bits, a scale for each block of them.

    Needs no calibration: activations stay float. The layers become `MatMulNBits`, an operator of ONNX Runtime that
    others may not have. For transformers, whose time and size are those of their weights. The result is compared
    with the float file on real samples, as that of `quant.onnx`.
    """
    from ptpipe_onnx.quantization.weight_only import quantize_weights

    with emptied_on_error(ctx.scratch):
        return quantize_weights(config, ctx, model, data)


def _without_openvino(config: OpenVinoConfig) -> Iterable[str]:
    message = missing_openvino()
    return [message] if message else []


@stage("export.openvino", packages=("openvino", "onnxruntime"), preflight=_without_openvino)
def export_openvino(config: OpenVinoConfig, ctx: Context, model: OnnxFile, data: Data) -> OpenVinoModel:
    """Convert an ONNX file to OpenVINO's format, and compare the two on real samples.

    Writes `model.xml` and `model.bin`. An int8 file stays int8: the stage reports which operators OpenVINO computes in
    integers here. It fails, with figures, if the outputs differ from ONNX Runtime's by more than rounding explains.
    `eval.*` stages and gates measure the result as any other model. Needs `ptpipe[openvino]`.
    """
    from ptpipe_onnx.openvino.export import convert

    with emptied_on_error(ctx.scratch):
        return convert(config, ctx, model, data)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Return the kinds of this plugin."""
    return [export_onnx, export_openvino, quantize_onnx, quantize_weights]


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find files that are quantized before they reach quant.onnx or quant.weight_only."""
    from ptpipe_onnx.quantization.checks import order_problems

    return order_problems(plan)


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Check the ONNX libraries, and run a small file."""
    from ptpipe_onnx.doctor import run_checks

    return run_checks()
