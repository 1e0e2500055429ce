"""Networks as graphs: what is rewritten, what is left float, and what can't be traced."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context, StageError
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_quant.trace import float_names, layers_to_quantize, trace_network
from ptpipe_torch import Data, TensorSpec, builder, torchvision

from ...signatures import pictures
from .conftest import BACKENDS, NUM_CLASSES, Mixed, make_model, small_net


def operators(graph: torch.fx.GraphModule) -> list[object]:
    return [
        type(graph.get_submodule(node.target)) if node.op == "call_module" else node.target
        for node in graph.graph.nodes
        if node.op not in ("placeholder", "output")
    ]


class Functions(nn.Module):
    """Every way to write ReLU, and dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.drop = nn.Dropout2d(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.relu(x) - 1)
        x = torch.relu(x - 1)
        x = F.relu(x - 1, inplace=True)
        x = torch.relu_(x - 1)
        x = F.relu(input=x - 1)
        x = (x - 1).relu()
        x = self.drop((x - 1).relu_())
        return F.dropout(x, 0.4, self.training)


def test_every_relu_becomes_a_module_of_its_own() -> None:
    torch.manual_seed(0)
    network = trace_network(Functions(), pictures((4, 5, 5)))
    graph, scopes = network.graph, network.scopes
    relus = [node for node in graph.graph.nodes if "elu" in str(node.target) or "ReLU" in str(node.target)]
    assert len(relus) == 8
    assert all(type(graph.get_submodule(node.target)) is nn.ReLU for node in relus)
    assert len({id(graph.get_submodule(node.target)) for node in relus}) == 8
    x = 20 * torch.randn(3, 4, 5, 5)
    assert torch.equal(graph(x), Functions().eval()(x))
    assert {node.name for node in graph.graph.nodes if node.op != "output"} <= set(scopes)


RETURNING_INPUT = ["x.float()", "x.clone()", "x.to(torch.float32)", "x.type(torch.float32)", "x.type_as(x)"]


@pytest.mark.parametrize("spelling", RETURNING_INPUT)
def test_what_returns_its_input_is_left_out(spelling: str) -> None:
    class Converting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return eval(spelling, {"torch": torch, "x": x + 1}) * 2  # one of the above

    graph = trace_network(Converting(), pictures((1, 4, 4))).graph
    assert [node.name for node in graph.graph.nodes] == ["x", "add", "mul", "output"]


@pytest.mark.parametrize("spelling", ["x.float()", "x.to(torch.float32)", "x.to(torch.float64)", "x.detach()"])
def test_what_changes_type_or_gradient_is_kept(spelling: str) -> None:
    class Converting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if spelling.endswith(("64)", "detach()")) else x.argmax(1)
            return eval(spelling, {"torch": torch, "x": x}) * 2  # one of the above

    graph = trace_network(Converting(), pictures((1, 4, 4))).graph
    assert spelling.removeprefix("x.").partition("(")[0] in [str(node.target) for node in graph.graph.nodes]


def test_a_tensor_made_of_sizes_gets_the_device_of_another() -> None:
    class Ramp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(len(x), 1, 1, 1).type_as(x)

    graph = trace_network(Ramp(), pictures((1, 4, 4))).graph
    assert graph.graph.find_nodes(op="call_method", target="type_as")


