"""Networks that do more with a linear layer than call it, quantized dynamically.

Shape legend: N images, C channels, H height, W width, K classes, T tokens (rows of an image), D values of a token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe.events import LogLine, Notice
from ptpipe_quant import DynamicConfig, dynamic
from ptpipe_torch import Model, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.float_parts import num_int8_layers
from ptpipe_torch.int8.layers import DynamicLinear
from ptpipe_torch.int8.recurrent import DynamicRecurrent

from ...signatures import logits_from
from .conftest import BACKENDS, NUM_CLASSES, make_model

ENGINES = [backend for backend in BACKENDS if backend in ("fbgemm", "qnnpack")]
D = 8
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


class Network(nn.Module):
    """A linear layer `inner` of the network, and the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, D), nn.Linear(D * D, NUM_CLASSES)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(images_NCHW.squeeze(1)).flatten(1))

    def hidden(self, x_NTD: torch.Tensor) -> torch.Tensor:
        return self.inner(x_NTD).relu()


class Keyword(Network):
    def hidden(self, x_NTD):
        return self.inner(input=x_NTD).relu()


class BareWeight(Network):
    def hidden(self, x_NTD):
        return F.linear(x_NTD, self.inner.weight, self.inner.bias).relu()


class AskedForItsType(Network):
    def hidden(self, x_NTD):
        y_NTD = self.inner(x_NTD)
        return y_NTD.relu() if isinstance(self.inner, nn.Linear) else y_NTD


class AllAskedForTheirTypes(Network):
    """Each of two layers may change its type, but not both."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(D, D)

    def hidden(self, x_NTD):
        floats = [layer for layer in (self.inner, self.outer) if isinstance(layer, nn.Linear)]
        return (self.outer(self.inner(x_NTD)) if floats else x_NTD).relu()


class Hooked(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(lambda layer, inputs, output: output.relu())

    def hidden(self, x_NTD):
        return self.inner(x_NTD)


class WeightNorm(Network):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.weight_norm(nn.Conv2d(1, 1, 3, padding=1))
        nn.utils.weight_norm(self.inner)

    def hidden(self, x_NTD):
        return super().hidden(self.conv(x_NTD.unsqueeze(1)).squeeze(1))


class Parametrized(Network):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.inner)


class Listed(Network):
    """Called through a plain list, which still has the float layer."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["layers"] = [self.inner]

    def hidden(self, x_NTD):
        return self.layers[0](x_NTD).relu()


class OnlyInTraining(Network):
    def hidden(self, x_NTD):
        return super().hidden(x_NTD) if self.training else x_NTD


class Double(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner.double()

    def hidden(self, x_NTD):
        return super().hidden(x_NTD.double()).float()


class Masked(Network):
    """torch turns the padded input into a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2)

    def hidden(self, x_NTD):
        is_padding_NT = torch.arange(D).repeat(len(x_NTD), 1) > 5
        return self.inner(x_NTD, src_key_padding_mask=is_padding_NT)


class Encoder(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, batch_first=True), 2)

    def hidden(self, x_NTD):
        return self.inner(x_NTD)


class Attention(Network):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def hidden(self, x_NTD):
        return super().hidden(self.attention(x_NTD, x_NTD, x_NTD, need_weights=False)[0])


class Recurrent(Network):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(D, D, batch_first=True), nn.GRU(D, D, batch_first=True)

    def hidden(self, x_NTD):
        return super().hidden(self.gru(self.lstm(x_NTD)[0])[0])


class Sequences(Network):
    """Recurrent layers called in all ways, in one of which the network reads what is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5)
        self.gru = nn.GRU(2 * D, D, bias=False)
        self.plain = nn.RNN(D, D)

    def hidden(self, x_NTD):
        self.lstm.flatten_parameters()
        states = x_NTD.new_zeros(2 * self.lstm.num_layers, len(x_NTD), self.lstm.hidden_size)
        lengths_N = torch.arange(len(x_NTD)) % D + 1
        packed = nn.utils.rnn.pack_padded_sequence(x_NTD, lengths_N, batch_first=True, enforce_sorted=False)
        packed, _ = self.lstm(packed, (states, states + 0.5))
        y_NTD = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=D)[0]
        y_TND, last = self.gru(input=y_NTD.transpose(0, 1))
        return super().hidden(self.plain(y_TND + last)[0].transpose(0, 1))


