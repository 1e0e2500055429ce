"""Transforms that a stored recipe refers to: how the quant stages change a network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import StageError
from ptpipe_quant.affine_folding import take_output_scales
from ptpipe_quant.branches import merge_branches, num_sums
from ptpipe_quant.fake_quant import fit_learned_ranges, qat_qconfig, use_fixed_grids
from ptpipe_quant.int8_graph import drop_redundant_clamps, make_clamps_contiguous
from ptpipe_quant.isolated_operators import isolated_operators
from ptpipe_quant.layer_forms import fold_into_transposed
from ptpipe_quant.layer_options import Options, OptionsByLayer, QConfigs, layer_rules
from ptpipe_quant.linear_forms import LinearForm, as_linear
from ptpipe_quant.output_ranges import observe_whole_outputs
from ptpipe_quant.qat_graph import calibration_graph, conversion_graph, training_graph
from ptpipe_quant.repaired import add_float_tensors
from ptpipe_quant.saturation import saturating_layers
from ptpipe_quant.separate_attention import separate_projections
from ptpipe_quant.swin_attention import attention_with_unbiased_keys, keep_keys_unbiased
from ptpipe_quant.trace import TracedNetwork, float_names, leave_float, trace_network
from ptpipe_torch import TensorSpec, transform
from ptpipe_torch.int8.additions import use_additions_of_any_form
from ptpipe_torch.int8.fx import add_observers, convert, fold_batch_norms, qconfig_mapping
from ptpipe_torch.int8.hardswish_grids import use_whole_steps
from ptpipe_torch.int8.layers import replace_layers, swap_dynamic_linears
from ptpipe_torch.int8.observers import ACTIVATION_OBSERVERS, static_qconfig
from ptpipe_torch.int8.output_scales import insert_output_scales
from ptpipe_torch.int8.read_ranges import limit_ranges
from ptpipe_torch.int8.recurrent import RECURRENT_LAYERS, swap_dynamic_recurrent
from ptpipe_torch.int8.ties import round_ties
from ptpipe_torch.int8.transposed import use_computed_forms

QConfigFactory: TypeAlias = Callable[..., Any]

KEPT_FLOAT = "kept_float"
"""Key of a prepared network's `meta`: layers that can't become int8, and why, by name."""
COMPUTED = "computed"
"""Key of a prepared network's `meta`: names of `TracedNetwork.computed_weights`."""
FOLDED = "folded"
"""Key of a prepared network's `meta`: batch norms that are folded although others train."""
MERGED = "merged"
"""Key of a prepared network's `meta`: what `merge_branches` returns."""
NUM_SUMS = "num_sums"
"""Key of a prepared network's `meta`: what `num_sums` returns of the branches that are left."""
REACHED = "reached"
"""Key of a prepared network's `meta`: the layers that each pattern of `layers` decides."""
IDLE = "idle"
"""Key of a prepared network's `meta`: a message for each pattern of `layers` without an effect."""

SCOPES = "scopes"
"""Key of an int8 network's `meta`: the module of the float network that each node comes from, by node name."""


