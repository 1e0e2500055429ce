"""Replace layers by equal ones that FX quantization can fuse, or that it leaves alone.

Shape legend: K output channels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import SHAPE
from ptpipe_quant.shared_layers import tied_copy
from ptpipe_torch.model.signature import TensorSpec

F = nn.functional

_BY_DIMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
"""Batch norms by the number of dimensions of their input."""
_BATCH_NORMS = tuple(_BY_DIMS.values())
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class BatchStatisticsNorm(nn.Module):
    """Batch normalization by the batch's statistics, in eval mode too: it can be neither folded nor int8."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize activations of shape (N, K, ...)."""
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


class TokenNorm(nn.BatchNorm1d):
    """A batch norm whose channels are tokens, not what the linear layer in front of it returns for each of them."""


def use_foldable_batch_norms(graph: GraphModule) -> None:
    """Replace batch norms that FX would fail on: without running statistics, or without gamma and beta.

    And those that FX would fold into a linear layer whose outputs are other channels than theirs. `nn.SyncBatchNorm`,
    which FX does not know, becomes the batch norm for its input: `parallel.sync_bn` synchronizes that in training.
    """
    for node in graph.graph.nodes:
        layer = _layer(graph, node)
        num_dims = len(node.meta.get(SHAPE, ()))
        if type(layer) is nn.SyncBatchNorm and num_dims in _BY_DIMS:
            batch_norm: Any = copy.copy(layer)
            batch_norm.__class__ = _BY_DIMS[num_dims]
            graph.set_submodule(str(node.target), batch_norm)
            layer = batch_norm
        if type(layer) not in _BATCH_NORMS:
            continue
        if layer.running_mean is None:
            graph.set_submodule(str(node.target), BatchStatisticsNorm(layer))
        elif layer.weight is None:
            layer.affine = True
            layer.weight = nn.Parameter(torch.ones_like(layer.running_var), requires_grad=False)
            layer.bias = nn.Parameter(torch.zeros_like(layer.running_mean), requires_grad=False)
        if layer.running_mean is not None and _is_of_tokens(graph, node):
            norm = copy.copy(layer)
            norm.__class__ = TokenNorm
            graph.set_submodule(str(node.target), norm)


def _is_of_tokens(graph: GraphModule, norm: Node) -> bool:
    source = norm.all_input_nodes[0]
    return type(_layer(graph, source)) is nn.Linear and len(source.meta.get(SHAPE, ())) > 2


def use_output_padding(graph: GraphModule, inputs: Sequence[TensorSpec]) -> None:
    """Give transposed convolutions that are called with an `output_size` the `output_padding` that leads to it.

    int8 layers and exporters take no size. It is known where all axes of the inputs but that of the batch are fixed.
    """
    sized = transposed_of_size(graph)
    if any(spec.symbols for spec in inputs):
        return
    for node in sized:
        layer: Any = tied_copy(_layer(graph, node))
        sizes = zip(
            *(each.meta[SHAPE][-len(layer.kernel_size) :] for each in (node, node.all_input_nodes[0])), strict=True
        )
        layer.output_padding = tuple(
            size - ((before - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
            for (size, before), stride, padding, dilation, kernel in zip(
                sizes, layer.stride, layer.padding, layer.dilation, layer.kernel_size, strict=True
            )
        )
        graph.set_submodule(str(node.target), layer)
        node.args = node.args[:1]
    if sized:
        graph.graph.eliminate_dead_code()  # what the sizes were computed by


def transposed_of_size(graph: GraphModule) -> list[Node]:
    """Return the calls of transposed convolutions with an `output_size`."""
    calls = graph.graph.find_nodes(op="call_module")
    return [node for node in calls if len(node.args) > 1 and isinstance(_layer(graph, node), TRANSPOSED)]


def fold_into_transposed(graph: GraphModule) -> list[str]:
    """Fold each batch norm behind a transposed convolution into its weights: torch has no QAT layer for the pair.

    Return the names of these batch norms.
    """
    names = []
    for node in list(graph.graph.nodes):
        source = node.args[0] if node.args else None
        if type(norm := _layer(graph, node)) not in _BATCH_NORMS or not isinstance(source, Node):
            continue
        if isinstance(layer := _layer(graph, source), TRANSPOSED) and len(source.users) == 1:
            folded = nn.utils.fuse_conv_bn_eval(layer.eval(), norm.eval(), transpose=True)
            graph.set_submodule(str(source.target), folded)
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
            names.append(str(node.target))
    return names


def _layer(graph: GraphModule, node: Node) -> Any:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None
