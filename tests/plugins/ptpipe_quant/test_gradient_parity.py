"""QAT has the gradients of the user's network: parts without any, and functions with a backward pass of their own.

Shape legend: N images, K classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptpipe import StageError
from ptpipe.events import Notice
from ptpipe_quant import ConvertConfig, PrepareConfig, PrepareQatConfig, convert, gradient_parity, prepare, prepare_qat
from ptpipe_torch import Data, Model, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.torchvision_compat import torchvision

from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model, train

FIRST = BACKENDS[0]
SCALE = 0.5


class Reversed(torch.autograd.Function):
    """Gradient reversal, of domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.scale * gradient, None


class Sign(torch.autograd.Function):
    """A sign with a straight-through gradient, of binary networks."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class FrugalSiLU(torch.autograd.Function):
    """Saves memory; its gradient is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * (gate * (1 + x * (1 - gate)))


class TwoParts(nn.Module):
    """Features, and what is behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, NUM_CLASSES)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits_NK: torch.Tensor = self.head(self.body(self.between(x)).mean((2, 3)))
        return logits_NK


class NoGrad(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.features(x)


class Decorated(TwoParts):
    """Returns a tuple from inside."""

    @torch.no_grad()
    def encoded(self, x: torch.Tensor) -> Any:
        return self.features(x).chunk(2, 1)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.encoded(x)
        return torch.cat([first, second], 1)


class InInferenceMode(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = self.features(x)
        return y.clone()


class NotInInferenceMode(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            return self.features(x)


class WithoutGradientOfTheInput(TwoParts):
    """Branches on a size, so that it is traced with sizes."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if x.shape[-1] > 4:
                x = x * 2
        return self.features(x)


