"""SmoothQuant: move differences between the channels of activations into weights.

Source: G. Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models,
ICML 2023, equation 4: s = max|X|^alpha / max|W|^(1 - alpha) for each channel; X / s, W * s.

Shape legend: C channels of an activation, its last axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe import Context, StageError
from ptpipe_quant.repairs.channels import Edge, EdgeFinder, unscalable_text
from ptpipe_quant.repairs.config import SmoothConfig
from ptpipe_quant.repairs.float_model import (
    changeable_names,
    check_float,
    check_same_function,
    traced,
    with_changed,
)
from ptpipe_quant.repairs.network_inputs import network_inputs
from ptpipe_torch import Data, Model
from ptpipe_torch.model.example_inputs import copies
from ptpipe_torch.runtime import torch_threads


@torch.no_grad()
def smooth(config: SmoothConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Implement `quant.smooth`."""
    check_float(model, ctx.kind)
    graph = traced(model, config.skip)
    edges, refused = EdgeFinder(graph, changeable_names(model, config.skip)).edges(nn.LayerNorm, nn.Linear)
    if not edges:
        raise StageError(f"{ctx.kind}: no layer norm or linear layer can be smoothed: {unscalable_text(refused)}")
    sources = {edge.producer.node: edge for edge in edges}
    recorder = _Recorder(graph, sources)
    with torch_threads(None):
        for inputs in network_inputs(ctx, model, data, config.split, config.num_samples):
            recorder.run(*copies(inputs))
    ratios = []
    for node, edge in sources.items():
        peaks_C = recorder.peaks[node]
        if not peaks_C.isfinite().all():
            raise StageError(f"{ctx.kind}: the output of {edge.producer.name} is not finite; the model is broken")
        scale_C = _scale(edge, peaks_C, config.alpha)
        edge.scale(scale_C)
        ratios.append((_peak_ratio(peaks_C), _peak_ratio(peaks_C / scale_C)))
    smoothed = with_changed(model, graph, dict.fromkeys(name for edge in edges for name in edge.changed_parameters()))
    check_same_function(ctx, model, smoothed)
    ctx.metric(
        smoothed_layers=sum(len(edge.consumers) for edge in edges),
        worst_channel_ratio_before=max(before for before, _ in ratios),
        worst_channel_ratio=max(after for _, after in ratios),
        left_alone=[f"{name}: {reason}" for name, reason in list(refused.items())[:20]],
    )
    return smoothed


def _scale(edge: Edge, peaks_C: torch.Tensor, alpha: float) -> torch.Tensor:
    scale_C = peaks_C**alpha / edge.input_ranges() ** (1 - alpha)
    # A channel that is never used, or has no weights, has nothing to move.
    return torch.where(scale_C.isfinite() & (scale_C > 0), scale_C, 1.0)


def _peak_ratio(peaks_C: torch.Tensor) -> float:
    positive = peaks_C[peaks_C > 0]
    return (positive.max() / positive.median()).item() if len(positive) else 1.0


class _Recorder(Interpreter):
    """Runs a network and keeps the largest absolute value of each channel of some nodes' outputs."""

    def __init__(self, graph: GraphModule, nodes: Mapping[Node, Any]) -> None:
        super().__init__(graph)
        self._nodes = nodes
        self.peaks: dict[Node, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self._nodes:
            peaks_C = result.abs().flatten(0, -2).amax(0)
            self.peaks[n] = torch.maximum(self.peaks[n], peaks_C) if n in self.peaks else peaks_C
        return result
