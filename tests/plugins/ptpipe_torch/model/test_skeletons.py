"""Networks that a process has traced before: a copy can't be told from one that is built anew."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.functional import relu

from ptpipe import IntegrityError
from ptpipe_quant.transforms import prepare_qat, prepare_static, to_int8
from ptpipe_torch import FunctionRef, Model, Recipe, builder, transform
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.int8_state import pack_state
from ptpipe_torch.model import skeletons

from ....signatures import classifier, stored_pictures


class Everything(nn.Module):
    """Convolutions with norms, a product, a layer that stays float, and tensors that are not in the state dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.scan, self.head = nn.LSTM(width, 8, batch_first=True), nn.Linear(8, 3)
        self.register_buffer("mask", torch.arange(float(width)), persistent=False)
        self.register_buffer("offset", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = relu(self.norm(self.convolution(x)))
        x = (x + x * 2).flatten(2).transpose(1, 2) * self.mask + self.offset
        rows, _ = self.scan(x)
        out: torch.Tensor = self.head(rows[:, -1])
        return out


@builder
def everything(*, width: int = 32) -> nn.Module:
    """All that a copy could lose."""
    return Everything(width)


class Residual(nn.Module):
    """A block on the network's input, which its norm reads, in float, beside an int8 addition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.head = nn.GroupNorm(1, 2), nn.Conv2d(2, 2, 1), nn.Linear(2 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((x + self.conv(self.norm(x))).flatten(1))
        return out


@builder
def residual() -> nn.Module:
    """What `Residual` says."""
    return Residual()


@builder
def drawn() -> nn.Module:
    """A network whose weights are drawn, as a tensor beside its state is."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(32, 80_000), nn.Linear(80_000, 3))
    module[1].register_buffer("projection", torch.randn(3), persistent=False)
    return module


@transform
def wrapped(module: nn.Module) -> nn.Module:
    """The same network as a graph."""
    return torch.fx.symbolic_trace(module)


@builder
def seen(*, hidden: bool) -> nn.Module:
    """A network that a hook of its own looks into, or that has another one's weights."""
    module = nn.Sequential(nn.Conv2d(2, 64, 3), nn.Flatten(), nn.Linear(4 * 64, 3))
    if hidden:
        module[2].register_forward_pre_hook(lambda _layer, inputs: (inputs[0] * module[0].weight.sum(),))
    else:
        module[2].register_buffer("view", module[0].weight.detach()[0])
    return module


class Own(nn.Module):
    """A layer of the user's own that can't be traced, and has what a copy would share, or can't be copied."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.layer = layer = nn.Linear(32, 3)
        choices: dict[str, Any] = {
            "partial": functools.partial(lambda x, scale: scale * layer(x), scale=1.0),
            "nested": [[lambda x: layer(x)]],
            "reference": weakref.ref(layer),
            "lock": threading.Lock(),
            "computed": layer(torch.ones(1, 32)),
        }
        self.kind, self.attribute = attribute, choices[attribute]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if x.sum() > 1e9:
            return x[:, :3]
        calls = {"partial": lambda: self.attribute, "nested": lambda: self.attribute[0][0], "reference": self.attribute}
        out: torch.Tensor = calls.get(self.kind, lambda: self.layer)()(x)
        return out


@builder
def with_own(*, attribute: str) -> nn.Module:
    """What `Own` says, beside layers that become int8."""
    return nn.Sequential(nn.Conv2d(2, 2, 1), Own(attribute))


SCHEME: dict[str, Any] = {
    "inputs": stored_pictures((2, 4, 4)),
    "backend": "fbgemm",
    "weights": "per_channel",
    "skip": (),
}
# As the stages set them.
ALL = {"merged_branches": True, "isolated_float": True, **SCHEME}
STATIC = FunctionRef.to(prepare_static, observer="histogram", calibrating=True, whole_outputs=True, **ALL)
QAT = FunctionRef.to(prepare_qat, batch_norm="train", freeze_at=0.5, scaled_layers=True, **SCHEME)
LEARNED = FunctionRef.to(prepare_qat, batch_norm="fold", freeze_at=0.5, learned_step_size=True, **ALL)
INT8 = FunctionRef.to(to_int8, backend="fbgemm")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process does."""
    monkeypatch.setattr(skeletons, "_kept", OrderedDict())


def recipe_of(transform: FunctionRef, function: Callable[..., nn.Module] = everything, **arguments: Any) -> Recipe:
    built = FunctionRef.to(function, **arguments)
    return Recipe(built, classifier((2, 4, 4), 3), prepare=(transform,), backend="fbgemm")


def fresh(recipe: Recipe) -> GraphModule:
    module = recipe.builder.resolve("builder")(**recipe.builder.arguments)
    for reference in recipe.prepare:
        module = reference.resolve("transform")(module, **reference.arguments)
    assert isinstance(module, GraphModule)
    return module


def trained(recipe: Recipe) -> Model:
    """Return a model with values of its own in its whole state."""
    torch.manual_seed(3)
    module = fresh(recipe).train()
    for _ in range(2):
        module(torch.randn(8, 2, 4, 4)).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.1)
    return Model.from_module(recipe, module)


