"""A prepared network as it is trained and calibrated: the same numbers and the same state dict, with less work.

torch.ao puts an observer (or a fake quantization) at each place where int8 will be, also where two places share one
scale: before and after max pooling, flattening, ReLU6, concatenation. Running both costs time, watches one tensor
twice a batch, and lets the range in front of a ReLU6 stretch over values that it cuts away. Selecting elements and
clamping commute with rounding to a grid, so the places in front are left out here. For training, the fused layers
are replaced by ones that do not touch whole activations more often than needed, and ReLU waits until max pooling
has made its input smaller: the maximum of ReLUs is the ReLU of the maximum, gradient included.

What converts to int8 is the graph as torch.ao made it; it takes the state dict of this one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.torch_ao import is_watching
from ptpipe_quant.training_layers import freezing_batch_norm, training_layer

F = nn.functional

# Each output element is one of the input elements, or one clamped: rounding to a grid may as well come afterwards.
_SELECTING_LAYERS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Identity, nn.PixelShuffle,
)  # fmt: skip
_SELECTING_FUNCTIONS = (
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.relu, F.relu6, F.hardtanh, torch.clamp, torch.flatten, torch.cat,
    torch.stack, torch.squeeze, torch.unsqueeze, torch.transpose,
)  # fmt: skip
_SELECTING_METHODS = (
    "clamp", "contiguous", "flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view",
)  # fmt: skip
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d)


def for_calibration(prepared: GraphModule) -> GraphModule:
    """Leave out the reporters whose range another one sees too. In place."""
    _merge_watchers(prepared)
    prepared.recompile()
    return prepared


def for_training(prepared: GraphModule, *, freeze_at: float) -> GraphModule:
    """Turn the graph into the one that is trained. In place; parameters and state dict stay as they are.

    `freeze_at`: share of the training after which batch norms use their running statistics.
    """
    _restore_dropout(prepared)
    _merge_watchers(prepared)
    _mark_first_calls(prepared)
    for target, calls in _calls_by_target(prepared).items():
        layer = prepared.get_submodule(target)
        if replacement := training_layer(layer, freeze_at) or freezing_batch_norm(layer, freeze_at):
            _set_submodule(prepared, target, replacement)
            if len(calls) == 1:
                _let_relu_wait(prepared, calls[0], replacement)
    prepared.recompile()
    return prepared


def _merge_watchers(prepared: GraphModule) -> None:
    """Drop each watcher in front of selecting operators behind which the same watcher stands again."""
    graph = prepared.graph
    for node in reversed(list(graph.nodes)):
        watcher = watcher_at(prepared, node)
        if watcher is None or not node.users:
            continue
        if comes_by(prepared, node, watcher):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def comes_by(prepared: GraphModule, node: Node, watcher: nn.Module) -> bool:
    """Whether all that becomes of this node's output passes the watcher, with nothing but selecting in between."""
    return bool(node.users) and all(
        _selects(prepared, user) and (_is_watched(prepared, user, watcher) or comes_by(prepared, user, watcher))
        for user in node.users
    )


def _is_watched(prepared: GraphModule, node: Node, watcher: nn.Module) -> bool:
    return bool(node.users) and all(watcher_at(prepared, user) is watcher for user in node.users)


def _selects(prepared: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        layer = prepared.get_submodule(str(node.target))
        return type(layer) in _SELECTING_LAYERS and not getattr(layer, "return_indices", False)
    if node.op == "call_method":
        return node.target in _SELECTING_METHODS
    return node.target in _SELECTING_FUNCTIONS


def watcher_at(prepared: GraphModule, node: Node) -> nn.Module | None:
    """The observer or fake quantization that this node calls, if it does."""
    module = prepared.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if module is not None and is_watching(module) else None


def _restore_dropout(prepared: GraphModule) -> None:
    """Put dropout back, and leave out the watcher behind it: int8 has none, and noise off the grid helps nobody."""
    for node in [node for node in prepared.graph.nodes if node.op == "call_module"]:
        dropout = prepared.get_submodule(node.target).__dict__.get("dropout")
        if dropout is None:
            continue
        _set_submodule(prepared, node.target, dropout)
        for user in [user for user in node.users if watcher_at(prepared, user) is not None]:
            user.replace_all_uses_with(node)
            prepared.graph.erase_node(user)


def _mark_first_calls(prepared: GraphModule) -> None:
    """Tell watchers that are called several times in one forward pass which call is the first."""
    calls: dict[int, list[Node]] = defaultdict(list)
    for node in prepared.graph.nodes:
        if (watcher := watcher_at(prepared, node)) is not None:
            calls[id(watcher)].append(node)
    for nodes in calls.values():
        for position, node in enumerate(nodes if len(nodes) > 1 else []):
            node.kwargs = {**node.kwargs, "first": position == 0}


def _calls_by_target(prepared: GraphModule) -> dict[str, list[Node]]:
    calls: dict[str, list[Node]] = defaultdict(list)
    for node in prepared.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)].append(node)
    return calls


def _let_relu_wait(prepared: GraphModule, node: Node, layer: Any) -> None:
    users = list(node.users)
    if not getattr(layer, "relu", False) or len(users) != 1 or not _is_max_pool(prepared, users[0]):
        return
    (pool,) = users
    layer.relu = False
    with prepared.graph.inserting_after(pool):
        # In place: max pooling's gradient needs its input and the places of the maxima, not its output.
        relu = prepared.graph.call_function(F.relu, (pool,), {"inplace": True})
    pool.replace_all_uses_with(relu, delete_user_cb=lambda user: user is not relu)


def _is_max_pool(prepared: GraphModule, node: Node) -> bool:
    target = type(prepared.get_submodule(str(node.target))) if node.op == "call_module" else node.target
    return target in _MAX_POOLS and _selects(prepared, node)


def _set_submodule(prepared: GraphModule, target: str, module: nn.Module) -> None:
    parent, _, child = target.rpartition(".")
    setattr(prepared.get_submodule(parent), child, module)