class Properties(nn.Module):
    """Reads its layer's weight for everything but its values, as the positional encoding of timm's EdgeNeXt does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        ramp = torch.arange(weight.shape[0] * weight.size(1), device=weight.device).to(weight.dtype)
        assert weight.ndim == 4
        return self.layer(x) + ramp.reshape(weight.size()[:2]).sum(1)[:, None, None]


def test_properties_of_a_parameter_are_known() -> None:
    network = Properties()
    graph = trace_network(network, pictures((4, 5, 5))).graph
    assert not [node for node in graph.graph.nodes if node.op == "get_attr" and "weight" in node.target]
    x = torch.randn(3, 4, 5, 5)
    assert torch.equal(graph(x), network.eval()(x))
    (device,) = (node for node in graph.graph.nodes if node.target is getattr)
    assert device.args[0].op == "placeholder"  # the network may be trained on another device


class WithUnusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.unused = nn.Conv2d(1, 8, 3), nn.Linear(8, 10), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        samples, channels = y.size(0), y.shape[1]  # noqa: F841  # as many unpack all sizes
        y = y.relu().mean((2, 3))
        outputs = {"logits": self.head(y), "auxiliary": self.unused(y)}
        return outputs["logits"]


def test_what_is_not_returned_is_left_out() -> None:
    graph = trace_network(WithUnusedHead(), pictures((1, 8, 8))).graph
    assert operators(graph) == [nn.Conv2d, nn.ReLU, F.adaptive_avg_pool2d, torch.flatten, nn.Linear]
    assert "unused" not in dict(graph.named_children())


def test_dropout_is_kept_aside() -> None:
    graph = trace_network(Functions(), pictures((4, 5, 5))).graph
    kept = [layer.__dict__["_for_training"] for layer in graph.modules() if type(layer) is nn.Identity]
    assert [(type(layer), layer.p) for layer in kept] == [(nn.Dropout2d, 0.3), (nn.Dropout, 0.4)]
    assert not any(isinstance(layer, nn.Dropout | nn.Dropout2d) for layer in graph.modules())


def test_dropout_that_never_stops_is_left_alone() -> None:
    class Restless(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5)  # always training: so its author wants it

    assert operators(trace_network(Restless(), pictures((1, 8, 8))).graph) == [F.dropout]


def test_stochastic_depth_is_kept_with_its_mode() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 1), torchvision().ops.StochasticDepth(0.5, "row"))
    graph = trace_network(network, pictures((1, 8, 8))).graph
    (kept,) = [layer.__dict__["_for_training"] for layer in graph.modules() if type(layer) is nn.Identity]
    assert (kept.p, kept.mode) == (0.5, "row")
    x = torch.randn(16, 4, 2, 2)
    torch.manual_seed(0)
    found = kept.train()(x)
    torch.manual_seed(0)
    assert torch.equal(found, network[1].train()(x))
    assert not torch.equal(found, x)
    assert torch.equal(kept.eval()(x), x)


class Sizes(nn.Module):
    """Sizes decide how the network computes; the size of the batch may not."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.conv = dim, nn.Conv2d(1, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if x.shape[self.dim] > 4:
            x = F.max_pool2d(x, 2)
        batch, channels, *_ = x.size()
        return x.reshape(batch * channels, -1).reshape(batch, len(x[0]), -1).mean(2)


@pytest.mark.parametrize("size", [5, 9])
def test_branches_on_sizes_are_decided_for_batches_of_any_size(size) -> None:
    network = Sizes(-1)
    graph = trace_network(network, pictures((1, size, size))).graph
    assert (F.max_pool2d in operators(graph)) is (size == 9)
    for num in (1, 2, 5):
        x = torch.randn(num, 1, size, size)
        assert torch.equal(graph(x), network.eval()(x))


class Parts(nn.Module):
    """Goes through pieces of a tensor, and through its first axis."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.conv = first, nn.Conv2d(1, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([part.relu() for part in self.conv(x).split(3, dim=1)], 1)
        return torch.stack([row.neg() for row in x.transpose(0, self.first)])


def test_pieces_are_iterated() -> None:
    network = Parts(1)
    graph, x = trace_network(network, pictures((1, 9, 9))).graph, torch.randn(5, 1, 9, 9)
    assert torch.equal(graph(x), network.eval()(x))


def test_the_samples_of_a_batch_can_not_be_iterated() -> None:
    with pytest.raises(
        StageError, match=r"test_trace.py:\d+: `return torch.stack.*\(the length depends on the batch size"
    ):
        trace_network(Parts(0), pictures((1, 9, 9)))


def test_a_branch_on_the_batch_is_refused() -> None:
    with pytest.raises(StageError, match=r"test_trace.py:\d+: `if x.shape\[self.dim\] > 4:` can't be traced"):
        trace_network(Sizes(0), pictures((1, 9, 9)))


class Facts(nn.Module):
    """Asks a tensor for what does not depend on its values."""

    def __init__(self, fact: str) -> None:
        super().__init__()
        self.fact, self.conv = fact, nn.Conv2d(1, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        match self.fact:
            case "dtype":
                return x.clamp(min=torch.finfo(x.dtype).tiny) if x.dtype == torch.float32 else x.double()
            case "device type":
                return x.relu() if x.device.type != "meta" else x.neg()
            case "device":
                other = x + torch.ones(1, device=x.device)
                return x.neg() if x.device != torch.device("cpu") or x.device != other.device else other.relu()
            case "is_cuda":
                return x.neg() if x.is_cuda else x.relu()
        raise AssertionError(self.fact)


@pytest.mark.parametrize("fact", ["dtype", "device type", "device", "is_cuda"])
def test_branches_on_types_and_devices_are_decided(fact: str) -> None:
    network = Facts(fact).eval()
    graph, x = trace_network(network, pictures((1, 8, 8))).graph, torch.randn(3, 1, 8, 8)
    assert torch.equal(graph(x), network(x))


def test_the_device_of_new_tensors_is_the_inputs() -> None:
    graph = trace_network(Facts("device"), pictures((1, 8, 8))).graph
    assert graph.to("meta")(torch.zeros(2, 1, 8, 8, device="meta")).device.type == "meta"


MADE: dict[str, Any] = {
    "zeros": lambda x: torch.cat([x, torch.zeros(x.shape[0], 2, 6, 6)], 1),
    "zeros of a list": lambda x: torch.cat([x, torch.zeros([x.size(0), 2, 6, 6])], 1),
    "zeros first": lambda x: torch.cat([torch.zeros((x.shape[0], 2, 6, 6)), x], 1),
    "scaled": lambda x: torch.cat([x, 3 * torch.ones([x.shape[0], 2, 6, 6])], 1),
    "new": lambda x: torch.cat([x, x.new_full((x.shape[0], 2, 6, 6), 0.5)], 1),
    "expanded": lambda x: torch.cat([x, torch.linspace(-1, 1, 6).view(1, 1, 1, 6).expand(x.shape[0], 2, 6, 6)], 1),
    "repeated": lambda x: torch.cat([x, torch.eye(6).repeat(x.shape[0], 2, 1, 1)], 1),
    "empty": lambda x: torch.cat([torch.relu(x), torch.empty([x.shape[0], 0, 6, 6]), x[:, :2]], 1),
}


class Joining(nn.Module):
    """Joins feature maps with tensors that it makes, of the batch's size."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.made, self.conv, self.last = made, nn.Conv2d(1, 4, 3), nn.Conv2d(6, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(MADE[self.made](self.conv(x)))