@pytest.mark.parametrize("transform", [STATIC, QAT, LEARNED], ids=["static", "qat", "learned"])
def test_a_copy_has_all_that_a_fresh_network_has(transform: FunctionRef) -> None:
    model = trained(recipe_of(transform))
    built, copied = model.build_prepared(), model.build_prepared()
    assert len(skeletons._kept) == 1
    assert isinstance(built, GraphModule) and isinstance(copied, GraphModule)
    assert copied.code == built.code
    assert copied.meta.keys() == built.meta.keys()
    for node, twin in zip(built.graph.nodes, copied.graph.nodes, strict=True):
        assert [user.name for user in node.users] == [user.name for user in twin.users]
    for (name, part), (twin_name, twin) in zip(built.named_modules(), copied.named_modules(), strict=True):
        assert name == twin_name
        assert vars(part).keys() == vars(twin).keys()
        assert part is built or type(part) is type(twin)
        assert part.training == twin.training
    for kind in ("named_parameters", "named_buffers"):
        expected, found = list(getattr(built, kind)()), list(getattr(copied, kind)())
        assert [name for name, _ in expected] == [name for name, _ in found]
        assert all(torch.equal(tensor, twin) for (_, tensor), (_, twin) in zip(expected, found, strict=True))
    assert list(built.state_dict()) == list(copied.state_dict())


