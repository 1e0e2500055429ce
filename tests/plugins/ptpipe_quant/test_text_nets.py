"""Text networks as int8, on every path and engine.

Shape legend: N texts, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import JSON, Context
from ptpipe.events import Event, LogLine, Notice
from ptpipe_quant import stages
from ptpipe_quant.config import DynamicConfig, PrepareConfig
from ptpipe_torch import BATCH, Data, FunctionRef, Model, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.runtime import seeded
from ptpipe_zoo import TextTransformerConfig, text_transformer

from ...texts import TAGS, network_of, quantized, text_data, trained
from .conftest import BACKENDS as ALL_BACKENDS

BACKENDS = [backend for backend in ALL_BACKENDS if backend in ("fbgemm", "qnnpack")]
NETWORKS = ["transformer", "causal", "lstm"]
PATHS = ["dynamic", "static", "qat"]
INT8_LINEARS = {"transformer": 7, "causal": 7, "lstm": 1}
TABLES = ["embedding.tokens", "embedding.positions"]


@pytest.fixture(scope="module")
def data() -> Data:
    return text_data()


@pytest.fixture(scope="module")
def token_data() -> Data:
    return text_data(TAGS)


@pytest.fixture(scope="module")
def models(data: Data, token_data: Data, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Each network; the causal one is for a task on tokens."""
    ctx = Context("net", "model.test", 7, tmp_path_factory.mktemp("nets"))
    sets = {"transformer": data, "causal": token_data, "lstm": data}
    return {name: trained(network_of(name, sets[name], ctx), sets[name]) for name in NETWORKS}


def outputs_of(model: Model, tokens_NL: np.ndarray) -> np.ndarray:
    with model.predictor(1) as predict:
        return predict({"tokens": tokens_NL})["logits"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NETWORKS)