class WithInnerLstm(Network):
    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.lstm = layer or nn.LSTM(D, D, batch_first=True)

    def hidden(self, x_NTD):
        return super().hidden(self.lstm(x_NTD)[0])


class ProjectedState(WithInnerLstm):
    def __init__(self) -> None:
        super().__init__(nn.LSTM(D, 2 * D, proj_size=D, batch_first=True))


class OwnLstm(nn.LSTM):
    """A subclass may compute anything."""


class Subclass(WithInnerLstm):
    def __init__(self) -> None:
        super().__init__(OwnLstm(D, D, batch_first=True))


class ReadsAWeight(WithInnerLstm):
    def hidden(self, x_NTD):
        return super().hidden(x_NTD) * self.lstm.weight_hh_l0.abs().mean()


class NormalizedWeight(WithInnerLstm):
    def __init__(self) -> None:
        super().__init__(nn.utils.parametrizations.weight_norm(nn.LSTM(D, D, batch_first=True), "weight_hh_l0"))


class DoubleLstm(WithInnerLstm):
    def __init__(self) -> None:
        super().__init__(nn.LSTM(D, D, batch_first=True, dtype=torch.float64))

    def hidden(self, x_NTD):
        return self.inner(self.lstm(x_NTD.double())[0].float()).relu()


class CalledTwice(Network):
    def hidden(self, x_NTD):
        return super().hidden(super().hidden(x_NTD))


class TwoNames(Network):
    def __init__(self) -> None:
        super().__init__()
        self.same = self.inner
        self.parent = nn.Sequential(nn.Linear(D, D))
        self.same_parent = self.parent

    def hidden(self, x_NTD):
        return self.same_parent(self.parent(self.same(self.inner(x_NTD)).relu()))


class TiedToAnEmbedding(Network):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(D, D)
        self.inner.weight = self.embedding.weight

    def hidden(self, x_NTD):
        return super().hidden(self.embedding(x_NTD[:, :, 0].abs().long().clamp(max=D - 1)))


class TableOfPixels(Network):
    """Takes no number below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, D)

    def hidden(self, x_NTD):
        return super().hidden(self.embedding(x_NTD[:, :, 0].long()))


class ViewBehindConvolution(Network):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, D, 3, padding=1)
        self.head = nn.Linear(D**3, NUM_CLASSES)

    def hidden(self, x_NTD):
        x_NCHW = self.conv(x_NTD.unsqueeze(1))
        return x_NCHW.view(x_NCHW.size(0), -1)


class Transposed(nn.Module):
    """As GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D) / 3), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, D), self.weight).view(x.shape)


