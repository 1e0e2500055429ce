"""Implementation of export.executorch: export a torch model to an ExecuTorch program, and compare the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ptpipe import Context, StageError
from ptpipe_executorch.config import ExecuTorchConfig
from ptpipe_executorch.model import PROGRAM, ExecuTorchModel, missing_executorch
from ptpipe_executorch.xnnpack import Lowered, Operator, lower
from ptpipe_torch import BATCH, Data, Model, Signature
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.layers import dynamic_weights, replace_layers, stored_weights, use_rounded_weights
from ptpipe_torch.int8.recurrent import recurrent_weights
from ptpipe_torch.int8.reference_nodes import dequantized
from ptpipe_torch.int8.signed_form import SignedDynamicLinear, use_signed_integers
from ptpipe_torch.model.outputs import returned_names
from ptpipe_torch.parity.comparison import ComparedSamples, Exported, check_exportable, compare_outputs, figures_of
from ptpipe_torch.runtime import released_memory

_LAYERS = {"convolution": "convolutions", "linear": "linear layers", "addmm": "linear layers", "mm": "linear layers"}
"""What the record calls the operators with weights."""


@dataclass(frozen=True)
class _Network:
    """What is exported."""

    module: nn.Module
    precision: str
    """As in `ExecuTorchModel.precision`."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """The quantization step of each quantized output."""
    int8: nn.Module | None = None
    """As in `Exported`."""


def export_model(config: ExecuTorchConfig, ctx: Context, model: Model, data: Data) -> ExecuTorchModel:
    """Implement the stage `export.executorch`."""
    if message := missing_executorch():
        raise StageError(message)
    check_exportable(ctx, model, data, config.split)
    samples = ComparedSamples(data, config.split, config.num_samples, ctx.seed)
    # Pictures of any size would be of any up to the largest, for which memory is reserved.
    signature, path = model.signature.with_sizes_of(data.info.signature.inputs), ctx.scratch / PROGRAM
    ctx.progress(1, None, "step", doing="exporting the network")
    with torch.random.fork_rng(devices=[]), released_memory():  # converted layers draw random initial weights
        network = _network(model)
        sizes = {size: config.max_length for spec in signature.inputs for size in spec.shape if isinstance(size, str)}
        lowered = lower(network.module, signature, sizes | {BATCH: config.max_batch_size})
        path.write_bytes(lowered.content)
        steps, precision, int8 = network.steps, network.precision, network.int8
        del network
    file = ExecuTorchModel(path, signature, precision, lowered.outputs, config.max_batch_size)
    ctx.metric(size_bytes=file.size_bytes)
    _report(ctx, lowered, precision)
    parities = compare_outputs(ctx, Exported(file, "ExecuTorch program", steps, int8=int8), model, samples)
    ctx.metric(**figures_of(parities))
    for parity in parities.values():
        parity.check()
    return file


def _network(model: Model) -> _Network:
    if not model.recipe.backend:
        return _Network(model.build(), "float32")
    with quantized_engine(model.recipe.backend):
        if not model.recipe.prepare:
            return _Network(_dynamic(model, model.build_prepared(), model.build()), "int8 dynamic")
        int8 = model.build()
        reference, weights = reference_network(model.build_prepared(), int8)
    use_signed_integers(reference, weights)
    return _Network(reference, "int8", _output_steps(reference, model.signature), int8)


def _output_steps(reference: GraphModule, signature: Signature) -> dict[str, float]:
    returned = reference.graph.output_node().args[0]
    names = returned_names(returned, signature.outputs)
    steps = {}
    for name, node in zip(names, tree_leaves(returned), strict=True):
        if (quantize := dequantized(node)) is not None:
            scale: Any = quantize.args[1]
            steps[name] = float(scale)
    return steps


def _dynamic(model: Model, network: nn.Module, int8: nn.Module) -> nn.Module:
    """Return the float network of a dynamic model with layers that quantize their input. Consumes `network`."""
    if layers := sorted({name.rpartition(".")[0] for name in recurrent_weights(int8)}):
        raise StageError(
            f"{', '.join(layers)}: XNNPACK has no recurrent layers in int8: leave them float (`skip` of quant.dynamic)"
        )
    for reference in model.recipe.convert[:-1]:  # the last one quantizes
        network = reference.resolve("transform")(network, **reference.arguments)
    use_rounded_weights(network, stored_weights(model.int8_tensors or {}, int8))
    weights = dynamic_weights(int8)
    if not weights:
        raise StageError(f"no layer of this {model.recipe.backend} model is quantized in a way that can be exported")
    by_layer = {network.get_submodule(name.removesuffix(".weight")): (name, own) for name, own in weights.items()}

    def signed(layer: nn.Linear) -> nn.Module:
        return SignedDynamicLinear(*by_layer[layer], layer.bias)

    names = [name.removesuffix(".weight") for name in weights]
    return replace_layers(network, names, signed)


def _report(ctx: Context, lowered: Lowered, precision: str) -> None:
    """Record which operators and layers XNNPACK computes, and how; name those that it does not, with the reasons."""
    by_place = {
        "XNNPACK computes in int8": [operator for operator in lowered.operators if operator.precision == "int8"],
        "XNNPACK computes in float": [operator for operator in lowered.operators if operator.precision == "float"],
        "ExecuTorch's own kernels compute": [operator for operator in lowered.operators if operator.reason],
    }
    int8, _, portable = by_place.values()
    ctx.metric(
        num_delegates=lowered.num_delegates,
        num_int8_operators=len(int8),
        num_delegated_operators=len(lowered.operators) - len(portable),
        num_portable_operators=len(portable),
        delegation=_layer_counts(lowered.operators, lambda operator: not operator.reason),
    )
    if precision != "float32":
        coverage = _layer_counts(lowered.operators, lambda operator: operator.precision == "int8")
        ctx.metric(integer_coverage=coverage)
    for place, operators in by_place.items():
        counts = Counter(operator.type for operator in operators)
        ctx.log(f"{place}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items())) or 'nothing'}")
    for operator in portable:
        ctx.log(f"{operator.layer} ({operator.type}) is not given to XNNPACK: {operator.reason}")
    left = [operator.layer for operator in portable if operator.type in _LAYERS]
    if left:
        ctx.notice(
            f"XNNPACK does not compute {', '.join(left)}: the log has the reasons, and ExecuTorch's own are slow"
        )


def _layer_counts(operators: Sequence[Operator], counts: Callable[[Operator], bool]) -> str:
    """Return of how many layers with weights something is true: `20 of 20 convolutions, 1 of 1 linear layers`."""
    kinds = [(_LAYERS[operator.type], counts(operator)) for operator in operators if operator.type in _LAYERS]
    total = Counter(kind for kind, _ in kinds)
    return ", ".join(f"{kinds.count((kind, True))} of {number} {kind}" for kind, number in total.items())
