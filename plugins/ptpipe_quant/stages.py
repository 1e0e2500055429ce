"""What the quant stages do.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import JSON, Context, StageError
from ptpipe_quant import (
    ActivationConfig,
    BackendConfig,
    CalibrateConfig,
    DynamicConfig,
    PrepareConfig,
    PrepareQatConfig,
    parts,
)
from ptpipe_quant.calibration import Samples, not_finite, show, watched_tensors
from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_quant.fake_quant import ActivationFakeQuant, WeightFakeQuant
from ptpipe_quant.network import layers_to_quantize
from ptpipe_quant.torch_ao import folded_weight, has_int8_weights, int8_weight, is_watching
from ptpipe_torch import Data, FunctionRef, Model, Ranges
from ptpipe_torch.distributed.worker_group import init_worker_group
from ptpipe_torch.int8.int8_state import pack_state, quantized_tensors
from ptpipe_torch.runtime import quantized_engine

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def dynamic(config: DynamicConfig, ctx: Context, model: Model) -> Model:
    """Do `quant.dynamic`."""
    _must_be_float(model, ctx.kind)
    weights = _weights(config)
    part = FunctionRef.to(parts.to_dynamic_int8, weights=weights, reduce_range=_reduced(config, ctx), skip=config.skip)
    module = model.build()
    stored = {}
    if config.convolutions == "store_int8":
        stored = _round_convolutions(module, config.skip, per_channel=weights == "per_channel")
    recipe = replace(model.recipe, convert=(part,), backend=config.backend)
    return _int8(Model.from_module(recipe, module), ctx, stored)


def prepare(config: PrepareConfig, ctx: Context, model: Model) -> Model:
    """Do `quant.prepare`."""
    part = FunctionRef.to(
        parts.prepare_static,
        backend=config.backend,
        observer=config.observer,
        weights=_weights(config),
        reduce_range=_reduced(config, ctx),
        skip=config.skip,
        calibrating=True,
    )
    return _prepared(config, ctx, model, part)


def prepare_qat(config: PrepareQatConfig, ctx: Context, model: Model) -> Model:
    """Do `quant.prepare_qat`."""
    part = FunctionRef.to(
        parts.prepare_qat,
        backend=config.backend,
        weights=_weights(config),
        reduce_range=_reduced(config, ctx),
        skip=config.skip,
        batch_norm=config.batch_norm,
        freeze_at=config.freeze_at,
    )
    return _prepared(config, ctx, model, part)


def calibrate(config: CalibrateConfig, ctx: Context, model: Model, data: Data) -> tuple[Model, Ranges]:
    """Do `quant.calibrate`."""
    module = model.build_prepared()
    if not isinstance(module, GraphModule) or not any(is_watching(part) for part in module.modules()):
        raise StageError(f"{ctx.kind} needs a model with reporters, from quant.prepare or quant.prepare_qat")
    available = len(data.splits[config.split]) if config.split in data.splits else 0
    num_samples = min(available, config.num_samples or available)
    if num_samples == 0:
        raise StageError(f"{ctx.kind}: the data set's split {config.split!r} is empty")
    with init_worker_group(ctx, "gloo", on_cuda=False) as workers:
        show(module, Samples(data, config.split, num_samples, ctx), workers)
    limits = {name: (low, high) for name, low, high in _ranges(module)}
    for name, limit in limits.items():
        if not all(math.isfinite(value) for value in limit):
            raise not_finite(ctx, name)
    ctx.metric(num_samples=num_samples, num_ranges=len(limits))
    return model.with_state_dict_of(module), Ranges(limits, num_samples)


def convert(ctx: Context, model: Model) -> Model:
    """Do `quant.convert`."""
    if not model.recipe.prepare or model.recipe.convert or model.recipe.backend is None:
        have = "already int8" if model.recipe.convert else "float"
        raise StageError(
            f"{ctx.kind} got a model that is {have}; it needs one from quant.prepare and quant.calibrate, or from "
            "quant.prepare_qat and train.supervised"
        )
    standard = model.with_recipe(prepare=tuple(_for_conversion(part) for part in model.recipe.prepare))
    with quantized_engine(model.recipe.backend):
        prepared = standard.build_prepared()
    _must_have_seen_data(prepared, ctx.kind)
    _settle_weight_ranges(prepared)
    return _int8(
        standard.with_state_dict_of(prepared).with_recipe(
            convert=(FunctionRef.to(parts.to_int8, backend=model.recipe.backend),)
        ),
        ctx,
    )


def _must_be_float(model: Model, kind: str) -> None:
    if model.recipe.convert:
        raise StageError(f"{kind} got a model that is already int8 for {model.recipe.backend}; it needs a float one")
    if model.recipe.backend is not None:
        raise StageError(
            f"{kind} got a model that is already prepared for {model.recipe.backend}; it needs a float one"
        )


def _weights(config: BackendConfig) -> str:
    if config.weights != "auto":
        return config.weights
    return "per_tensor" if config.backend == "qnnpack" else "per_channel"


def _reduced(config: ActivationConfig, ctx: Context) -> bool:
    reduced, reason = wants_reduced_range(config.backend)
    if config.reduce_range != "auto":
        reduced, reason = config.reduce_range, "as told"
    ctx.metric(reduce_range=reduced, reduce_range_reason=reason)
    return reduced


def _prepared(config: ActivationConfig, ctx: Context, model: Model, part: FunctionRef) -> Model:
    _must_be_float(model, ctx.kind)
    with quantized_engine(config.backend), torch.no_grad():
        module = part.resolve("transform")(model.build(), **part.arguments)
    if not any(is_watching(module_part) for module_part in module.modules()):
        raise StageError(f"{ctx.kind}: no layer of this network can become int8{_because(config)}")
    ctx.metric(backend=config.backend, weights=_weights(config))
    recipe = replace(model.recipe, prepare=(part,), backend=config.backend)
    return Model.from_module(recipe, module)


def _because(config: BackendConfig) -> str:
    return f" (skip: {', '.join(config.skip)})" if config.skip else ""


def _for_conversion(part: FunctionRef) -> FunctionRef:
    """The same part, making the graph that torch.ao converts and exporters know."""
    standard = {"calibrating": False, "freeze_at": None}
    return FunctionRef(part.address, {name: standard.get(name, value) for name, value in part.arguments.items()})


def _ranges(module: GraphModule) -> Iterator[tuple[str, float, float]]:
    """The range of each watched tensor, under the name of the layer or operator that gives it."""
    for call in watched_tensors(module):
        observer = getattr(call.watcher, "activation_post_process", call.watcher)
        yield call.name, observer.min_val.item(), observer.max_val.item()


def _must_have_seen_data(prepared: nn.Module, kind: str) -> None:
    ranges = list(_ranges(prepared))
    for name, *limits in ranges:
        if any(math.isnan(limit) for limit in limits):
            raise StageError(
                f"{kind}: the range of {name} is not a number; the training or calibration before it failed"
            )
    unseen = [name for name, low, high in ranges if low > high]
    if unseen:
        raise StageError(
            f"{kind}: {len(unseen)} of {len(ranges)} ranges saw no data (the first is that of {unseen[0]}); run "
            "quant.calibrate after quant.prepare, or train.supervised after quant.prepare_qat"
        )


def _settle_weight_ranges(prepared: nn.Module) -> None:
    """Let ranges of weights be those of the final weights, and all ranges stay as they are."""
    with torch.no_grad():
        for part in prepared.modules():
            weight_fake_quant = getattr(part, "weight_fake_quant", None)
            if isinstance(weight_fake_quant, WeightFakeQuant):
                weight_fake_quant(folded_weight(part))
    for part in prepared.modules():
        if isinstance(part, ActivationFakeQuant | WeightFakeQuant):
            part.disable_observer()


def _round_convolutions(module: nn.Module, skip: tuple[str, ...], *, per_channel: bool) -> dict[str, torch.Tensor]:
    """Round the weights of convolutions to int8 values; give them, by their name in the state dict."""
    stored = {}
    for name in layers_to_quantize(module, skip, *_CONVOLUTIONS):
        layer = module.get_submodule(name)
        weight = int8_weight(layer.weight.detach(), per_channel=per_channel, axis=1 if layer.transposed else 0)
        stored[f"{name}.weight"] = weight
        with torch.no_grad():
            layer.weight.copy_(weight.dequantize())
    return stored


def _int8(model: Model, ctx: Context, stored: Mapping[str, torch.Tensor] | None = None) -> Model:
    """Fill in the int8 tensors, and say what became int8 and what didn't.

    `stored`: int8 forms of tensors that are float when they are used.
    """
    with quantized_engine(model.recipe.backend), quantized_tensors():
        module = model.build()
        _must_run(module, model, ctx.kind)
        packed = pack_state({**module.state_dict(), **(stored or {})})
    num_int8 = sum(has_int8_weights(layer) for layer in module.modules())
    left_float = [
        name for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    ]
    if num_int8 == 0 and not stored:
        raise StageError(f"{ctx.kind}: no layer of this network can become int8")
    ctx.metric(backend=model.recipe.backend, int8_layers=num_int8, float_layers=_shortened(left_float))
    return Model(model.recipe, model.tensors, packed)


def _must_run(module: nn.Module, model: Model, kind: str) -> None:
    """Try one image: an engine tells what it can't do only when asked to."""
    try:
        with torch.inference_mode():
            module(torch.zeros(1, *model.input_shape_CHW))
    except (RuntimeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise StageError(f"{kind}: {model.recipe.backend} can't run this network as int8: {reason}") from error


def _shortened(names: Iterable[str], limit: int = 20) -> list[JSON]:
    shown = list[JSON](names)
    return shown if len(shown) <= limit else [*shown[:limit], f"and {len(shown) - limit} more"]