class OwnLinear(nn.Linear):
    """As Falcon's."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Rectified(nn.Linear):
    """It is not linear."""

    def forward(self, x):
        return super().forward(x).relu()


class WithTransposed(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Transposed()


class WithOwnLinear(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnLinear(D, D)


class WithRectified(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Rectified(D, D)


class ReadsSizes(WithTransposed):
    """Of a layer that has others than `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.num_outputs = D

    def hidden(self, x_NTD):
        return super().hidden(x_NTD).reshape(-1, D, self.inner.num_outputs)


class AsksForAWeight(Network):
    """As T5 does: an int8 layer has no float weight, and needs none."""

    def hidden(self, x_NTD):
        if isinstance(self.inner.weight, torch.Tensor):
            x_NTD = x_NTD.to(self.inner.weight.dtype)
        return super().hidden(x_NTD)


class ReadsAType(Network):
    def hidden(self, x_NTD):
        return super().hidden(x_NTD.to(self.inner.weight.dtype))


_INNER_FLOAT = {
    BareWeight: "the network reads its bias itself",
    AskedForItsType: "the network computes something else when its type is another",
    Hooked: "it has hooks (as weight_norm and spectral_norm have)",
    WeightNorm: "it has hooks (as weight_norm and spectral_norm have)",
    Listed: "the network does not call it in eval mode",
    OnlyInTraining: "the network does not call it in eval mode",
    Double: "its weight is torch.float64",
    ReadsSizes: "the network reads its num_outputs itself",
    ReadsAType: "the network reads its weight itself",
}
_LSTM_FLOAT = {
    ProjectedState: "torch has no int8 kernel for a projected state (proj_size: 8)",
    Subclass: "its type is OwnLstm",
    ReadsAWeight: "the network reads its weight_hh_l0 itself",
    NormalizedWeight: "its type is ParametrizedLSTM",
    DoubleLstm: "its weight is torch.float64",
}
_FLOAT_LAYERS = {
    **{network: {"inner"} for network in _INNER_FLOAT},
    WithRectified: {"inner"},
    WeightNorm: {"inner", "conv"},
    AllAskedForTheirTypes: {"outer"},
    Parametrized: {"inner"},
    ViewBehindConvolution: {"conv", "inner"},
}
_NETWORKS = [
    *_FLOAT_LAYERS,
    *_LSTM_FLOAT,
    Masked,
    Encoder,
    Attention,
    Keyword,
    Recurrent,
    Sequences,
    CalledTwice,
    TwoNames,
    TiedToAnEmbedding,
    TableOfPixels,
    WithTransposed,
    WithOwnLinear,
    AsksForAWeight,
]


@builder
def network(name: str) -> nn.Module:
    return next(type_ for type_ in _NETWORKS if type_.__name__ == name)()


def float_model(type_: type[Network]) -> Model:
    """Weights other than those that the builder draws."""
    model = make_model(network, name=type_.__name__)
    module = model.build_prepared()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model.with_state_dict_of(module)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("type_", _NETWORKS)
def test_what_an_int8_layer_does_not_offer_stays_float(type_, backend, ctx, events, metrics, tmp_path: Path) -> None:
    model = float_model(type_)
    int8 = dynamic(DynamicConfig(backend=backend), ctx, model)
    parts = [part.rstrip(")").split(" (") for part in metrics()["float_layers"] if part.endswith(")")]
    found = {name for name, kind in parts if "Linear" in kind or "Conv" in kind}
    found |= {"inner" for name, _ in parts if name == "inner.weight"}  # of another class
    assert found == _FLOAT_LAYERS.get(type_, set())
    lines = [event.text for event in events if isinstance(event, LogLine)]
    if type_ in _INNER_FLOAT:
        assert f"inner stays float: {_INNER_FLOAT[type_]}" in lines
    if type_ in _LSTM_FLOAT:
        assert f"lstm stays float: {_LSTM_FLOAT[type_]}" in lines
    if type_ is Sequences:
        assert "plain stays float: torch has no int8 kernel for nn.RNN" in lines
    with quantized_engine(backend):
        num_recurrent = sum(isinstance(layer, DynamicRecurrent) for layer in int8.build().modules())
    assert num_recurrent == (2 if type_ in (Recurrent, Sequences) else 0)
    assert metrics()["int8_layers"] == num_int8_layers(int8.build())

    images_NCHW = np.random.default_rng(1).uniform(0, 3, (8, 1, D, D)).astype(np.float32)
    with torch.no_grad(), int8.predictor(1) as predict:
        logits_NK, expected_NK = logits_from(predict, images_NCHW), model.build()(torch.from_numpy(images_NCHW)).numpy()
    assert np.square(logits_NK - expected_NK).mean() ** 0.5 < 0.03 * expected_NK.std()
    int8.save(tmp_path)
    with Model.load(tmp_path).predictor(1) as predict:
        np.testing.assert_array_equal(logits_from(predict, images_NCHW), logits_NK)


def test_a_layer_with_two_names_is_int8_under_both(ctx) -> None:
    module = dynamic(DynamicConfig(backend=ENGINES[0]), ctx, float_model(TwoNames)).build()
    assert isinstance(module.inner, DynamicLinear)
    assert module.same is module.inner
    assert isinstance(module.parent[0], DynamicLinear)
    assert module.same_parent[0] is module.parent[0]
    float_inner = dynamic(DynamicConfig(backend=ENGINES[0], skip=("inner",)), ctx, float_model(TwoNames)).build()
    assert type(float_inner.same) is nn.Linear


@pytest.mark.parametrize("skip", ["LayerNorm", "inner.layers.0.norm1"])
def test_a_pattern_that_keeps_nothing_float_is_reported(skip, ctx, events) -> None:
    dynamic(DynamicConfig(backend=ENGINES[0], skip=("head", skip)), ctx, float_model(Encoder))
    dynamic(DynamicConfig(backend=ENGINES[0], skip=("inner",)), ctx, float_model(WithTransposed))
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == [f"skip: {skip!r} matches no layer that quant.test would quantize"]


def test_a_network_without_logits(ctx) -> None:
    class Outputs(Network):
        def forward(self, images_NCHW):
            return {"scores": super().forward(images_NCHW)}

    _NETWORKS.append(Outputs)
    with pytest.raises(StageError, match="the network returns a dict of scores; it must return logits"):
        dynamic(DynamicConfig(backend=ENGINES[0]), ctx, make_model(network, name="Outputs"))
    _NETWORKS.remove(Outputs)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_layer_that_is_not_its_formula_is_named(backend, ctx, monkeypatch) -> None:
    whole = DynamicLinear.forward

    def broken(layer, input):
        y = whole(layer, input)
        return y * torch.where(torch.arange(y.shape[-1]) == 1, 1.001, 1.0)  # one channel's scale

    monkeypatch.setattr(DynamicLinear, "forward", broken)
    with pytest.raises(StageError, match=rf"\({backend}\): the int8 layer inner is .* than rounding explains"):
        dynamic(DynamicConfig(backend=backend), ctx, float_model(Keyword))


@pytest.mark.parametrize("backend", ENGINES)
def test_a_recurrent_layer_that_is_not_its_formula_is_named(backend, ctx, monkeypatch) -> None:
    whole = DynamicRecurrent.first_layers

    def broken(layer, *arguments):
        output, last = whole(layer, *arguments)
        return output * torch.where(torch.arange(output.shape[-1]) == 1, 1.001, 1.0), last

    monkeypatch.setattr(DynamicRecurrent, "first_layers", broken)
    with pytest.raises(StageError, match=rf"\({backend}\): the int8 layer lstm is .* than rounding explains"):
        dynamic(DynamicConfig(backend=backend), ctx, float_model(Recurrent))


@pytest.mark.parametrize("skip", ["LSTM", "lstm"])
def test_a_skipped_recurrent_layer_stays_as_it_is(skip, ctx, metrics) -> None:
    model = float_model(Recurrent)
    int8 = dynamic(DynamicConfig(backend=ENGINES[0], skip=(skip,)), ctx, model)
    assert int8.int8_tensors["lstm.weight_hh_l0"].equal(model.tensors["lstm.weight_hh_l0"])
    assert "gru.weight_hh_l0:int8" in int8.int8_tensors
    assert metrics()["float_layers"] == ["lstm (LSTM)"]
    assert metrics()["int8_layers"] == 3
    num_int8 = 6 * D * D + D * D + D * D * NUM_CLASSES
    num_float = 6 * D + D + NUM_CLASSES + 8 * D * (D + 1)  # biases of int8 layers, and the LSTM
    assert metrics()["int8_parameters_fraction"] == pytest.approx(num_int8 / (num_int8 + num_float), abs=1e-4)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_recurrent_layer_alone_is_enough(backend, ctx) -> None:
    int8 = dynamic(DynamicConfig(backend=backend, skip=("Linear",)), ctx, float_model(Recurrent))
    entries = {name: value.dtype for name, value in int8.int8_tensors.items() if name.startswith("gru")}
    assert {name for name, dtype in entries.items() if dtype is torch.int8} == {
        "gru.weight_ih_l0:int8",
        "gru.weight_hh_l0:int8",
    }
    assert entries["gru.weight_hh_l0:bias"] is torch.float32
