"""Convert a prepared network on trial, so that what can't become int8 is known before any training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe import Context, PtpipeError, StageError
from ptpipe_quant import transforms
from ptpipe_quant.fake_quant import ActivationFakeQuant, WeightFakeQuant
from ptpipe_quant.int8_graph import drop_redundant_clamps
from ptpipe_quant.int8_parity import MAX_STEPS, compare_with_reference
from ptpipe_torch.errors import first_line
from ptpipe_torch.int8.additions import ADDITIONS, has_addition_kernel
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.layer_parity import LayerDifference
from ptpipe_torch.int8.layers import folded_weight, has_int8_weights
from ptpipe_torch.int8.observers import fixed_grid, observer_at
from ptpipe_torch.int8.output_scales import output_scales, scaled_weight
from ptpipe_torch.model.example_inputs import copies

_NUM_INTEGERS = 256


class NoInt8LayerError(StageError):
    """Every layer would stay float."""


class UnsupportedOperatorsError(StageError):
    """Operators that an engine can't run as int8, or gets wrong."""

    def __init__(self, message: str, *, reasons: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.reasons = dict(reasons)
        """Sentences by the operators' names in the traced network."""


def dry_run(ctx: Context, prepared: GraphModule, inputs: Sequence[torch.Tensor], backend: str) -> list[LayerDifference]:
    """Convert a prepared network with the ranges of these inputs, and run two samples. Consumes `prepared`.

    Return the layers that the engine, which must be selected, computes wrongly, the worst first; see
    `int8_parity.check_int8`. Raises UnsupportedOperatorsError, with the layer and the remedy, for what torch can't run.
    """
    _observe(ctx, prepared, inputs)
    twin = copy.deepcopy(prepared, {id(weights): weights for weights in prepared.parameters()})  # which are only read
    drop_redundant_clamps(twin)
    try:
        int8: Any = transforms.to_int8(prepared, backend=backend)
    except PtpipeError:
        raise
    except Exception as error:  # torch's conversion raises anything
        raise StageError(f"{ctx.kind}: torch can't convert this network to int8 ({first_line(error)})") from error
    if not any(has_int8_weights(part) for part in int8.modules()):
        raise NoInt8LayerError(f"{ctx.kind}: no layer of this network can be quantized")
    two = [tensor[:2] for tensor in inputs]
    check_runs(ctx, int8, two, backend)  # one is too few for a batch norm without running statistics
    _check_weights(ctx, int8, backend)
    difference = compare_with_reference(int8, twin, two)
    # Infinite: weights that are not finite, which calibration and conversion name.
    wrong = [layer for layer in difference.layers if MAX_STEPS < layer.max_steps < float("inf")]
    return sorted(wrong, key=lambda layer: -layer.max_steps)


def check_runs(ctx: Context, int8: nn.Module, inputs: Sequence[torch.Tensor], backend: str) -> None:
    """Run an int8 network: an engine reports unsupported operators only then. Log the additions that it leaves float.

    Raises UnsupportedOperatorsError with the layer, where the network is a graph, and the remedy.
    """
    runner = _Runner(int8) if isinstance(int8, GraphModule) else int8
    try:
        with torch.no_grad(), deprecations_silenced():
            (runner.run if isinstance(runner, _Runner) else runner)(*inputs)
    except Exception as error:  # qnnpack's softmax along a negative axis raises IndexError (torch 2.13)
        reason, _, _ = first_line(error).partition(". ")  # what torch says more would take lines
        if not isinstance(runner, _Runner):
            raise StageError(f"{ctx.kind}: {backend} can't run this network as int8: {reason}") from error
        layer = runner.layer()
        raise UnsupportedOperatorsError(
            f"{ctx.kind}: {backend} can't run this network as int8 at {layer}: {reason}; leave it float "
            f"(skip: [{layer.rpartition(' in ')[2]}])",
            reasons={name: f"{name} stays float: {backend} can't run it as int8 ({reason})" for name in runner.alike()},
        ) from error
    for layer in runner.float_additions if isinstance(runner, _Runner) else ():
        ctx.log(f"{layer} is computed in float32: {backend} has no kernel for scales that differ so much")


def _check_weights(ctx: Context, int8: GraphModule, backend: str) -> None:
    """Raise UnsupportedOperatorsError for layers whose weights the engine does not return: they could not be stored.

    That is for a type of layers to decide: qnnpack (torch 2.13) returns those of no convolution with three axes.
    """
    by_type: dict[type, list[Node]] = {}
    for node in int8.graph.find_nodes(op="call_module"):
        if has_int8_weights(layer := int8.get_submodule(str(node.target))):
            by_type.setdefault(type(layer), []).append(node)
    reasons: dict[str, str] = {}
    for type_, calls in by_type.items():
        first: Any = int8.get_submodule(str(calls[0].target))
        try:
            first._weight_bias()
        except RuntimeError as error:
            names = ", ".join(str(call.target) for call in calls) + (" stays" if len(calls) == 1 else " stay")
            why = f"{backend} runs {type_.__name__}, but does not return its int8 weights ({first_line(error)})"
            reasons |= {_name(call): f"{names} float: {why}" for call in calls}
    if reasons:
        raise UnsupportedOperatorsError(f"{ctx.kind}: {next(iter(reasons.values()))}", reasons=reasons)


class _Runner(Interpreter):
    """Runs a graph and remembers where it is."""

    def __init__(self, int8: GraphModule) -> None:
        super().__init__(int8)
        self.extra_traceback = False  # would be added to the error's message
        self._node: Node | None = None
        self._scopes: dict[str, str] = int8.meta.get(transforms.SCOPES, {})
        self.float_additions: list[str] = []

    def run_node(self, n: Node) -> Any:
        self._node = n
        if n.target in ADDITIONS and not has_addition_kernel(*self.fetch_args_kwargs_from_env(n)[0][:3]):
            self.float_additions.append(self.layer())
        return super().run_node(n)

    def alike(self) -> Iterator[str]:
        """Yield the names in the traced network of what was run last and, if that has no weights, of all its calls."""
        graph: Any = self.module.graph
        functions = graph.find_nodes(op="call_function", target=self._node.target) if self._node is not None else []
        yield from map(_name, dict.fromkeys([*filter(None, [self._node]), *functions]))

    def layer(self) -> str:
        """Return the layer, or the function and the layer that calls it, that was run last."""
        node = self._node
        if node is None:
            return ""
        name = _name(node)
        path = self._scopes.get(name, "")
        if node.op == "call_module":
            return path or str(node.target)
        return f"{name} in {path}" if path else name


def _name(node: Node) -> str:
    return node.stack_trace or node.name  # of a node that conversion made


def _observe(ctx: Context, prepared: GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    for module in prepared.modules():
        if isinstance(module, ActivationFakeQuant):  # observes in train mode only
            module.train()
            module.fake_quant_enabled.zero_()
    with torch.no_grad():
        _Observation(ctx, prepared).run(*copies(inputs))
    freeze_ranges(prepared)


class _Observation(Interpreter):
    """Runs a prepared network. Raises StageError for a tensor outside of a range that does not come from data."""

    def __init__(self, ctx: Context, prepared: GraphModule) -> None:
        super().__init__(prepared)
        self.extra_traceback = False
        self._ctx, self._prepared = ctx, prepared

    def run_node(self, n: Node) -> Any:
        grid = fixed_grid(observer) if (observer := observer_at(self._prepared, n)) is not None else None
        if grid is not None:
            scale, zero_point = grid
            minimum, maximum = -zero_point * scale, (_NUM_INTEGERS - zero_point) * scale
            low, high = (limit.item() for limit in torch.aminmax(self.fetch_args_kwargs_from_env(n)[0][0]))
            if not minimum <= low <= high <= maximum:
                operator = n.all_input_nodes[0].name
                reason = f"is fixed at {minimum:.3g} to {maximum:.3g}, but it has values of {low:.3g} to {high:.3g}"
                raise UnsupportedOperatorsError(
                    f"{self._ctx.kind}: the int8 range of {operator} {reason}: leave its layer float with skip",
                    reasons={operator: f"{operator} stays float: its int8 range {reason}"},
                )
        try:
            return super().run_node(n)
        except Exception as error:  # operators raise anything
            raise StageError(
                f"{self._ctx.kind}: {n.name} ({n.target}) of the traced network fails on other samples than it was "
                f"traced with: {first_line(error)}. Leave the module that computes it float with skip"
            ) from error


def freeze_ranges(prepared: GraphModule) -> None:
    """Set ranges of weights to those of the final weights, then disable all observers."""
    scales = output_scales(prepared)
    with torch.no_grad():
        for layer in prepared.modules():
            weight_fake_quant = getattr(layer, "weight_fake_quant", None)
            if isinstance(weight_fake_quant, WeightFakeQuant):
                weight = folded_weight(layer)
                weight_fake_quant(scaled_weight(weight, scales[layer]) if layer in scales else weight)
    for module in prepared.modules():
        if isinstance(module, ActivationFakeQuant | WeightFakeQuant):
            module.observer_enabled.zero_()
