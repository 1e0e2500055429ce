"""Transforms that a stored recipe refers to: how the quant stages change a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_quant.fake_quant import qat_qconfig
from ptpipe_quant.int8_graph import drop_redundant_clamps, make_clamps_contiguous
from ptpipe_quant.qat_graph import calibration_graph, training_graph
from ptpipe_quant.trace import float_names, layers_to_quantize, trace_network
from ptpipe_torch import transform
from ptpipe_torch.int8.fx import add_observers, convert, fold_batch_norms, qconfig_mapping
from ptpipe_torch.int8.layers import swap_dynamic_linears
from ptpipe_torch.int8.observers import static_qconfig


@dataclass(frozen=True)
class _Scheme:
    """Arguments common to both prepare transforms; see the options of the same names in `ptpipe_quant.config`."""

    backend: str
    weights: str
    reduce_range: bool
    skip: Sequence[str]

    def prepare(self, module: nn.Module, qconfig: Callable[..., Any], *, is_qat: bool, fold: bool) -> GraphModule:
        """Trace the network and insert what `qconfig(per_channel=, reduce_range=)` returns. `fold`: batch norms."""
        names = float_names(module, self.skip)
        graph, scopes = trace_network(module, names)
        if fold:
            graph = fold_batch_norms(graph)
        common, per_tensor = (
            qconfig(per_channel=per_channel, reduce_range=self.reduce_range)
            for per_channel in (self.weights == "per_channel", False)
        )
        mapping = qconfig_mapping(self.backend, common, per_tensor, is_qat=is_qat, float_names=names)
        return add_observers(graph, scopes, mapping, is_qat=is_qat)


@transform
def prepare_static(module: nn.Module, *, observer: str, calibrating: bool, **scheme: Any) -> GraphModule:
    """Fold batch norms and insert observers.

    `calibrating`: return the graph to calibrate, else the one to convert, which has the same state dict.
    `scheme`: backend, weights, reduce_range, skip.
    """

    def qconfig(*, per_channel: bool, reduce_range: bool) -> Any:
        return static_qconfig(observer, per_channel=per_channel, reduce_range=reduce_range)

    prepared = _Scheme(**scheme).prepare(module, qconfig, is_qat=False, fold=False)
    return calibration_graph(prepared) if calibrating else prepared


@transform
def prepare_qat(module: nn.Module, *, batch_norm: str, freeze_at: float | None, **scheme: Any) -> GraphModule:
    """Insert fake quantization.

    `freeze_at`: fraction of the training after which ranges and batch norm statistics are frozen; None returns the
    graph to convert, not the one to train, with the same state dict. `scheme`: backend, weights, reduce_range, skip.
    """

    def qconfig(*, per_channel: bool, reduce_range: bool) -> Any:
        end = 1.0 if freeze_at is None else freeze_at
        return qat_qconfig(per_channel=per_channel, reduce_range=reduce_range, freeze_at=end)

    prepared = _Scheme(**scheme).prepare(module, qconfig, is_qat=True, fold=batch_norm == "fold")
    return prepared if freeze_at is None else training_graph(prepared, freeze_at=freeze_at)


@transform
def to_int8(module: nn.Module, *, backend: str) -> GraphModule:
    """Convert a prepared network to int8 layers for the selected engine, which must be `backend`."""
    assert isinstance(module, GraphModule), type(module)
    drop_redundant_clamps(module)
    converted = convert(module)
    if backend == "qnnpack":
        make_clamps_contiguous(converted)
    return converted


@transform
def to_dynamic_int8(module: nn.Module, *, weights: str, reduce_range: bool, skip: Sequence[str]) -> nn.Module:
    """Quantize the weights of linear layers to int8; inputs are quantized at run time by the range of each batch."""
    names = layers_to_quantize(module, skip, nn.Linear)
    with torch.no_grad():
        return swap_dynamic_linears(module, names, per_channel=weights == "per_channel", reduce_range=reduce_range)
