"""What forward hooks do is traced; layers that are called as a whole keep them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch.int8.fx import trace
from ptpipe_torch.torch_export import place_of_error
from ptpipe_torch.traced_hooks import hooked_layers, refuse_lost_hooks

from ...signatures import pictures

INPUTS = pictures((3, 8, 8))
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SEEN: list[Any] = []


def network() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    return nn.Sequential(body, nn.Conv2d(3, 3, 1), nn.Flatten()).eval()


def doubled(net: nn.Sequential) -> None:
    net[1].register_forward_hook(lambda _layer, _inputs, output: 2 * output)


def shifted(net: nn.Sequential) -> None:
    net[1].register_forward_pre_hook(lambda _layer, inputs: (inputs[0] + 1,))


def by_keyword(net: nn.Sequential) -> None:
    net[1].register_forward_hook(lambda _layer, args, _kwargs, output: output - args[0], with_kwargs=True)


def in_place(net: nn.Sequential) -> None:
    def clamp(_layer: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.clamp_(min=0)

    net[1].register_forward_hook(clamp)


def of_a_container(net: nn.Sequential) -> None:
    net[0].register_forward_hook(lambda _layer, inputs, output: output + inputs[0])


def before_a_fused_layer(net: nn.Sequential) -> None:
    net[0][0].register_forward_hook(lambda _layer, _inputs, output: 2 * output)


def equalized(net: nn.Sequential) -> None:
    """Compute a weight in front of each call, as the equalized learning rate of ProGAN does."""
    weight = net[1].weight
    del net[1]._parameters["weight"]
    net[1].register_parameter("weight_orig", nn.Parameter(weight.data))
    net[1].register_forward_pre_hook(
        lambda layer, _: setattr(layer, "weight", layer.weight_orig * math.sqrt(2 / layer.weight_orig.shape[1]))
    )


HOOKS = [doubled, shifted, by_keyword, in_place, of_a_container, before_a_fused_layer, equalized]


@pytest.mark.parametrize("add_hooks", HOOKS)
def test_what_hooks_do_is_in_the_graph(add_hooks: Callable[[nn.Sequential], None]) -> None:
    net = network()
    add_hooks(net)
    expected = net(X)
    assert not torch.allclose(expected, network()(X))
    graph, scopes = trace(net, INPUTS)
    assert not hooked_layers(graph)
    assert torch.allclose(graph(X), expected)
    assert torch.allclose(net(X), expected)  # it has its hooks
    assert all("test_traced_hooks.py" in line for line in lines_of_functions(graph))
    assert scopes


def lines_of_functions(graph: Any) -> list[str]:
    return [node.meta["source_line"] for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "observe",
    [
        lambda _layer, _inputs, output: SEEN.append(output),
        lambda _layer, _inputs, output: SEEN.append(output.detach().numpy()),
        lambda _layer, _inputs, output: SEEN.append(float(output.detach().mean())),
        lambda _layer, _inputs, output: print(output.mean().item()),
    ],
)
@pytest.mark.parametrize("name", ["0", "0.0", "1"])
def test_hooks_that_only_observe_leave_the_graph_as_it_is(observe: Any, name: str) -> None:
    net = network()
    net.get_submodule(name).register_forward_hook(observe)
    graph, _ = trace(net, INPUTS)
    SEEN.clear()
    graph.graph.eliminate_dead_code()
    graph.recompile()
    plain, _ = trace(network(), INPUTS)
    assert [node.name for node in graph.graph.nodes] == [node.name for node in plain.graph.nodes]
    assert torch.equal(graph(X), net(X))
    assert len(SEEN) <= 1  # by `net` alone


def test_a_hook_that_reads_values_names_its_layer() -> None:
    net = network()
    net[1].register_forward_hook(lambda _layer, _inputs, output: output * float(output.mean()))
    with pytest.raises(Exception, match="value") as error:
        trace(net, INPUTS)
    place = place_of_error(net, error.value, "")
    assert place.module == "1"
    assert "output.mean()" in place.line


def test_a_hook_that_calls_a_layer_of_its_own_layer_is_refused() -> None:
    net = network()
    net[1].down = nn.Conv2d(3, 3, 1)
    net[1].register_forward_hook(lambda layer, inputs, output: output + layer.down(inputs[0]))
    with pytest.raises(TypeError, match="a hook calls a layer inside of its own"):
        trace(net, INPUTS)


def test_a_layer_that_is_called_as_a_whole_keeps_its_hooks() -> None:
    net = network()
    before_a_fused_layer(net)
    graph, _ = trace(net, INPUTS, ["0.0"])
    layer: Any = graph.get_submodule("0.0")
    assert hooked_layers(graph) == ["0.0"]
    assert type(layer) is not nn.Conv2d  # so that nothing is fused with it
    assert layer.weight is net[0][0].weight
    assert torch.equal(graph(X), net(X))


def test_lost_hooks_are_refused() -> None:
    net = network()
    doubled(net)
    refuse_lost_hooks(net, hooked_layers(net))
    with pytest.raises(StageError, match=r"1 would lose its hooks .* skip: \[1\]"):
        refuse_lost_hooks(network(), hooked_layers(net))