@builder
def joining(*, made: str) -> nn.Module:
    return nn.Sequential(Joining(made), nn.Flatten(), nn.Linear(64, NUM_CLASSES))


@pytest.mark.parametrize("made", MADE)
def test_tensors_made_of_sizes_are_for_batches_of_any_size(made: str) -> None:
    network = Joining(made).eval()
    graph = trace_network(network, pictures((1, 8, 8))).graph
    for num in (1, 2, 5):
        x = torch.randn(num, 1, 8, 8)
        torch.testing.assert_close(graph(x), network(x), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("made", MADE)
def test_they_are_joined_before_int8_layers(made: str, ctx: Context, digits: Data, metrics: Any) -> None:
    prepared = prepare(PrepareConfig(backend=BACKENDS[-1]), ctx, make_model(joining, made=made))
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    assert metrics()["int8_layers"] == 3
    export_onnx(ExportConfig(num_samples=16), ctx, int8, digits)
    assert metrics()["top1_agreement"] == 1


def test_tracing_leaves_torch_as_it_was() -> None:
    before = torch.zeros, torch.Tensor.expand, "expand" in vars(torch.Tensor)
    trace_network(Joining("expanded"), pictures((1, 8, 8)))
    assert (torch.zeros, torch.Tensor.expand, "expand" in vars(torch.Tensor)) == before


class Making(nn.Module):
    """Makes layers when it is called; `weighted`: one with weights."""

    def __init__(self, *, weighted: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.made = [nn.Conv2d(4, 4, 1)] if weighted else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))(self.conv(x))
        return self.made[0](x) if self.made else x


def test_layers_made_by_a_call_are_functions() -> None:
    network, x = Making().eval(), torch.randn(3, 1, 8, 8)
    graph = trace_network(network, pictures((1, 8, 8))).graph
    assert operators(graph) == [nn.Conv2d, nn.ReLU, F.max_pool2d]
    assert torch.equal(graph(x), network(x))


def test_weights_that_are_not_the_networks_are_refused() -> None:
    with pytest.raises(StageError, match=r"`return self.made.* can't be traced .*not installed as a submodule"):
        trace_network(Making(weighted=True), pictures((1, 8, 8)))


def test_a_layer_called_twice_trains_one_weight() -> None:
    layer = nn.Conv2d(1, 1, 3, padding=1)
    graph = trace_network(nn.Sequential(layer, nn.ReLU(), layer), pictures((1, 8, 8))).graph
    assert [node.target for node in graph.graph.nodes if "0" in str(node.target)] == ["0", "0_call2"]
    assert len(list(graph.parameters())) == 2


