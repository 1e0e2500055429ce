"""`model.text_transformer` and `model.text_lstm`.

Shape legend: B texts, L tokens, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from ptpipe import Context, StageError
from ptpipe.events import Event, Notice
from ptpipe_torch import (
    ArrayInfo,
    Classification,
    ColumnInfo,
    Data,
    DatasetInfo,
    LanguageModeling,
    Model,
    RaggedColumn,
    Regression,
    Split,
    TokensInfo,
    epoch_order,
)
from ptpipe_torch.runtime import seeded
from ptpipe_zoo import TextLstmConfig, TextTransformerConfig, text_lstm, text_nets, text_transformer

from ...texts import CLASSES, TAGS, text_data

TASKS = [CLASSES, TAGS]
VARIANTS: dict[str, tuple[Callable[..., Model], dict[str, Any]]] = {
    "transformer": (text_transformer, {}),
    "first": (text_transformer, {"pooling": "first"}),
    "causal": (text_transformer, {"causal": True}),
    "lstm": (text_lstm, {}),
    "last": (text_lstm, {"pooling": "last", "num_layers": 2}),
}
SMALL: dict[Any, dict[str, Any]] = {
    text_transformer: {"dim": 16, "num_heads": 2, "num_layers": 2},
    text_lstm: {"dim": 16, "hidden_size": 24},
}
CONFIGS: dict[Any, Any] = {text_transformer: TextTransformerConfig, text_lstm: TextLstmConfig}

each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_task = pytest.mark.parametrize("task", TASKS, ids=["pooled", "per_token"])


def model_of(variant: str, data: Data, ctx: Context, **options: Any) -> Model:
    make, given = VARIANTS[variant]
    return make(CONFIGS[make](**{**SMALL[make], **given, **options}), ctx, data)


def tokens_of(*lengths: int, padded: int, seed: int = 0) -> torch.Tensor:
    ids_BL = torch.randint(1, 40, (len(lengths), padded), generator=torch.Generator().manual_seed(seed))
    return ids_BL * (torch.arange(padded) < torch.tensor(lengths)[:, None])


@each_task
@each_variant
def test_padding_does_not_change_what_is_computed_of_a_text(variant: str, task: Any, ctx: Context) -> None:
    network = model_of(variant, text_data(task), ctx).build()
    tokens_BL = tokens_of(1, 5, 12, 0, padded=12)
    together = network(tokens_BL)
    assert together.isfinite().all()
    for row, length in enumerate((1, 5, 12, 0)):
        alone = network(tokens_BL[row : row + 1, : max(length, 1)])[0]
        expected = together[row] if alone.dim() == 1 else together[row, : len(alone)]
        if length or alone.dim() == 1:
            torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-6)


@each_task
@each_variant
def test_gradients_of_a_batch_with_an_empty_text_are_finite(variant: str, task: Any, ctx: Context) -> None:
    data = text_data(task)
    network = model_of(variant, data, ctx).build().train()
    tokens_BL = tokens_of(3, 0, padded=5)
    targets = {"tags": tokens_BL % 5} if task is TAGS else {"labels": torch.tensor([0, 1])}
    task.losses({"logits": network(tokens_BL)}, targets).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("variant", ["transformer", "causal", "lstm"])
def test_only_a_causal_network_is_blind_to_the_future(variant: str, ctx: Context) -> None:
    network = model_of(variant, text_data(TAGS), ctx).build()
    tokens_BL = tokens_of(12, padded=12)
    changed_BL = tokens_BL.clone()
    changed_BL[0, 6] += 1
    same_L = (network(tokens_BL) == network(changed_BL)).all(2)[0]
    assert same_L[:6].all() == (variant != "transformer")
    assert not same_L[6:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_layer_computes_torchs(causal: bool) -> None:
    with seeded(3):
        layer = text_nets.EncoderLayer(16, 4, 32, 0.0, causal=causal).eval()
        theirs = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True).eval()
    theirs.self_attn.in_proj_weight.data = torch.cat([part.weight for part in (layer.query, layer.key, layer.value)])
    theirs.self_attn.in_proj_bias.data = torch.cat([part.bias for part in (layer.query, layer.key, layer.value)])
    pairs = [
        (theirs.self_attn.out_proj, layer.out),
        (theirs.linear1, layer.feed_forward[0]),
        (theirs.linear2, layer.feed_forward[2]),
        (theirs.norm1, layer.attention_norm),
        (theirs.norm2, layer.feed_forward_norm),
    ]
    for one, other in pairs:
        one.load_state_dict(other.state_dict())
    is_token_BL = tokens_of(3, 7, padded=7) != 0
    x_BLD = torch.randn(2, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7) if causal else None
    expected_BLD = theirs(x_BLD, mask, None if causal else (~is_token_BL).float() * -1e9)
    found_BLD = layer(x_BLD, text_nets.attention_bias(~is_token_BL))
    torch.testing.assert_close(found_BLD[is_token_BL], expected_BLD[is_token_BL], rtol=1e-4, atol=1e-5)


def test_pooling_takes_the_tokens_alone() -> None:
    x_BLD, is_token_BL = torch.randn(3, 6, 4), tokens_of(1, 4, 0, padded=6) != 0
    for pooling, expected in (("mean", x_BLD[1, :4].mean(0)), ("first", x_BLD[1, 0]), ("last", x_BLD[1, 3])):
        pooled_BD = text_nets.pooled(x_BLD, is_token_BL, pooling)  # type: ignore[arg-type]
        torch.testing.assert_close(pooled_BD[1], expected)
        torch.testing.assert_close(pooled_BD[0], x_BLD[0, 0])
        assert not pooled_BD[2].any()


@pytest.mark.sampled(3)
@each_variant
def test_it_learns_which_word_matters(variant: str, ctx: Context) -> None:
    data = text_data(num=(640, 200, 1))
    model = model_of(variant, data, ctx, dropout=0.0)
    network = model.build().train()
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    with seeded(0):
        for epoch in range(20):
            for batch in data.batches("train", order_N=epoch_order(640, 7, epoch), batch_size=32):
                F.cross_entropy(network(*batch.args), batch.targets["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()
    with model.with_state_dict_of(network).predictor(1) as predict:
        batches = list(data.batches("test"))
        right = [
            predict(batch.input_arrays())["logits"].argmax(1) == batch.targets["labels"].numpy() for batch in batches
        ]
    assert np.concatenate(right).mean() > 0.95


@each_task
@each_variant
def test_the_seed_alone_decides_the_weights(variant: str, task: Any, ctx: Context) -> None:
    data = text_data(task)
    torch.manual_seed(1)
    one = model_of(variant, data, ctx)
    expected = torch.rand(2)
    torch.manual_seed(1)
    same = model_of(variant, data, ctx)
    assert torch.rand(2).equal(expected), "torch's own random numbers are left alone"
    assert all(tensor.equal(same.tensors[name]) for name, tensor in one.tensors.items())
    other = model_of(variant, data, Context("net", "model.test", 8, ctx.scratch))
    changed = {name for name, tensor in one.tensors.items() if not tensor.equal(other.tensors[name])}
    assert changed == {name for name in one.tensors if "norm" not in name}


@each_task
@each_variant
def test_it_survives_the_store_and_is_traced(variant: str, task: Any, ctx: Context) -> None:
    data = text_data(task)
    model = model_of(variant, data, ctx)
    assert model.signature == data.info.signature
    folder = ctx.scratch / "model"
    folder.mkdir()
    model.save(folder)
    tokens_BL = tokens_of(2, 9, 0, padded=10)
    expected = model.build()(tokens_BL)
    network = Model.load(folder).build()
    assert network(tokens_BL).equal(expected)
    traced = fx.symbolic_trace(network)
    assert traced(tokens_BL).equal(expected)
    assert traced(tokens_BL[:1, :3]).equal(network(tokens_BL[:1, :3]))


def test_outputs_of_a_regression_have_the_targets_units(ctx: Context) -> None:
    task = Regression(target_names=("u",), mean=(100.0,), std=(20.0,))
    info = DatasetInfo("prices", {"tokens": TokensInfo(vocabulary_size=40, max_length=12)}, task)
    for reference in (
        text_nets.transformer_ref(TextTransformerConfig(dim=16), info),
        text_nets.lstm_ref(TextLstmConfig(dim=16), info),
    ):
        with seeded(0):
            network = reference.resolve("builder")(**reference.arguments)
        assert 0 < (network(tokens_of(3, 8, padded=8)) - 100).abs().max() < 60


REFUSED: dict[str, dict[str, ColumnInfo]] = {
    "integers of no vocabulary": {"tokens": ArrayInfo(dtype="int64", shape=("length",))},
    "two texts": {
        "question": TokensInfo(vocabulary_size=40, max_length=12),
        "answer": TokensInfo(vocabulary_size=40, max_length=12),
    },
}


@pytest.mark.parametrize("inputs", REFUSED.values(), ids=REFUSED)
def test_other_data_is_refused_naming_the_signature(inputs: dict[str, ColumnInfo]) -> None:
    info = DatasetInfo("odd", inputs, Classification(class_names=("a", "b")))
    for make, config in ((text_nets.transformer_ref, TextTransformerConfig()), (text_nets.lstm_ref, TextLstmConfig())):
        with pytest.raises(StageError, match=r"^model.text_\w+ takes texts .* odd has ") as caught:
            make(config, info)  # type: ignore[operator]
        assert str(info.signature) in str(caught.value)


def test_a_language_model_that_sees_the_future_is_noticed(ctx: Context, events: list[Event]) -> None:
    tokens = {"tokens": TokensInfo(vocabulary_size=40, max_length=12)}
    data = Data(DatasetInfo("words", tokens, LanguageModeling(vocabulary_size=40)), {"train": no_texts()})
    for variant, expected in (("causal", 0), ("lstm", 0), ("transformer", 1)):
        model_of(variant, data, ctx)
        assert len([event for event in events if isinstance(event, Notice)]) == expected


def no_texts() -> Split:
    column = RaggedColumn(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64), 0)
    return Split(np.array([], dtype=np.str_), {"tokens": column}, {"next_tokens": column})
