"""What a network returns keeps its whole range in static quantization, whichever observer the others have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_quant.transforms import prepare_static
from ptpipe_torch.int8.count_observers import MseObserver, PercentileObserver
from ptpipe_torch.int8.observers import observes_activation_range

from ...signatures import stored_pictures

SCHEME: Any = {"inputs": stored_pictures((4,)), "backend": "qnnpack", "weights": "per_channel", "skip": []}


class Net(nn.Module):
    """Two layers, and what `returned` makes of their outputs, the first of which is heavy-tailed."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.first, self.last, self.returned = nn.Linear(4, 8), nn.Linear(8, 6), returned

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x).relu()
        return self.returned(y, self.last(y))


RETURNED = {
    "as it is": lambda y, z: z,
    "moved": lambda y, z: z.reshape(-1, 2, 3).permute(0, 2, 1),
    "softmax": lambda y, z: torch.log_softmax(z, 1),
    "dictionary": lambda y, z: {"logits": z, "doubled": (z + z,)},
    "float tail": lambda y, z: (z.exp() / 100).cumsum(1),
}


def types_of(net: nn.Module, **options: Any) -> dict[str, type]:
    """Return the type of observer of each observed tensor, by the name of its operator."""
    graph = prepare_static(net, calibrating=False, **{**SCHEME, "observer": "mse", "whole_outputs": True, **options})
    observers = {str(node.target): node.all_input_nodes[0].name for node in graph.graph.find_nodes(op="call_module")}
    parts = {name: graph.get_submodule(target) for target, name in observers.items()}
    return {name: type(part) for name, part in parts.items() if observes_activation_range(part)}


@pytest.mark.parametrize("name", RETURNED)
def test_outputs_have_min_max_observers(name: str) -> None:
    found = {name: type_.__name__ for name, type_ in types_of(Net(RETURNED[name])).items()}
    assert found.pop("last") == "MinMaxObserver"
    behind = [found.pop(name) for name in ("reshape", "permute", "add") if name in found]
    assert set(behind) <= {"MinMaxObserver"}
    assert found.keys() >= {"x", "first"}
    assert set(found.values()) == {"MseObserver"}


def test_a_layer_in_front_of_the_last_one_keeps_its_own() -> None:
    found = types_of(Net(lambda y, z: z), skip=["last"])
    assert found["first"] is MseObserver
    found = types_of(Net(lambda y, z: (y, z)))
    assert found["first"] is found["last"] is not MseObserver


def test_the_observer_that_a_rule_names_counts() -> None:
    layers = [("last", {"observer": "percentile", "percentile": 99.0})]
    assert types_of(Net(lambda y, z: z), layers=layers)["last"] is PercentileObserver
    assert types_of(Net(lambda y, z: z), layers=[("last", {"weights": "per_tensor"})])["last"] is not MseObserver


def test_former_recipes_have_the_observer_of_all_layers() -> None:
    assert set(types_of(Net(lambda y, z: z), whole_outputs=False).values()) == {MseObserver}


def test_the_largest_values_are_not_cut_off() -> None:
    torch.manual_seed(0)
    net = Net(lambda y, z: z)
    graph = prepare_static(net, calibrating=True, **SCHEME, observer="mse", whole_outputs=True)
    x = torch.randn(4000, 4)
    x[0] *= 30
    with torch.no_grad():
        y = graph(x)
    (node,) = (n for n in graph.graph.find_nodes(op="call_module") if n.all_input_nodes[0].name == "last")
    observer: Any = graph.get_submodule(str(node.target))
    assert (observer.min_val, observer.max_val) == (y.min(), y.max())