@dataclass(frozen=True)
class _Scheme:
    """Arguments common to both prepare transforms; see the options of the same names in `ptpipe_quant.config`.

    `inputs`: of the network, as `TensorSpec.to_json` writes them; sizes that branches of the network depend on, become
    constants of the graph. `layers`: patterns with options of their own, in order. `stored`: layers without int8
    kernels, whose weights `quant.convert` rounds. `corrected_biases`: layers whose bias `quant.bias_correct` has set;
    those without a bias get one. `repaired`: see `add_float_tensors`. `float_operators`: see `trace_network`.
    `narrow_weights`: of all layers, see `weight_format`. `whole_outputs`: see `observe_whole_outputs`. `scaled_layers`:
    see `take_output_scales`. `merged_branches`: see `merge_branches`. `isolated_float`: see `isolated_operators`.
    `reduce_range`: of former recipes.
    """

    inputs: Sequence[Mapping[str, Any]]
    backend: str
    weights: str
    skip: Sequence[str]
    route: str = "fx"
    layers: Sequence[tuple[str, Options]] = ()
    stored: Sequence[str] = ()
    corrected_biases: Sequence[str] = ()
    repaired: Sequence[str] = ()
    float_operators: Sequence[str] = ()
    narrow_weights: bool = False
    whole_outputs: bool = False
    scaled_layers: bool = False
    merged_branches: bool = False
    isolated_float: bool = False
    reduce_range: bool = False

    def __post_init__(self) -> None:
        if self.reduce_range:
            raise StageError("a former version quantized this model, to 7-bit activations: quantize it again")

    def prepare(self, module: nn.Module, qconfig: QConfigFactory, *, is_qat: bool, fold: bool) -> GraphModule:
        """Trace the network and insert what `qconfig` returns. `fold`: batch norms.

        `qconfig` takes the options of a layer, per_channel and narrow_weights.
        """
        rules = layer_rules(module, self.layers)
        network = self._trace(module, is_qat=is_qat)
        graph, left_float = network.graph, network.float_names
        merged = merge_branches(graph, left_float, mixed_sizes=is_qat) if self.merged_branches else {}
        num_left = num_sums(graph, left_float)
        scales = take_output_scales(graph) if self.scaled_layers else {}
        _add_biases(graph, self.corrected_biases)
        narrow_names = [name for name in saturating_layers(graph, self.backend) if name not in left_float]
        if fold:
            graph = fold_batch_norms(graph)
        folded = fold_into_transposed(graph) if is_qat and not fold else []
        qconfigs = self._qconfigs(qconfig, {})
        mapping = qconfig_mapping(
            self.backend, qconfigs.common, qconfigs.per_tensor, is_qat=is_qat, float_names=left_float
        )
        for name in narrow_names:
            mapping.set_module_name(name, qconfigs.narrow)
        by_layer = OptionsByLayer(rules, network, graph)
        by_layer.use_in(mapping, functools.partial(self._qconfigs, qconfig), narrow_names)
        reached, idle = by_layer.reached(), by_layer.idle_weights()
        prepared = add_observers(graph, network.scopes, mapping, is_qat=is_qat)
        idle += by_layer.idle_observers(prepared, ACTIVATION_OBSERVERS)
        if self.whole_outputs:
            observe_whole_outputs(prepared, by_layer.with_own_observer())
        insert_output_scales(prepared, scales)
        add_float_tensors(prepared, self.repaired)
        prepared.meta |= {
            KEPT_FLOAT: network.kept_float,
            COMPUTED: network.computed_weights,
            FOLDED: folded,
            MERGED: merged,
            NUM_SUMS: num_left,
            REACHED: reached,
            IDLE: idle,
        }
        return prepared

    def _trace(self, module: nn.Module, *, is_qat: bool) -> TracedNetwork:
        inputs, leaves = tuple(map(TensorSpec.from_json, self.inputs)), float_names(module, self.skip)
        purpose: Any = "qat" if is_qat else "static"
        network = trace_network(module, inputs, leaves, self.route, self.float_operators, purpose=purpose)
        if self.isolated_float:
            isolated = isolated_operators(network.graph, network.scopes, network.float_names)
            network.float_names.extend(leave_float(isolated, network.scopes))
        return network

    def _qconfigs(self, qconfig: QConfigFactory, layer: Options) -> QConfigs:
        """Return what operators are quantized with; `layer`: their own options."""
        per_channel = layer.get("weights", self.weights) == "per_channel"
        return QConfigs(
            *(
                qconfig(layer, per_channel=granularity, narrow_weights=narrow or self.narrow_weights)
                for granularity, narrow in ((per_channel, False), (False, False), (per_channel, True))
            )
        )


def _add_biases(graph: GraphModule, names: Sequence[str]) -> None:
    for name in names:
        layer: Any = graph.get_submodule(name)
        if layer.bias is None:
            num_outputs = getattr(layer, "out_channels", None) or layer.out_features
            layer.bias = nn.Parameter(torch.zeros(num_outputs))


