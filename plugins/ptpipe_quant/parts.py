"""The transforms that a stored recipe names: what the quant stages do to a network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_quant.fake_quant import qat_qconfig
from ptpipe_quant.int8_graph import drop_idle_clamps, lay_out_for_qnnpack
from ptpipe_quant.network import as_graph, float_names, layers_to_quantize
from ptpipe_quant.torch_ao import (
    add_observers,
    convert,
    fold_batch_norms,
    qconfig_mapping,
    static_qconfig,
    swap_dynamic_linears,
)
from ptpipe_quant.training_graph import for_calibration, for_training
from ptpipe_torch import transform


@transform
def prepare_static(
    module: nn.Module,
    *,
    backend: str,
    observer: str,
    weights: str,
    reduce_range: bool,
    skip: Sequence[str],
    calibrating: bool,
) -> GraphModule:
    """Fold batch norms and add reporters. `calibrating`: the graph to show data to, else the one that converts."""
    names = float_names(module, skip)
    graph, scopes = as_graph(module, names)
    qconfig, per_tensor = (
        static_qconfig(observer, per_channel=per_channel, reduce_range=reduce_range)
        for per_channel in (weights == "per_channel", False)
    )
    mapping = qconfig_mapping(backend, qconfig, per_tensor, is_qat=False, float_names=names)
    prepared = add_observers(graph, scopes, mapping, is_qat=False)
    return for_calibration(prepared) if calibrating else prepared


@transform
def prepare_qat(
    module: nn.Module,
    *,
    backend: str,
    weights: str,
    reduce_range: bool,
    skip: Sequence[str],
    batch_norm: str,
    freeze_at: float | None,
) -> GraphModule:
    """Add fake quantization. Without `freeze_at`: not the graph to train but the one that converts, of the same state.

    `freeze_at`: share of the training from which on ranges and batch norm statistics stay as they are.
    """
    names = float_names(module, skip)
    graph, scopes = as_graph(module, names)
    if batch_norm == "fold":
        graph = fold_batch_norms(graph)
    qconfig, per_tensor = (
        qat_qconfig(
            per_channel=per_channel, reduce_range=reduce_range, freeze_at=1.0 if freeze_at is None else freeze_at
        )
        for per_channel in (weights == "per_channel", False)
    )
    mapping = qconfig_mapping(backend, qconfig, per_tensor, is_qat=True, float_names=names)
    prepared = add_observers(graph, scopes, mapping, is_qat=True)
    return prepared if freeze_at is None else for_training(prepared, freeze_at=freeze_at)


@transform
def to_int8(module: nn.Module, *, backend: str) -> GraphModule:
    """Make int8 layers of a prepared network, for the engine set now."""
    assert isinstance(module, GraphModule), type(module)
    drop_idle_clamps(module)
    converted = convert(module)
    if backend == "qnnpack":
        lay_out_for_qnnpack(converted)
    return converted


@transform
def to_dynamic_int8(module: nn.Module, *, weights: str, reduce_range: bool, skip: Sequence[str]) -> nn.Module:
    """Give linear layers int8 weights; their inputs are quantized at run time, by each batch's own range."""
    names = layers_to_quantize(module, skip, nn.Linear)
    with torch.no_grad():
        return swap_dynamic_linears(module, names, per_channel=weights == "per_channel", reduce_range=reduce_range)
