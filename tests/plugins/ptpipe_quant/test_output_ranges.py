"""What a network returns keeps its whole range in static quantization, whichever observer the others have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

from ptpipe_quant.transforms import prepare_static, to_int8
from ptpipe_torch.int8.count_observers import MseObserver, PercentileObserver
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.observers import observes_activation_range, weight_format, weight_observer

from ...processor import reduced
from ...signatures import stored_pictures
from .conftest import BACKENDS

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


class InUnits(nn.Module):
    """Layers whose output is in units of its own."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)
        self.register_buffer("unit", torch.tensor([[unit]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) * self.unit + self.unit


@pytest.mark.parametrize("backend", [name for name in ("fbgemm", "qnnpack") if name in BACKENDS])
def test_outputs_in_small_units(backend: str) -> None:
    """The unit is part of the last layer, whose weights are below torch's smallest step."""
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    found = {}
    for unit in (1.0, 2.0**-33):
        torch.manual_seed(0)
        net = InUnits(unit)
        options = {
            **SCHEME,
            "backend": backend,
            "narrow_weights": reduced(backend),
            "observer": "mse",
            "whole_outputs": True,
        }
        with torch.no_grad(), quantized_engine(backend):
            expected = net(x)
            graph = prepare_static(net, calibrating=True, **options)
            graph(x)
            standard = prepare_static(InUnits(unit), calibrating=False, **options)
            standard.load_state_dict(graph.state_dict())
            found[unit] = to_int8(standard, backend=backend)(x)
            assert (found[unit] - expected).square().mean().sqrt() < 0.02 * expected.std()
    torch.testing.assert_close(found[2.0**-33] * 2.0**33, found[1.0], rtol=0, atol=0.01 * float(found[1.0].std()))


def test_steps_of_usual_values_are_torchs() -> None:
    weight = torch.tensor([[0.5, -0.25], [1e-9, 0.0], [0.0, 0.0]])
    for scale, per_channel in itertools.product((1.0, 0.01), (False, True)):
        observer, plain = weight_observer(per_channel=per_channel)(), MinMaxObserver(**weight_format(per_channel=False))
        if per_channel:
            plain = PerChannelMinMaxObserver(**weight_format(per_channel=True))
        for each in (observer, plain):
            each(weight * scale)
        assert torch.equal(observer.calculate_qparams()[0], plain.calculate_qparams()[0])
    zeros = weight_observer(per_channel=True)()
    zeros(torch.zeros(2, 3))
    assert torch.equal(zeros.calculate_qparams()[0], torch.full((2,), torch.finfo(torch.float32).eps))


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