def test_a_copy_of_a_layer_left_float_is_left_float() -> None:
    layer = nn.Conv2d(1, 1, 3, padding=1)
    network = trace_network(nn.Sequential(layer, nn.ReLU(), layer), pictures((1, 8, 8)), leaves=["0"])
    assert network.float_names == ["0", "0_call2"]


def test_flatten_becomes_a_function() -> None:
    graph = trace_network(small_net().eval(), pictures((1, 8, 8))).graph
    assert torch.flatten in operators(graph)
    assert nn.Flatten not in operators(graph)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = self.conv(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 1, 1)
        self.gate = Branching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.first(x))


def test_the_line_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(StageError) as caught:
        trace_network(Outer(), pictures((1, 8, 8)))
    message = str(caught.value)
    assert "test_trace.py:" in message
    assert "`if x.sum() > 0:`" in message
    assert "skip: [gate]" in message
    assert "\n" not in message


def test_what_is_left_float_need_not_be_traceable() -> None:
    graph = trace_network(Outer(), pictures((1, 8, 8)), leaves=["gate"]).graph
    assert operators(graph) == [nn.Conv2d, Branching]


def with_default(function: Any) -> Any:
    """Give an argument its default by its name, as transformers does: it must not have a position, then."""

    @functools.wraps(function)
    def wrapper(self: Any, *arguments: Any, **named: Any) -> Any:
        return function(self, *arguments, **{"scale": self.scale} | named)

    return wrapper


class Wrapped(nn.Module):
    """It is called by names, of which a decorator reads one."""

    scale = 2.0

    @with_default
    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        return x * scale


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wrapped = nn.Conv2d(1, 2, 3), Wrapped()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.wrapped(x=self.conv(x), scale=3.0)
        return scaled


def test_a_wrapped_module_that_is_left_float_is_called_by_names() -> None:
    torch.manual_seed(0)
    module, x = Calling().eval(), torch.randn(2, 1, 8, 8)
    graph = trace_network(module, pictures((1, 8, 8)), leaves=["wrapped"]).graph
    torch.testing.assert_close(graph(x), module(x))


class Rest(nn.Module):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor, scale: float = 2.0, **other: Any) -> torch.Tensor:
        return sum(rest, start=x) * scale + len(other)


class Keywords(nn.Module):
    def forward(self, x: torch.Tensor, /, y: torch.Tensor, z: Any = None, *, scale: float = 2.0) -> torch.Tensor:
        return (x + y if z is None else z) * scale


class Wrapping(nn.Module):
    """Passes on whatever it gets, as wrappers for training do."""

    def __init__(self, *, adds_up: bool = True) -> None:
        super().__init__()
        self.module = nn.DataParallel(Rest() if adds_up else Keywords())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("network", [Rest(), Keywords(), Wrapping(), Wrapping(adds_up=False), nn.DataParallel(Rest())])
def test_each_input_is_a_parameter(network: nn.Module) -> None:
    specs = [TensorSpec(name, "float32", ("batch", 4)) for name in ("one", "other")]
    graph = trace_network(network, specs).graph
    assert len(graph.graph.find_nodes(op="placeholder")) == 2
    assert not graph.graph.find_nodes(op="call_module", target="module")
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(graph(*inputs), network(*inputs))


class TestSkip:
    def test_by_name_by_pattern_and_by_type(self) -> None:
        net = Mixed()
        assert float_names(net, ["head"]) == ["head"]
        assert float_names(net, ["stem.*"]) == ["stem.0", "stem.1", "stem.2"]
        assert float_names(net, ["Linear"]) == ["hidden", "head"]
        assert float_names(net, ["Conv?d", "block"]) == ["stem.0", "wide.0", "left", "right", "block"]
        assert float_names(net, []) == []

    @pytest.mark.parametrize(
        ("pattern", "hint"), [("haed", "did you mean 'head'"), ("Liner", "did you mean 'Linear'"), ("zzz", "'zzz'$")]
    )
    def test_what_fits_nothing_is_refused_with_the_nearest(self, pattern, hint) -> None:
        with pytest.raises(StageError, match=hint):
            float_names(Mixed(), ["head", pattern])

    def test_layers_of_a_type(self) -> None:
        assert layers_to_quantize(Mixed(), [], nn.Linear) == ["hidden", "head"]
        assert layers_to_quantize(Mixed(), ["head", "wide"], nn.Linear, nn.Conv2d) == [
            "stem.0", "block.conv", "left", "right", "hidden",
        ]  # fmt: skip