def test_int8_computes_the_network(
    name: str, path: str, backend: str, models: Any, data: Data, token_data: Data, ctx: Context, metrics: Any
) -> None:
    model, used = models[name], token_data if name == "causal" else data
    int8 = quantized(model, used, ctx, backend, path)
    tokens_NL = used.splits["test"].inputs["tokens"].values()
    expected, found = outputs_of(model, tokens_NL), outputs_of(int8, tokens_NL)
    difference, spread = np.abs(found - expected), float(np.ptp(expected))
    assert difference.mean() < 0.02 * spread
    assert difference.max() < (0.2 if path == "qat" else 0.1) * spread  # QAT trains on
    is_int8_lstm = name == "lstm" and path == "dynamic"
    assert metrics()["int8_layers"] == INT8_LINEARS[name] + is_int8_lstm
    with quantized_engine(backend):
        layers = int8.build().modules()
    assert sum(map(has_int8_weights, layers)) == INT8_LINEARS[name]
    stored = {name.rpartition(".")[0] for name in metrics()["stored_as_int8"]}
    expected_stored = {"embedding.tokens", "lstm"} if name == "lstm" else set(TABLES)
    assert stored == expected_stored - ({"lstm"} if is_int8_lstm else set())
    assert {f"{name} (LSTM)" if name == "lstm" else f"{name} (Embedding)" for name in stored} <= set(
        metrics()["float_layers"]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_padding_changes_an_int8_output_by_a_step_at_most(
    name: str, backend: str, models: Any, data: Data, ctx: Context
) -> None:
    int8 = quantized(models[name], data, ctx, backend, "static")
    with quantized_engine(backend):
        head: Any = int8.build().get_submodule("head.0")
    tokens_NL = data.splits["test"].inputs["tokens"].values()
    assert not tokens_NL.any(1).all(), "there is an empty text"
    with int8.predictor(1) as predict:
        together_NK = predict({"tokens": tokens_NL})["logits"]
        for row, tokens_L in enumerate(tokens_NL[:24]):
            length = max(1, int((tokens_L != 0).sum()))
            alone_1K = predict({"tokens": tokens_NL[row : row + 1, :length]})["logits"]
            assert np.abs(alone_1K - together_NK[row]).max() < 1.01 * head.scale
    assert np.isfinite(together_NK).all()


@pytest.mark.parametrize("path", PATHS)
def test_the_int8_file_is_at_most_a_third_of_the_float_file(path: str, ctx: Context) -> None:
    data = text_data(num=(16, 16, 16), vocabulary_size=2000)
    model = text_transformer(TextTransformerConfig(dim=128, num_layers=1), ctx, data)
    assert quantized(model, data, ctx, BACKENDS[0], path).size_bytes < 0.3 * model.size_bytes


def test_tables_and_recurrent_layers_are_stored_with_a_scale_for_each_row(
    models: Any, data: Data, ctx: Context
) -> None:
    for path in ("dynamic", "static"):  # on fbgemm, where an int8 LSTM has such scales too
        int8 = quantized(models["lstm"], data, ctx, BACKENDS[0], path)
        for name in ("embedding.tokens.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0"):
            packed, weight = int8.int8_tensors, models["lstm"].tensors[name]
            integers, scales = packed[f"{name}:int8"], packed[f"{name}:scales"]
            assert integers.dtype is torch.int8 and scales.shape == (len(weight),)
            assert (integers * scales[:, None] - weight).abs().max() <= 0.51 * scales.max()


@pytest.mark.parametrize("skip", [(), ("LSTM",)])
def test_a_notice_says_why_an_lstm_is_float_after_calibration(
    skip: tuple[str, ...], models: Any, ctx: Context, events: list[Event]
) -> None:
    stages.prepare(PrepareConfig(skip=skip, observer="min_max"), ctx, models["lstm"])
    lines = [event.text for event in events if isinstance(event, LogLine)]
    reason = "lstm stays float: torch has int8 kernels for recurrent layers in quant.dynamic alone"
    assert (reason in lines) == (not skip)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == ([] if skip else [f"1 layer stays float ({reason.replace(' stays float', '')})"])


@pytest.mark.parametrize("skip", ["embedding.tokens", "Embedding", "embedding"])
def test_a_skipped_table_stays_as_it_is(
    skip: str, models: Any, data: Data, ctx: Context, metrics: Callable[[], dict[str, JSON]]
) -> None:
    model = models["transformer"]
    for prepare in (True, False):
        if prepare:
            prepared = stages.prepare(PrepareConfig(skip=(skip,), observer="min_max"), ctx, model)
            int8 = stages.convert(ctx, trained_ranges(prepared, data))
        else:
            int8 = stages.dynamic(DynamicConfig(skip=(skip,)), ctx, model)
        assert int8.int8_tensors["embedding.tokens.weight"].equal(model.tensors["embedding.tokens.weight"])
        assert metrics()["stored_as_int8"] == (["embedding.positions.weight"] if skip == "embedding.tokens" else [])


def trained_ranges(prepared: Model, data: Data) -> Model:
    network = prepared.build_prepared()
    with torch.no_grad():
        for batch in data.batches("calibration"):
            network(*batch.args)
    return prepared.with_state_dict_of(network)


def test_a_trial_conversion_sees_tokens_and_not_padding_alone(
    models: Any, ctx: Context, events: list[Event], metrics: Any
) -> None:
    """All zeros would be a batch of empty texts, of which the last layer gets zeros."""
    from ptpipe_torch.model.example_inputs import probe_inputs

    network = models["transformer"].build()
    (tokens_BL,) = probe_inputs(network, models["transformer"].signature.inputs)
    assert (tokens_BL != 0).any(1).all() and tokens_BL.max() < 40
    assert network(tokens_BL).unique(dim=0).shape[0] > 1


class Hiding(nn.Module):
    """Attention that hides tokens with -inf: where it hides all, outputs are NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.query, self.out = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embedding(tokens_BL)
        scores_BLL = self.query(x_BLD) @ x_BLD.transpose(1, 2)
        weights_BLL = scores_BLL.masked_fill(mask_BL.unsqueeze(1) == 0, -torch.inf).softmax(-1)
        logits: torch.Tensor = self.out((weights_BLL @ x_BLD).mean(1))
        return logits


@builder
def hiding() -> nn.Module:
    return Hiding()


@pytest.mark.parametrize("dtype", ["bool", "int64"])
def test_masks_beside_tokens_are_not_all_padding_in_trials(dtype: str, data: Data, ctx: Context) -> None:
    (tokens,) = data.info.signature.inputs
    mask = TensorSpec("mask", dtype, tokens.shape)
    signature = Signature((tokens, mask), (TensorSpec("logits", "float32", (BATCH, 3)),))
    with seeded(0):
        model = Model.from_module(Recipe(FunctionRef.to(hiding), signature), Hiding())
    int8 = stages.dynamic(DynamicConfig(), ctx, model)
    tokens_NL = data.splits["test"].inputs["tokens"].values()[:8]
    inputs = {"tokens": tokens_NL, "mask": np.ones_like(tokens_NL, dtype)}
    with model.predictor(1) as expect, int8.predictor(1) as predict:
        expected_NK, found_NK = expect(inputs)["logits"], predict(inputs)["logits"]
    assert np.abs(found_NK - expected_NK).max() < 0.05 * np.ptp(expected_NK)


class WithAnIdleTable(nn.Module):
    """A table that it does not use, one that it uses twice, and one whose weight a linear layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.twice, self.tied = nn.Embedding(9, 8), nn.Embedding(40, 8), nn.Embedding(40, 8)
        self.out = nn.Linear(8, 40)
        self.out.weight = self.tied.weight

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.twice(tokens_BL) + self.tied(tokens_BL) * self.twice(tokens_BL)
        scores: torch.Tensor = self.out(x_BLD).mean(1)
        return scores


@builder
def with_an_idle_table() -> nn.Module:
    return WithAnIdleTable()


@pytest.mark.parametrize("path", ["dynamic", "static"])
def test_tables_that_are_idle_or_called_twice_or_tied(path: str, data: Data, ctx: Context, metrics: Any) -> None:
    signature = Signature(data.info.signature.inputs, (TensorSpec("logits", "float32", (BATCH, 40)),))
    with seeded(0):
        model = Model.from_module(Recipe(FunctionRef.to(with_an_idle_table), signature), WithAnIdleTable())
    tokens_NL = data.splits["test"].inputs["tokens"].values()
    int8 = quantized(model, data, ctx, BACKENDS[0], path)
    difference = np.abs(outputs_of(int8, tokens_NL) - outputs_of(model, tokens_NL))
    assert difference.max() < 0.1 * np.ptp(outputs_of(model, tokens_NL))
    stored = {name.partition(".")[0].partition("_call")[0] for name in metrics()["stored_as_int8"]}
    assert stored == ({"idle", "twice"} if path == "dynamic" else {"twice"})
    assert not [name for name in int8.int8_tensors if name.startswith("twice") and name.endswith(".weight")]


class MaskedMean(nn.Module):
    """The mean over the tokens that a mask has, which of none is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(40, 8), nn.Linear(8, 3)

    def forward(self, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        mask_BL1 = mask_BL.unsqueeze(2).float()
        scores: torch.Tensor = self.out((self.embedding(ids_BL) * mask_BL1).sum(1) / mask_BL1.sum(1))
        return scores


@builder
def masked_mean() -> nn.Module:
    return MaskedMean()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_without_a_token_refuses_no_network(backend: str, ctx: Context, metrics: Any) -> None:
    inputs = tuple(TensorSpec(name, "int64", (BATCH, "length")) for name in ("ids", "mask"))
    signature = Signature(inputs, (TensorSpec("logits", "float32", (BATCH, 3)),))
    with seeded(0):
        model = Model.from_module(Recipe(FunctionRef.to(masked_mean), signature), MaskedMean())
    int8 = stages.dynamic(DynamicConfig(backend=backend), ctx, model)
    assert metrics()["int8_layers"] == 1
    given = {"ids": np.arange(14).reshape(2, 7) + 1, "mask": np.ones((2, 7), np.int64)}
    with model.predictor(1) as run, int8.predictor(1) as run_int8:
        assert np.abs(run(given)["logits"] - run_int8(given)["logits"]).max() < 0.02