class Reversal(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Reversed.apply(self.features(x), SCALE)  # type: ignore[no-untyped-call, no-any-return]


class StoredReversal(TwoParts):
    def __init__(self) -> None:
        super().__init__()
        self.reverse = Reversed.apply

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.reverse(self.features(x), SCALE)  # type: ignore[no-untyped-call, no-any-return]


class Binary(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Sign.apply(self.features(x))  # type: ignore[no-untyped-call, no-any-return]


class Frugal(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return FrugalSiLU.apply(self.features[0](x))  # type: ignore[no-untyped-call, no-any-return]


class Checkpointed(TwoParts):
    """Its activation checkpoint is an autograd function of torch's, which switches gradients off."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.features, x, use_reentrant=True)
        return y


class Hooked(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        y = self.features(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: -gradient)
        return y


class Switched(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            return self.features(x)


class OffInEvalMode(TwoParts):
    """Trains all of it."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.training):
            return self.features(x)


class RootOfZero(TwoParts):
    """Has no finite gradient where its features are zero."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(self.features(x))


class InSubmodule(TwoParts):
    """Has a part that switches gradients off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Switched()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x) * self.inner(x)[:, :1, None, None]


class Frozen(TwoParts):
    def __init__(self) -> None:
        super().__init__()
        self.features.requires_grad_(False)


class ChangedInPlace(TwoParts):
    """Changes what the batch norm in front of it needs for its gradient: torch can't train it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        y = self.norm(x)
        x += 1
        return x + y


class Underivable(TwoParts):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return x + torch.special.zeta(x.abs() + 2, 1.0)


KEPT = (
    *(NoGrad, Decorated, InInferenceMode, NotInInferenceMode, WithoutGradientOfTheInput, Reversal, StoredReversal),
    *(Binary, Frugal, Checkpointed, OffInEvalMode, Frozen, RootOfZero),
)
NETWORKS: dict[str, Any] = {
    type_.__name__: type_ for type_ in (*KEPT, Hooked, Switched, InSubmodule, TwoParts, ChangedInPlace, Underivable)
}


@builder
def network(*, name: str) -> nn.Module:
    """One of `NETWORKS`."""
    module: nn.Module = NETWORKS[name]()
    return module


def prepared(ctx, type_: Any, **options: Any) -> Model:
    return prepare_qat(PrepareQatConfig(**{"backend": FIRST} | options), ctx, make_model(network, name=type_.__name__))


@pytest.fixture(scope="module")
def few(digits: Data) -> Data:
    """Digits for one step."""
    train_split = digits.splits["train"].subset(np.arange(64))
    return Data(digits.info, {**digits.splits, "train": train_split}, digits.loader)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch's checkpoint, without gradients
@pytest.mark.parametrize("batch_norm", ["fold", "train"])
@pytest.mark.parametrize("type_", KEPT)
def test_gradients_are_those_of_the_network(ctx, metrics, type_, batch_norm) -> None:
    prepared(ctx, type_, batch_norm=batch_norm)
    assert metrics()["gradient_difference"] < 1e-4


def test_only_the_graph_can_be_trained(ctx, metrics, few, events) -> None:
    model = prepared(ctx, ChangedInPlace)
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert notice.startswith("gradients are not compared, since only the prepared network can be trained (one of the")
    assert "gradient_difference" not in metrics()
    convert(ConvertConfig(), ctx, train(model, few, lr=0.01))


def test_a_network_without_a_derivative_is_refused(ctx) -> None:
    with pytest.raises(StageError, match=r"this network can't be trained: .*zeta.* is not implemented"):
        prepared(ctx, Underivable)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type_", [NoGrad, Decorated, InInferenceMode])
def test_what_has_no_gradient_is_not_trained(ctx, few, type_, backend) -> None:
    model = prepared(ctx, type_, backend=backend)
    before, after = model.build_prepared().state_dict(), train(model, few, lr=0.1).build_prepared().state_dict()
    weights = [name for name in before if name.endswith(("weight", "bias"))]
    changed = {name for name in weights if not torch.equal(before[name], after[name])}
    assert {name.split(".")[0] for name in changed} == {"body", "head"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type_", [NoGrad, Reversal, Binary, Frugal])
def test_such_networks_become_int8(ctx, few, type_, backend) -> None:
    int8 = convert(ConvertConfig(), ctx, train(prepared(ctx, type_, backend=backend), few, lr=0.01))
    with quantized_engine(backend):
        layers = [name for name, layer in int8.build().named_modules() if has_int8_weights(layer)]
    assert layers == ["features.0", "body.0", "head"]
    assert np.isfinite(logits_of(int8, few, 8)).all()  # builds it in inference mode


def test_a_function_that_changes_gradients_alone_costs_no_rounding(ctx) -> None:
    module = prepared(ctx, Reversal).build_prepared()
    (reversal,) = (node for node in module.graph.nodes if "reversed" in str(node.target).lower())  # type: ignore[union-attr]
    (reader,) = reversal.users
    assert reader.target == "body.0"  # no fake quantization behind it


@pytest.mark.parametrize(
    ("type_", "difference"),
    [
        (Hooked, r"another gradient in the prepared network than in the model \(by 200%\)"),
        (Switched, "a gradient in the prepared network, and none in the model"),
    ],
)
def test_another_gradient_is_refused(ctx, type_, difference) -> None:
    with pytest.raises(StageError, match=rf"features\.0\.weight has {difference}; so do .* hooks on gradients"):
        prepared(ctx, type_)


def test_a_submodule_that_is_left_float_keeps_its_gradients(ctx, metrics) -> None:
    prepared(ctx, InSubmodule, skip=["inner"])
    assert metrics()["gradient_difference"] < 1e-4


@pytest.mark.parametrize("type_", [NoGrad, Reversal])
def test_what_export_loses_is_refused(ctx, type_) -> None:
    with pytest.raises(StageError, match="route: fx keeps"):
        prepared(ctx, type_, route="export")


@pytest.mark.parametrize("type_", [Hooked, Switched, Reversal])
def test_static_quantization_asks_for_no_gradients(ctx, type_) -> None:
    prepare(PrepareConfig(backend=FIRST), ctx, make_model(network, name=type_.__name__))


@builder
def swin_v2() -> nn.Module:
    """Keys have no bias, which is stored as a part of one that has."""
    torchvision()
    from torchvision.models import swin_transformer as swin

    parts: Any = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    sizes: Any = ([2, 2], 8, [2, 1], [2, 2], [2, 2])
    return nn.Sequential(nn.Conv2d(1, 3, 1), swin.SwinTransformer(*sizes, num_classes=NUM_CLASSES, **parts))


def test_keys_of_swin_v2_stay_without_bias(ctx, few) -> None:
    model = train(prepare_qat(PrepareQatConfig(backend=FIRST), ctx, make_model(swin_v2)), few, lr=0.1)
    query, key, value = model.build_prepared().get_parameter("1.features.1.0.attn.qkv.bias").chunk(3)
    assert query.any() and value.any() and not key.any()


def test_a_network_that_amplifies_rounding_is_judged_by_its_own(monkeypatch, ctx) -> None:
    """Nothing can be said of gradients that change by more when the user's network is rounded otherwise."""
    monkeypatch.setattr(gradient_parity, "TOLERANCE", 0.0)  # so that rounding alone is beyond it
    prepared(ctx, TwoParts, batch_norm="fold")
    monkeypatch.setattr(gradient_parity, "OWN_ROUNDINGS", 0)
    with pytest.raises(StageError, match="another gradient"):
        prepared(ctx, TwoParts, batch_norm="fold")
