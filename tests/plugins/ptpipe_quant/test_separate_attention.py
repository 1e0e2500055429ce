"""Attention that calls linear layers: the same function, int8 in `quant.dynamic`, in files too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe.events import LogLine, Notice
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import DynamicConfig, dynamic
from ptpipe_quant.attention import PROJECTIONS
from ptpipe_quant.separate_attention import separate_projections
from ptpipe_torch import Data, FunctionRef, Model, OnnxFile, Recipe, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.layers import DynamicLinear
from ptpipe_torch.runtime import seeded

from ...texts import quantized, text_data, texts, trained
from .test_attention import CALLS, TARGETS, inputs, make

LAYERS = [f"encoder.layers.{index}.self_attn" for index in (0, 1)]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call_attention_computes_the_same(name: str, train: bool) -> None:
    network = make(name).train(train)
    network.get_submodule("attention").dropout = 0.0
    expected = network(*inputs())
    separate_projections(network, ["attention"])
    assert {part for part, layer in network.named_modules() if type(layer) is nn.Linear} == {
        f"attention.{projection}" for projection in PROJECTIONS
    }
    torch.testing.assert_close(network(*inputs()), expected, rtol=1e-5, atol=1e-5)


class PaddedTexts(nn.Module):
    """torch's encoder layers over texts of different lengths."""

    def __init__(self, *, is_masked: bool = True) -> None:
        super().__init__()
        self.is_masked = is_masked
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.tokens, self.encoder = nn.Embedding(40, 16), nn.TransformerEncoder(layer, 2, nn.LayerNorm(16))
        self.head = nn.Linear(16, 2)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        is_padding_BL = tokens_BL == 0
        x_BLD = self.encoder(self.tokens(tokens_BL), src_key_padding_mask=is_padding_BL if self.is_masked else None)
        return self.head(x_BLD.masked_fill(is_padding_BL.unsqueeze(2), -10.0).amax(1))


class OwnAttention(nn.MultiheadAttention):
    """A subclass may compute anything."""


@builder
def padded_texts() -> nn.Module:
    return PaddedTexts()


@builder
def partly_own() -> nn.Module:
    """One layer's attention is of the user's own type, another has a hook."""
    network = PaddedTexts(is_masked=False)
    first, second = (layer.self_attn for layer in network.encoder.layers)
    first.__class__ = OwnAttention
    second.register_forward_hook(lambda layer, arguments, output: output)
    return network


@pytest.fixture(scope="module")
def words() -> Data:
    return text_data(min_length=1, max_length=16)


def model_of(build: Any, data: Data) -> Model:
    with seeded(0):
        return Model.from_module(Recipe(FunctionRef.to(build), data.info.signature), build())


@pytest.fixture(scope="module")
def trained_texts(words: Data) -> Model:
    return trained(model_of(padded_texts, words), words, epochs=6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "backend"),
    [("static", TARGETS[0]), ("qat", TARGETS[-1]), ("dynamic", TARGETS[0]), ("dynamic", TARGETS[-1])],
)
def test_texts_of_different_lengths(
    path: str, backend: str, trained_texts: Model, words: Data, ctx: Context, metrics: Any
) -> None:
    int8 = quantized(trained_texts, words, ctx, backend, path)
    assert metrics()["int8_layers"] == 2 * 6 + 1
    assert not [part for part in metrics()["float_layers"] if "Linear" in part or "Attention" in part]
    file = export_onnx(ExportConfig(num_samples=64), ctx, int8, words)
    tokens_BL = texts(48, 5, min_length=1, max_length=16)
    longer_BL = np.pad(tokens_BL, ((0, 0), (0, 5)))
    logits: dict[str, np.ndarray] = {}
    for name, model in (("float", trained_texts), ("torch", int8), ("file", file)):
        with model.predictor(1) as predict:
            logits[name], longer = (predict({"tokens": each})["logits"] for each in (tokens_BL, longer_BL))
        allowed = 1e-4 if name == "float" else 0.02
        np.testing.assert_allclose(longer, logits[name], rtol=0, atol=allowed * np.ptp(longer), err_msg=name)
    classes = {name: found.argmax(1) for name, found in logits.items()}
    assert len(set(classes["float"])) == 2
    assert np.mean(classes["torch"] == classes["float"]) > 0.9
    assert np.abs(logits["file"] - logits["torch"]).max() <= 0.05 * np.ptp(logits["torch"])
    if path == "dynamic":
        assert operators(file)["MatMulInteger"] == 13
    else:
        assert "13 of 13 linear layers, 4 of 4 matrix products" in metrics()["integer_coverage"]


def operators(file: OnnxFile) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(file.path).graph.node)


def dynamic_layers(int8: Model) -> set[str]:
    with quantized_engine(int8.recipe.backend):
        return {name for name, layer in int8.build().named_modules() if isinstance(layer, DynamicLinear)}


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("MultiheadAttention", {f"{layer}.{projection}" for layer in LAYERS for projection in PROJECTIONS}),
        ("*.0.self_attn", {f"{LAYERS[0]}.{projection}" for projection in PROJECTIONS}),
        ("*.self_attn.q_proj", {f"{layer}.q_proj" for layer in LAYERS}),
    ],
)
def test_what_skip_names_stays_float(
    skip: str, left: set[str], trained_texts: Model, ctx: Context, events: Any
) -> None:
    everything = dynamic_layers(dynamic(DynamicConfig(backend=TARGETS[0]), ctx, trained_texts))
    found = dynamic_layers(dynamic(DynamicConfig(backend=TARGETS[0], skip=(skip,)), ctx, trained_texts))
    assert everything - found == left
    assert not [event for event in events if isinstance(event, Notice)]


def test_attention_of_other_types_stays_float_and_is_named(words: Data, ctx: Context, events: Any) -> None:
    found = dynamic_layers(dynamic(DynamicConfig(backend=TARGETS[0]), ctx, model_of(partly_own, words)))
    assert not [name for name in found if "self_attn" in name]
    assert {f"encoder.layers.{index}.{name}" for index in (0, 1) for name in ("linear1", "linear2")} <= found
    lines = [event.text for event in events if isinstance(event, LogLine)]
    assert f"{LAYERS[0]} stays float: its type is derived from MultiheadAttention" in lines
    assert f"{LAYERS[1]} stays float: it has hooks" in lines
