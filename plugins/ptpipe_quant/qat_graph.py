"""Graph passes over a prepared network for training and calibration: same values, same state dict, less work.

FX inserts an observer (or fake quantization) wherever the int8 network has an int8 tensor, also where two tensors
share one scale: before and after max pooling, flattening, ReLU6, concatenation. Running both costs time, observes one
tensor twice a batch, and extends the range before a ReLU6 to values that ReLU6 clamps. Selecting elements and clamping
commute with rounding to a grid, so the observer in front is removed here; where that has other readers, or dropout is
in between, the one behind is. For training, fused layers are replaced by ones that make fewer passes over activations,
and ReLU is moved behind max pooling, where its input is smaller: the maximum of ReLUs is the ReLU of the maximum,
gradient included.

The graph that is converted to int8 is the unchanged one but for regions without autocast; it takes the state dict of
this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.fake_quant import ActivationFakeQuant
from ptpipe_quant.float_nodes import MOVES
from ptpipe_quant.qat_layers import QatLayer, freeze_batch_norm, qat_layer
from ptpipe_torch.int8.observers import observer_at, observes_range, operator_at
from ptpipe_torch.int8.output_scales import replace_product, scaled_layers
from ptpipe_torch.traced_autocast import has_autocast_regions, remove_autocast_regions

F = nn.functional

# Each output element is an input element, clamped or not, so rounding to a grid can come afterwards.
_SELECTING_LAYERS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Identity, nn.PixelShuffle,
)  # fmt: skip
_SELECTING_FUNCTIONS = (
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.relu, F.relu6, F.hardtanh, torch.clamp, torch.flatten, torch.cat,
    torch.stack, torch.squeeze, torch.unsqueeze, torch.transpose,
)  # fmt: skip
_SELECTING_METHODS = (
    "clamp", "contiguous", "detach", "flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view",
)  # fmt: skip
_MOVES = (*MOVES, "detach", "view")
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d)


def calibration_graph(prepared: GraphModule) -> GraphModule:
    """Let each tensor be observed once, in place; return the graph."""
    _merge_observers(prepared)
    _round_once(prepared)
    prepared.recompile()
    return prepared


def training_graph(prepared: GraphModule, *, freeze_at: float) -> GraphModule:
    """Rewrite the graph for training, in place; return it. Parameters and state dict stay the same.

    `freeze_at`: fraction of the training after which batch norms use their running statistics.
    """
    restored = _restore_dropout(prepared)
    _merge_observers(prepared)
    _round_once(prepared, restored)
    _mark_first_calls(prepared)
    for target, calls in _calls_by_target(prepared).items():
        if replacement := qat_layer(prepared.get_submodule(target), freeze_at):
            prepared.set_submodule(target, replacement)
            if len(calls) == 1:
                _move_relu_behind_pool(prepared, calls[0], replacement)
    _scale_in_layers(prepared)
    _freeze_batch_norms(prepared, freeze_at)
    prepared.recompile()
    return prepared


def conversion_graph(prepared: GraphModule) -> GraphModule:
    """Remove from the graph, in place, what has an effect with autocast alone; return it."""
    if has_autocast_regions(prepared.graph):
        remove_autocast_regions(prepared.graph)
        prepared.recompile()
    return prepared


def _merge_observers(prepared: GraphModule) -> None:
    """Remove each observer whose output reaches only the same observer, through selecting operators."""
    graph = prepared.graph
    for node in reversed(list(graph.nodes)):
        observer = range_observer_at(prepared, node)
        if observer is not None and reaches_only(prepared, node, observer):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def reaches_only(prepared: GraphModule, node: Node, observer: nn.Module) -> bool:
    """Return whether every path from this node reaches the observer through selecting operators only."""
    return bool(node.users) and all(
        _selects(prepared, user) and (_is_observed(prepared, user, observer) or reaches_only(prepared, user, observer))
        for user in node.users
    )


def observed_behind(prepared: GraphModule, node: Node, observer: nn.Module) -> set[Node]:
    """Return where the observer observes elements of this node's output that selecting operators have selected."""
    found = set[Node]()
    waiting = [node]
    while waiting:
        users = waiting.pop().users
        calls = {user for user in users if observer_at(prepared, user) is observer} - found
        found |= calls
        waiting += [*calls, *(user for user in users if _selects(prepared, user))]
    return found