@pytest.mark.parametrize("transform", [QAT, LEARNED], ids=["qat", "learned"])
def test_training_a_copy_ends_with_the_same_bits(transform: FunctionRef) -> None:
    model = trained(recipe_of(transform))
    states = []
    for module in (model.build_prepared().train(), model.build_prepared().train()):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(0)
        for _ in range(3):
            module(torch.randn(8, 2, 4, 4)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # sums in the order of the parameters
            optimizer.step()
        states.append(module.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("function", [everything, residual])
def test_int8_networks_are_those_of_fresh_ones(function: Callable[..., nn.Module]) -> None:
    model = trained(recipe_of(STATIC, function)).with_recipe(convert=(INT8,))
    x = torch.randn(8, 2, 4, 4)
    with quantized_engine("fbgemm"):
        built, copied = model.build(), model.build()
        stored = Model(model.recipe, model.tensors, pack_state(built.state_dict()))
        again = stored.build()  # converted before its state is loaded
        assert list(built.state_dict()) == list(copied.state_dict()) == list(again.state_dict())
        assert torch.equal(built(x), copied(x))
        assert torch.equal(built(x), again(x))


def test_copies_have_nothing_in_common() -> None:
    model = trained(recipe_of(QAT))
    x = torch.randn(8, 2, 4, 4)
    model.build_prepared()
    expected = model.build_prepared()(x)
    spoiled = model.build_prepared()
    assert isinstance(spoiled, GraphModule)
    with torch.no_grad():
        for tensor in (*spoiled.parameters(), *spoiled.buffers()):
            tensor.zero_()
    spoiled.graph.output(next(iter(spoiled.graph.nodes)))
    for value in spoiled.meta.values():
        getattr(value, "clear", list)()
    assert torch.equal(model.build_prepared()(x), expected)


def test_no_weights_are_held() -> None:
    model = trained(recipe_of(STATIC, width=1024))
    model.build_prepared()
    [(kept, _)] = skeletons._kept.values()
    held = sum(tensor.nbytes for tensor in kept.state_dict().values() if not tensor.is_meta)
    assert held < sum(tensor.nbytes for tensor in model.tensors.values()) / 10
    copied = model.build_prepared()
    assert all(torch.equal(value, model.tensors[name]) for name, value in copied.state_dict().items())


def test_only_the_last_few_are_kept() -> None:
    models = [trained(recipe_of(STATIC, width=width)) for width in range(1, 7)]
    for model in (*models, models[3]):
        model.build_prepared()
    widths = [json.loads(arguments)["width"] for (_, arguments), *_ in skeletons._kept]
    assert widths == [3, 5, 6, 4]


def test_a_function_that_was_loaded_again_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(recipe_of(STATIC, width=3))
    model.build_prepared()

    def other(*, width: int) -> nn.Module:
        return Everything(width + 1)

    other.__qualname__ = "everything"
    monkeypatch.setattr(sys.modules[__name__], "everything", builder(other))
    with pytest.raises(IntegrityError, match="don't fit the network"):
        model.build_prepared()


@pytest.mark.parametrize("hidden", [True, False], ids=["a hook", "a view"])
def test_what_a_copy_would_share_or_lose_is_built_anew(hidden: bool) -> None:
    model = trained(recipe_of(FunctionRef.to(wrapped), seen, hidden=hidden))
    x = torch.randn(4, 2, 4, 4)
    assert torch.equal(model.build_prepared()(x), model.build_prepared()(x))
    assert not skeletons._kept


def test_networks_of_large_tensors_beside_their_state_are_not_kept() -> None:
    model = trained(recipe_of(STATIC, drawn))
    model.build_prepared()
    assert not skeletons._kept


@pytest.mark.parametrize("attribute", ["partial", "nested", "reference", "lock", "computed"])
def test_layers_of_the_users_own_are_built_anew(attribute: str) -> None:
    """Such a layer would compute with the weights of another network, or fail to be copied."""
    left_float = FunctionRef.to(prepare_static, observer="histogram", calibrating=True, **{**SCHEME, "skip": ("1",)})
    model = trained(recipe_of(left_float, with_own, attribute=attribute))
    x = torch.randn(4, 2, 4, 4)
    first, second = model.build_prepared(), model.build_prepared()
    expected = second(x)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert torch.equal(second(x), expected)
    assert torch.equal(model.build_prepared()(x), expected)


NETWORK = """
from pathlib import Path
from torch import nn

import widths

calls = []

def make(file):
    calls.append(file)
    width = widths.FACTOR * int(Path(file).read_text())
    return nn.Sequential(nn.Conv2d(2, width, 1), nn.Flatten(2), nn.AdaptiveAvgPool1d(3))
"""


def test_networks_of_files_are_kept_until_a_file_changes(tmp_path: Path) -> None:
    code, beside, width = tmp_path / "mine.py", tmp_path / "widths.py", tmp_path / "width.txt"
    code.write_text(NETWORK)
    beside.write_text("FACTOR = 1\n")
    width.write_text("4")

    def built() -> tuple[nn.Module, int]:
        reference = FunctionRef.in_file(code, "make", {"file": str(width)})
        recipe = Recipe(reference, classifier((2, 4, 4), 3), prepare=(STATIC,), backend="fbgemm")
        module = Model.from_module(recipe, fresh(recipe)).build_prepared()
        calls = len(vars(sys.modules[reference.resolve("builder").__module__])["calls"])
        return module, calls

    def channels(module: nn.Module) -> int:
        return len(module.get_submodule("0").get_parameter("weight"))

    assert [built()[1], built()[1]] == [2, 3]  # each calls it for its tensors
    assert len(skeletons._kept) == 1
    width.write_text("16")
    assert channels(built()[0]) == 16
    beside.write_text("FACTOR = 2\n")
    assert channels(built()[0]) == 32


DECORATED = """
import functools
from torch import nn

def _network(width=2):
    return nn.Sequential(nn.Conv2d(2, width, 1), nn.Flatten(2), nn.AdaptiveAvgPool1d(3))

def of_width(width):
    def decorate(function):
        return functools.wraps(function)(lambda: function(width))
    return decorate

small, large = of_width(4)(_network), of_width(8)(_network)
"""


def test_functions_decorated_otherwise_are_others(tmp_path: Path) -> None:
    code = tmp_path / "decorated.py"
    code.write_text(DECORATED)
    for name, width in (("small", 4), ("large", 8), ("small", 4)):
        recipe = recipe_of(STATIC)
        recipe = dataclasses.replace(recipe, builder=FunctionRef.in_file(code, name, {}))
        module = Model.from_module(recipe, fresh(recipe)).build_prepared()
        assert len(module.get_submodule("0").get_parameter("weight")) == width