@transform
def prepare_static(
    module: nn.Module, *, observer: str, calibrating: bool, percentile: float | None = None, **scheme: Any
) -> GraphModule:
    """Fold batch norms and insert observers.

    `observer`, `percentile`: see the options of `quant.prepare`.
    `calibrating`: return the graph to calibrate, else the one to convert, which has the same state dict.
    `scheme`: inputs, backend, weights, narrow_weights, whole_outputs, merged_branches, skip, route, layers, stored.
    """

    def qconfig(layer: Options, **choices: bool) -> Any:
        own = layer.get("observer", observer)
        limit = layer.get("percentile", percentile if own == "percentile" else None)
        return static_qconfig(own, **choices, **({} if limit is None else {"percentile": limit}))

    prepared = _Scheme(**scheme).prepare(module, qconfig, is_qat=False, fold=False)
    use_whole_steps(prepared)
    limit_ranges(prepared)
    return calibration_graph(prepared) if calibrating else prepared


@transform
def prepare_qat(
    module: nn.Module, *, batch_norm: str, freeze_at: float | None, learned_step_size: bool = False, **scheme: Any
) -> GraphModule:
    """Insert fake quantization.

    `freeze_at`: fraction of the training after which ranges and batch norm statistics are frozen; None returns the
    graph to convert, not the one to train, with the same state dict. `batch_norm`: `fold` or `train`; those behind
    transposed convolutions are folded in any case. `learned_step_size`: see `qat_qconfig`. `scheme`: inputs, backend,
    weights, narrow_weights, scaled_layers, merged_branches, skip, route, layers, stored.
    """

    def qconfig(_: Options, **choices: bool) -> Any:
        freeze = 1.0 if freeze_at is None else freeze_at
        return qat_qconfig(**choices, freeze_at=freeze, learned_step_size=learned_step_size)

    unbiased = attention_with_unbiased_keys(module)
    prepared = _Scheme(**scheme).prepare(module, qconfig, is_qat=True, fold=batch_norm == "fold")
    keep_keys_unbiased(prepared, unbiased)
    if not learned_step_size:  # its gradients are those of any grid
        use_whole_steps(prepared)
    limit_ranges(prepared)
    fit_learned_ranges(prepared)
    use_fixed_grids(prepared)
    return conversion_graph(prepared) if freeze_at is None else training_graph(prepared, freeze_at=freeze_at)


@transform
def to_int8(module: nn.Module, *, backend: str) -> GraphModule:
    """Convert a prepared network to int8 layers for the selected engine, which must be `backend`."""
    assert isinstance(module, GraphModule), type(module)
    scopes = {name: path for name, (path, _) in module.meta["_observed_graph_module_attrs"].node_name_to_scope.items()}
    drop_redundant_clamps(module)
    use_computed_forms(module, backend)
    converted = convert(module)
    if backend == "qnnpack":
        make_clamps_contiguous(converted)
    round_ties(converted, backend)
    use_additions_of_any_form(converted)
    converted.meta[SCOPES] = scopes
    return converted


@transform
def separate_attention(module: nn.Module, *, layers: Sequence[str]) -> nn.Module:
    """Let these attention layers call linear layers."""
    return separate_projections(module, layers)


@transform
def use_linear_layers(module: nn.Module, *, forms: Mapping[str, LinearForm]) -> nn.Module:
    """Let these layers, by name, be the `nn.Linear` that computes the same."""
    form_of = {module.get_submodule(name): form for name, form in forms.items()}
    return replace_layers(module, forms, lambda layer: as_linear(layer, form_of[layer]))


@transform
def to_dynamic_int8(module: nn.Module, *, weights: str, narrow_weights: bool, layers: Sequence[str]) -> nn.Module:
    """Quantize the weights of these linear and recurrent layers to int8, or to -64 ... 64 (`narrow_weights`).

    Inputs and states are quantized at run time by each batch's range.
    """
    recurrent = [name for name in layers if isinstance(module.get_submodule(name), RECURRENT_LAYERS)]
    linear = [name for name in layers if name not in recurrent]
    options = {"per_channel": weights == "per_channel", "narrow_weights": narrow_weights}
    with torch.no_grad():
        swap_dynamic_recurrent(module, recurrent, **options)
        return swap_dynamic_linears(module, linear, **options)