def _is_observed(prepared: GraphModule, node: Node, observer: nn.Module) -> bool:
    return bool(node.users) and all(observer_at(prepared, user) is observer for user in node.users)


def _selects(prepared: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        layer = prepared.get_submodule(str(node.target))
        return type(layer) in _SELECTING_LAYERS and not getattr(layer, "return_indices", False)
    if node.op == "call_method":
        return node.target in _SELECTING_METHODS
    return node.target in _SELECTING_FUNCTIONS


def range_observer_at(prepared: GraphModule, node: Node) -> nn.Module | None:
    """Return the observer or fake quantization that this node calls, if its range comes from data."""
    observer = observer_at(prepared, node)
    return observer if observer is not None and observes_range(observer) else None


def _restore_dropout(prepared: GraphModule) -> list[nn.Module]:
    """Restore dropout, and other layers that act in training alone; return those that do."""
    restored = []
    for target in _calls_by_target(prepared):
        layer = prepared.get_submodule(target).__dict__.get("_for_training")
        if layer is not None and not (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p == 0):
            prepared.set_submodule(target, layer)
            restored.append(layer)
    return restored


def _round_once(prepared: GraphModule, dropout: Collection[nn.Module] = ()) -> None:
    """Remove observers of what the same one has observed in front of moves, or of dropout.

    That is rounded already, and the int8 network has no dropout whose output to round.
    """
    for node in [node for node in prepared.graph.nodes if node.op == "call_module"]:
        if (observer := observer_at(prepared, node)) is None:
            continue
        source = node.all_input_nodes[0]
        while _keeps_elements(prepared, source, dropout):
            source = source.all_input_nodes[0]
        if observer_at(prepared, source) is observer:
            node.replace_all_uses_with(node.all_input_nodes[0])
            prepared.graph.erase_node(node)


def _keeps_elements(prepared: GraphModule, node: Node, dropout: Collection[nn.Module]) -> bool:
    if node.op == "call_module":
        layer = prepared.get_submodule(str(node.target))
        return type(layer) is nn.Identity or layer in dropout
    return node.target in _MOVES and len(node.all_input_nodes) == 1


def _mark_first_calls(prepared: GraphModule) -> None:
    """Pass `first` to fake quantization that observes several tensors in one forward pass."""
    calls: dict[int, list[Node]] = defaultdict(list)
    for node in prepared.graph.nodes:
        if isinstance(fake_quant := observer_at(prepared, node), ActivationFakeQuant):
            calls[id(fake_quant)].append(node)
    for nodes in calls.values():
        for position, node in enumerate(nodes if len(nodes) > 1 else []):
            node.kwargs = {**node.kwargs, "first": position == 0}


def _calls_by_target(prepared: GraphModule) -> dict[str, list[Node]]:
    calls: dict[str, list[Node]] = defaultdict(list)
    for node in prepared.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)].append(node)
    return calls


def _scale_in_layers(prepared: GraphModule) -> None:
    """Pass to each layer what its output is multiplied by, in place of the product."""
    for call, product in scaled_layers(prepared).items():
        if isinstance(prepared.get_submodule(str(call.target)), QatLayer):
            call.args = (*call.args, product.args[1])
            replace_product(prepared, call, product)


def _freeze_batch_norms(prepared: GraphModule, freeze_at: float) -> None:
    """Let every batch norm freeze that no QatLayer freezes: fused with ReLU alone, or inside other layers."""
    modules = list(prepared.modules())
    fused = {id(layer.bn) for layer in modules if isinstance(layer, QatLayer) and hasattr(layer, "bn")}
    for layer in modules:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and id(layer) not in fused:
            freeze_batch_norm(layer, freeze_at)


def _move_relu_behind_pool(prepared: GraphModule, node: Node, layer: Any) -> None:
    users = list(node.users)
    if not getattr(layer, "relu", False) or len(users) != 1 or not _is_max_pool(prepared, users[0]):
        return
    (pool,) = users
    layer.relu = False
    with prepared.graph.inserting_after(pool):
        # In place: max pooling's gradient needs its input and the indices of the maxima, not its output.
        relu = prepared.graph.call_function(F.relu, (pool,), {"inplace": True})
    pool.replace_all_uses_with(relu, delete_user_cb=lambda user: user is not relu)


def _is_max_pool(prepared: GraphModule, node: Node) -> bool:
    return operator_at(prepared, node) in _MAX_POOLS and _selects(prepared, node)
