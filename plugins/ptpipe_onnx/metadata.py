"""What a file says of itself: its metadata."""

from __future__ import annotations

import json

import torch
from torch import nn

from ptpipe import Context, StageConfig
from ptpipe_onnx.saturation import Saturation
from ptpipe_torch import Data, Model
from ptpipe_torch.int8.observers import observes_activation_range

_FULL, _REDUCED = 255, 127


def reduced_range(prepared: nn.Module) -> str:
    """Return `reduce_range` of a prepared network: `true`, `false`, or `some layers` where tensors differ."""
    levels = {getattr(module, "quant_max", _FULL) for module in prepared.modules() if observes_activation_range(module)}
    if _FULL not in levels:
        return "true"
    return "some layers" if _REDUCED in levels else "false"


def metadata_of(model: Model, data: Data, precision: str, reduced: str, saturation: Saturation) -> dict[str, str]:
    """Return the metadata of a model's file. `reduced`: from `reduced_range`."""
    info = data.info
    metadata = {
        "signature": str(model.signature),
        "meanings": json.dumps(model.signature.to_json()["meanings"]),
        "inputs": json.dumps({name: column.to_json() for name, column in info.inputs.items()}),
        "preprocessing": "none",
        "postprocessing": "none",
        "task": json.dumps(info.task.to_json()),
        "data": info.name,
        "precision": precision,
        "backend": model.recipe.backend or "",
        "builder": model.recipe.builder.address,
        "torch": str(torch.__version__),
    }
    if precision != "float32":
        metadata["reduce_range"] = reduced
        metadata["exact_integer_sums_on_x86"] = _where_sums_are_exact(saturation)
        metadata["saturating_layers_without_vnni"] = json.dumps([layer.name for layer in saturation.saturating])
    return metadata


def origin_of(ctx: Context, options: StageConfig) -> dict[str, str]:
    """Return the metadata by which a store finds how a file was made; `options`: a stage's."""
    origin = {f"{ctx.kind} options": options.model_dump_json()}
    for digest in ctx.input_digests.get("model", ()):
        origin[f"{ctx.kind} model"] = digest
    return origin


def _where_sums_are_exact(saturation: Saturation) -> str:
    if saturation.is_exact_beyond:
        return "yes"
    if not saturation.saturating:
        return "yes, for inputs within the calibrated ranges"
    return (
        "only with VNNI (AVX-512 VNNI or AVX-VNNI), or with the session option session.x64quantprecision=1; without "
        "them two products of 8-bit integers are added in 16 bits, where they saturate"
    )
