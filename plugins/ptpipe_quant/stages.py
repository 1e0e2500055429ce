"""Implementation of the quant stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import Context, StageError
from ptpipe_quant import transforms
from ptpipe_quant.calibration import Samples, not_finite, observed_tensors, run_calibration
from ptpipe_quant.config import (
    BackendConfig,
    CalibrateConfig,
    DynamicConfig,
    PrepareConfig,
    PrepareQatConfig,
    own_options_of,
)
from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_quant.dry_run import check_runs, freeze_ranges
from ptpipe_quant.dynamic_layers import FloatRun, check_dynamic_layers, idle_patterns, names_to_quantize
from ptpipe_quant.int8_parity import check_int8
from ptpipe_quant.linear_forms import linear_forms
from ptpipe_quant.preparation import for_conversion, prepare_model, trained_directly, truncated
from ptpipe_quant.repaired import without_float_tensors
from ptpipe_quant.separate_attention import is_attention, separable_layers, separate_projections
from ptpipe_quant.trace import float_names, layers_to_quantize
from ptpipe_torch import Data, FunctionRef, Model, Ranges, TensorSpec
from ptpipe_torch.data.calibration_samples import num_calibration_samples
from ptpipe_torch.distributed.worker_group import init_worker_group
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.float_parts import float_parts, int8_parameters_fraction, num_int8_layers
from ptpipe_torch.int8.fx import is_prepared
from ptpipe_torch.int8.int8_state import pack_state
from ptpipe_torch.int8.layers import STORABLE_LAYERS, round_weights, storable_layers
from ptpipe_torch.model.example_inputs import probe_inputs, zeros
from ptpipe_torch.model.reparametrized import reparametrized_layers
from ptpipe_torch.runtime import large_blocks_mapped, released_memory

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@large_blocks_mapped()
def dynamic(config: DynamicConfig, ctx: Context, model: Model) -> Model:
    """Implement `quant.dynamic`."""
    _check_float(model, ctx.kind)
    narrow_weights = _reduced_range(config, ctx)
    ctx.progress(1, None, "step", doing="finding the layers")
    run, module = FloatRun.of(model, ctx.kind), model.build()
    skipped = float_names(module, config.skip)
    attention = separable_layers(model.build, run.is_reproduced_by, ctx)
    layers = names_to_quantize(lambda: separate_projections(model.build(), attention), skipped, run, ctx)
    options = {"weights": config.weights, "narrow_weights": narrow_weights, "layers": layers}
    steps = []
    if any(map(is_attention, module.modules())):
        steps.append(FunctionRef.to(transforms.separate_attention, layers=attention))
    if forms := linear_forms(separate_projections(model.build(), attention), layers):
        steps.append(FunctionRef.to(transforms.use_linear_layers, forms=forms))
    steps.append(FunctionRef.to(transforms.to_dynamic_int8, **options))
    storable = [type_ for type_ in STORABLE_LAYERS if config.convolutions == "store_int8" or type_ not in _CONVOLUTIONS]
    for pattern in idle_patterns(module, config.skip, nn.Linear, nn.MultiheadAttention, *storable):
        ctx.notice(f"skip: {pattern!r} matches no layer that {ctx.kind} would quantize")
    names = [name for name in layers_to_quantize(module, config.skip, *storable) if name not in layers]
    ctx.progress(2, None, "step", doing="converting the layers")
    stored = round_weights(module, storable_layers(module, names), per_channel=config.weights == "per_channel")
    recipe = replace(model.recipe, convert=tuple(steps), backend=config.engine)
    converted = _int8(Model.from_module(recipe, module), ctx, stored)
    check_dynamic_layers(converted, run.inputs, ctx.kind)
    return converted


def prepare(config: PrepareConfig, ctx: Context, model: Model, *, may_be_idle: bool = False) -> Model:
    """Implement `quant.prepare`. `may_be_idle`: whether patterns of `layers` may decide nothing."""
    _check_float(model, ctx.kind)
    insert_observers = FunctionRef.to(
        transforms.prepare_static,
        inputs=[spec.to_json() for spec in model.signature.inputs],
        backend=config.engine,
        observer=config.observer,
        percentile=config.percentile,
        weights=config.weights,
        narrow_weights=_reduced_range(config, ctx),
        whole_outputs=True,
        merged_branches=True,
        isolated_float=True,
        skip=config.skip,
        route=config.route,
        layers=own_options_of(config.layers),
        stored=_stored_layers(config, model),
        calibrating=True,
    )
    return prepare_model(config, ctx, model, insert_observers, may_be_idle=may_be_idle)


def prepare_qat(config: PrepareQatConfig, ctx: Context, model: Model) -> Model:
    """Implement `quant.prepare_qat`."""
    _check_float(model, ctx.kind)
    _report_reparametrized(ctx, model)
    insert_fake_quant = FunctionRef.to(
        transforms.prepare_qat,
        inputs=[spec.to_json() for spec in model.signature.inputs],
        backend=config.engine,
        weights=config.weights,
        narrow_weights=_reduced_range(config, ctx),
        skip=config.skip,
        route=config.route,
        layers=own_options_of(config.layers),
        stored=_stored_layers(config, model),
        batch_norm=config.batch_norm,
        freeze_at=config.freeze_at,
        learned_step_size=config.learned_step_size,
        scaled_layers=True,
        merged_branches=config.batch_norm == "fold",
        isolated_float=True,
    )
    return prepare_model(config, ctx, model, insert_fake_quant, train=config.batch_norm == "train")


def calibrate(config: CalibrateConfig, ctx: Context, model: Model, data: Data) -> tuple[Model, Ranges]:
    """Implement `quant.calibrate`."""
    module = model.build_prepared()
    if not isinstance(module, GraphModule) or not is_prepared(module):
        raise StageError(f"{ctx.kind} needs a model with observers, from quant.prepare or quant.prepare_qat")
    data.info.check_inputs("the model", model.signature)
    num_samples = num_calibration_samples(ctx.kind, data, config.split, config.num_samples)
    with init_worker_group(ctx, "gloo", on_cuda=False) as workers:
        run_calibration(module, Samples(data, config.split, num_samples, ctx), workers)
    limits = {name: (min_val, max_val) for name, min_val, max_val in _ranges(module)}
    for name, limit in limits.items():
        if not all(math.isfinite(value) for value in limit):
            raise not_finite(ctx, name)
    ctx.metric(num_samples=num_samples, num_ranges=len(limits))
    return model.with_state_dict_of(module), Ranges(limits, num_samples)


@large_blocks_mapped()
def convert(ctx: Context, model: Model) -> Model:
    """Implement `quant.convert`."""
    model = without_float_tensors(model)
    ctx.progress(1, None, "step", doing="converting the layers")
    prepared = calibrated_network(model, ctx.kind)
    standard = _standard(model)
    freeze_ranges(prepared)
    stored = round_weights(prepared, names_to_store(model, prepared), per_channel=True)
    recipe = {"convert": (FunctionRef.to(transforms.to_int8, backend=model.recipe.backend),)}
    converted = standard.with_state_dict_of(prepared).with_recipe(**recipe)

    def check(module: nn.Module) -> None:
        assert isinstance(module, GraphModule), type(module)
        ctx.progress(2, None, "step", doing="comparing the layers")
        inputs = probe_inputs(module, model.signature.inputs)
        check_int8(ctx, module, prepared, inputs, backend=str(model.recipe.backend))

    return _int8(converted, ctx, stored, check)


def calibrated_network(model: Model, kind: str) -> GraphModule:
    """Return the network that conversion takes. Raises StageError if the model is in another state or has no ranges."""
    if not model.recipe.prepare or model.recipe.convert or model.recipe.backend is None:
        form = "already int8" if model.recipe.convert else "float"
        raise StageError(
            f"{kind} got a model that is {form}; it needs one from quant.prepare and quant.calibrate, or from "
            "quant.prepare_qat and train.supervised"
        )
    with quantized_engine(model.recipe.backend):
        prepared = _standard(model).build_prepared()
    assert isinstance(prepared, GraphModule), type(prepared)
    _check_ranges(prepared, kind)
    return prepared


def _standard(model: Model) -> Model:
    """Return a prepared model whose recipe builds the graph that FX converts and exporters take."""
    return model.with_recipe(prepare=tuple(for_conversion(ref) for ref in model.recipe.prepare))


def names_to_store(model: Model, prepared: GraphModule) -> list[str]:
    """Return the layers that `_stored_layers` found, without those that the graph does not call."""
    called = {name for name, _ in prepared.named_modules(remove_duplicate=False)}
    arguments = [reference.arguments.get("stored") for reference in model.recipe.prepare]
    return [str(name) for names in arguments if isinstance(names, list) for name in names if name in called]


def _check_float(model: Model, kind: str) -> None:
    if model.recipe.convert:
        raise StageError(f"{kind} got a model that is already int8 for {model.recipe.backend}; it needs a float one")
    if model.recipe.backend is not None:
        raise StageError(
            f"{kind} got a model that is already prepared for {model.recipe.backend}; it needs a float one"
        )


def _stored_layers(config: BackendConfig, model: Model) -> list[str]:
    """Return the layers without int8 kernels whose weights are stored as int8: tables and recurrent layers."""
    module = model.build()
    types = [type_ for type_ in STORABLE_LAYERS if type_ not in _CONVOLUTIONS]
    return storable_layers(module, layers_to_quantize(module, config.skip, *types))


def _report_reparametrized(ctx: Context, model: Model) -> None:
    if names := reparametrized_layers(model.build()):
        ctx.notice(trained_directly(names, "weight norm, spectral norm"))


def _reduced_range(config: BackendConfig, ctx: Context) -> bool:
    reduced, reason = wants_reduced_range(config.engine)
    if config.reduce_range != "auto":
        reduced, reason = config.reduce_range, "set by the option"
    ctx.metric(reduce_range=reduced, reduce_range_reason=reason)
    return reduced


def _ranges(module: GraphModule) -> Iterator[tuple[str, float, float]]:
    """Yield name, minimum and maximum of each observed tensor; the name is that of its layer or operator."""
    for tensor in observed_tensors(module):
        observer = getattr(tensor.observer, "activation_post_process", tensor.observer)
        yield tensor.name, observer.min_val.item(), observer.max_val.item()


def _check_ranges(prepared: GraphModule, kind: str) -> None:
    ranges = list(_ranges(prepared))
    for name, *limits in ranges:
        if any(math.isnan(limit) for limit in limits):
            raise StageError(
                f"{kind}: the range of {name} is not a number; the training or calibration before it failed"
            )
    empty = [name for name, min_val, max_val in ranges if min_val > max_val]
    if empty:
        raise StageError(
            f"{kind}: {len(empty)} of {len(ranges)} observers saw no data (first: {empty[0]}); run quant.calibrate "
            "after quant.prepare, or train.supervised after quant.prepare_qat"
        )


def _int8(
    model: Model,
    ctx: Context,
    stored: Mapping[str, torch.Tensor],
    check: Callable[[nn.Module], None] | None = None,
) -> Model:
    """Return the model with its int8 tensors, after `check`; report how many layers became int8, which ones are float.

    `stored`: int8 forms of tensors that are float when they are used, by state dict name.
    """
    with quantized_engine(model.recipe.backend), deprecations_silenced():
        with released_memory():
            module = model.build()
            check_runs(ctx, module, _two_samples(module, model.signature.inputs), str(model.recipe.backend))
            packed = pack_state({**module.state_dict(), **stored})
            _report_int8(ctx, model, module, stored)
            del module
        converted = Model(model.recipe, model.tensors, packed)
        if check is not None:
            with released_memory():
                check(converted.build())  # what is stored: state that torch does not save is lost
    return converted


def _two_samples(module: nn.Module, specs: Sequence[TensorSpec]) -> Sequence[torch.Tensor]:
    """Return inputs that a network takes; of zeros, a mask hides all tokens, and their mean is NaN."""
    if all(spec.is_float for spec in specs):
        return zeros(specs, 2)
    try:
        return [tensor[:2] for tensor in probe_inputs(module, specs)]
    except Exception:  # noqa: BLE001  # what it raises for zeros is reported by the run
        return zeros(specs, 2)


def _report_int8(ctx: Context, model: Model, module: nn.Module, stored: Mapping[str, torch.Tensor]) -> None:
    num_int8 = num_int8_layers(module)
    if num_int8 == 0 and not stored:
        raise StageError(f"{ctx.kind}: no layer of this network can be quantized")
    ctx.metric(
        backend=model.recipe.backend,
        int8_layers=num_int8,
        int8_parameters_fraction=round(int8_parameters_fraction(module), 4),
        float_layers=truncated(float_parts(module)),
        stored_as_int8=truncated(stored),
    )
