"""Autograd functions are traced into where that has their gradients, and recorded where they have others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

from ptpipe_torch.int8.tracer import SOURCE_LINE
from ptpipe_torch.int8.tracing import trace_graph
from ptpipe_torch.traced_gradients import NO_GRAD, functions_with_own_gradient

from ...signatures import pictures

INPUTS = pictures((2, 4, 4))


class Product(Function):
    """x * y, with a gradient for each that is right."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


class Rounded(Function):
    """Straight-through; returns what rounding of its input changes little."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Scaled(Function):
    """Gradients of another size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.factor


class InPlace(Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Root(Function):
    """Not a number for half of all random values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 0.5 / torch.sqrt(x)


class Failing(Function):
    """Has no backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Reversal(Function):
    """Saves what a tracer has no values of, in a method of its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.num_samples = len(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Identity(Reversal):
    """Inherits its forward pass, which computes what its own backward pass belongs to."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Unscaled(Scaled):
    """Calls the forward pass of another, whose gradient would be another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return Scaled.forward(ctx, x, factor=factor)


class Network(nn.Module):
    """Calls a function on what a convolution returns."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.conv, self.call = nn.Conv2d(2, 2, 1), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.call(self.conv(x))
        return y


CALLS: dict[Any, Any] = {
    Product: lambda x: Product.apply(x, x + 1),  # type: ignore[no-untyped-call]
    Rounded: Rounded.apply,
    Scaled: lambda x: Scaled.apply(x),  # type: ignore[no-untyped-call]
    InPlace: lambda x: InPlace.apply(x + 0),  # type: ignore[no-untyped-call]
    Root: Root.apply,
    Failing: Failing.apply,
    Reversal: Reversal.apply,
    Identity: Identity.apply,
    Unscaled: Unscaled.apply,
}


@pytest.mark.parametrize(
    ("function", "own"),
    [
        (Product, {}),
        (Rounded, {Rounded: False}),
        (Scaled, {Scaled: True}),
        (InPlace, {}),
        (Root, {}),
        (Failing, {Failing: False}),
        (Reversal, {Reversal: True}),
        (Identity, {}),
        (Unscaled, {}),
    ],
)
def test_which_functions_have_a_gradient_of_their_own(function, own) -> None:
    network, state = Network(CALLS[function]), torch.get_rng_state()
    assert functions_with_own_gradient(network, INPUTS, [function]) == own
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_answer_does_not_depend_on_where_a_network_is_built(mode) -> None:
    with mode():
        assert functions_with_own_gradient(Network(CALLS[Scaled]), INPUTS, [Scaled, Product]) == {Scaled: True}


def test_a_function_that_is_not_called_in_eval_mode_is_not_judged() -> None:
    assert functions_with_own_gradient(Network(torch.relu), INPUTS, [Rounded]) == {}


def test_what_functions_save_for_their_backward_passes_is_not_traced() -> None:
    """Nor is what they inherit from each other taken for each other."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Reversal.apply(Identity.apply(Unscaled.apply(x)))  # type: ignore[no-untyped-call]
        return y

    functions = Scaled, Reversal, Identity, Unscaled
    methods = [dict(vars(function)) for function in functions]
    graph, _ = trace_graph(Network(call), INPUTS, (), keeps_gradients=True)
    names = [node.target if node.op == "call_method" else node.target.__name__ for node in list(graph.nodes)[2:-1]]
    assert names == ["clone", "clone", "Reversal"]
    assert [dict(vars(function)) for function in functions] == methods


@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_only_those_are_recorded_and_only_for_training(keeps_gradients) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Rounded.apply(Product.apply(x, x))  # type: ignore[no-untyped-call]
        return y

    graph, _ = trace_graph(Network(call), INPUTS, (), keeps_gradients=keeps_gradients)
    names = [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
    assert names == ["mul", "Rounded" if keeps_gradients else "round"]


def test_a_graph_with_such_a_function_runs_as_code() -> None:
    network = Network(CALLS[Rounded])
    graph, _ = trace_graph(network, INPUTS, (), keeps_gradients=True)
    x = torch.randn(3, 2, 4, 4, requires_grad=True)
    module = torch.fx.GraphModule(network, graph)
    assert torch.equal(module(x), network(x))
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    assert gradient.any()


def test_parameters_may_be_arguments_of_a_function_that_saves_them() -> None:
    """With gradients on, autograd would want to save proxies."""

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Product.apply(x, self.scale)  # type: ignore[no-untyped-call]
            return y

    with torch.enable_grad():
        graph, _ = trace_graph(Scaling(), INPUTS, (), keeps_gradients=True)
    assert [node.target.__name__ for node in graph.nodes if node.op == "call_function"] == ["mul"]


@pytest.mark.parametrize(
    ("mode", "is_off"),
    [(torch.no_grad, True), (torch.inference_mode, True), (torch.enable_grad, False)],
)
def test_operators_know_whether_gradients_are_off(mode, is_off) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        with mode():
            y = torch.tanh(x)
        return torch.relu(y)

    graph, _ = trace_graph(Network(call), INPUTS, ())
    marks = {node.target.__name__: node.meta[NO_GRAD] for node in graph.nodes if node.op == "call_function"}
    assert marks == {"tanh": is_off, "relu": False}
    assert torch.no_grad.__enter__.__module__ == "torch.autograd.grad_mode"  # nothing stays changed


def test_a_recorded_function_has_the_line_that_applies_it() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Rounded.apply(x) + 1

    graph, _ = trace_graph(Net(), INPUTS, [], keeps_gradients=True)
    lines = {node.meta[SOURCE_LINE].partition(": ")[2] for node in graph.nodes if node.op == "call_function"}
    assert lines == {"`return Rounded.apply(x) + 1`"}
