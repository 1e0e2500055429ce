"""What a file says of itself: its metadata."""

from __future__ import annotations

import json

import torch

from ptpipe import Context, StageConfig
from ptpipe_onnx.saturation import Saturation
from ptpipe_torch import Data, Model, Recipe


def metadata_of(model: Model, data: Data, precision: str, saturation: Saturation) -> dict[str, str]:
    """Return the metadata of a model's file."""
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
        metadata["reduce_range"] = json.dumps(_has_reduced_range(model.recipe))
        metadata["exact_integer_sums_on_x86"] = _where_sums_are_exact(saturation)
        metadata["saturating_layers_without_vnni"] = json.dumps([layer.name for layer in saturation.saturating])
    return metadata


def origin_of(ctx: Context, options: StageConfig) -> dict[str, str]:
    """Return the metadata by which a store finds how a file was made; `options`: a stage's."""
    origin = {f"{ctx.kind} options": options.model_dump_json()}
    for digest in ctx.input_digests.get("model", ()):
        origin[f"{ctx.kind} model"] = digest
    return origin


def _has_reduced_range(recipe: Recipe) -> bool:
    return any(reference.arguments.get("narrow_weights") for reference in (*recipe.prepare, *recipe.convert))


def _where_sums_are_exact(saturation: Saturation) -> str:
    if not saturation.saturating:
        return "yes"
    return (
        "only with VNNI (AVX-512 VNNI or AVX-VNNI), or with the session option session.x64quantprecision=1; without "
        "them two products of 8-bit integers are added in 16 bits, where they saturate"
    )
