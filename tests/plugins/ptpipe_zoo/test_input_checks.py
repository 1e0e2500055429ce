"""Ids and padding that the first samples of a data set don't have.

Shape legend: B texts, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_data.table_columns import CategoriesInfo, NumbersInfo
from ptpipe_torch import DatasetInfo, LanguageModeling, Regression, Task, Unlabeled
from ptpipe_torch.python_file import load_function
from ptpipe_zoo import TextLstmConfig, TextTransformerConfig, extras, nets, text_nets, transformers_models
from ptpipe_zoo.input_checks import check_ids, padding_dependence, refuses_ids

from ...texts import CLASSES, TAGS, text_data

SCORES = Regression(target_names=("year",), mean=(1990.0,), std=(5.0,))
PADDED_INPUTS = "differ for a text alone: mask the padding (tokens != 0)"

Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Pooled(nn.Module):
    """Pools embedded tokens, (B, L, 64), given which are tokens, (B, L)."""

    def __init__(self, pool: Pool, num_outputs: int = 2) -> None:
        super().__init__()
        self.embedding, self.head, self.pool = nn.Embedding(40, 64), nn.Linear(64, num_outputs), pool

    def forward(self, tokens_BL: torch.Tensor) -> Any:
        return self.head(self.pool(self.embedding(tokens_BL), (tokens_BL != 0).unsqueeze(2)))


def masked_mean(x_BLD: torch.Tensor, is_token_BL1: torch.Tensor) -> torch.Tensor:
    return (x_BLD * is_token_BL1).sum(1) / is_token_BL1.sum(1).clamp(min=1)


def masked_maximum(x_BLD: torch.Tensor, is_token_BL1: torch.Tensor) -> torch.Tensor:
    return x_BLD.masked_fill(~is_token_BL1, -1e4).amax(1)


def mean(x_BLD: torch.Tensor, is_token_BL1: torch.Tensor) -> torch.Tensor:
    return x_BLD.mean(1)


def maximum(x_BLD: torch.Tensor, is_token_BL1: torch.Tensor) -> torch.Tensor:
    return x_BLD.amax(1)


def last(x_BLD: torch.Tensor, is_token_BL1: torch.Tensor) -> torch.Tensor:
    return x_BLD[:, -1]


class Recurrent(nn.Module):
    """An LSTM, whose last state says what a text is, or each one what its token is."""

    def __init__(self, num_outputs: int, *, bidirectional: bool = False, per_token: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=bidirectional)
        self.head, self.per_token = nn.Linear(32 if bidirectional else 16, num_outputs), per_token

    def forward(self, tokens_BL: torch.Tensor) -> Any:
        states_BLD, _ = self.lstm(self.embedding(tokens_BL))
        return self.head(states_BLD if self.per_token else states_BLD[:, -1])


def dependence(network: nn.Module, task: Task = CLASSES, *, max_length: int = 12, padded: bool = False) -> str | None:
    texts = text_data(max_length=max_length, padded=padded)
    info = replace(texts.info, task=task)
    return padding_dependence(network, next(texts.batches("train", batch_size=2)).args, info, info.signature)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pool", [mean, maximum, last])
def test_a_network_that_reads_padding(pool: Pool, seed: int) -> None:
    torch.manual_seed(seed)
    reason = dependence(Pooled(pool))
    assert reason is not None and reason.startswith("the logits of a text depend on how far it is padded, ")
    assert reason.endswith(PADDED_INPUTS)
    assert dependence(Pooled(pool), padded=True) is None, "all texts are padded alike"


def test_it_is_seen_in_texts_of_the_maximum_length_and_in_targets_far_from_zero() -> None:
    torch.manual_seed(0)
    data = text_data(min_length=12)
    tokens_BL = next(data.batches("train", batch_size=2)).args[0]
    assert (tokens_BL != 0).all()
    assert padding_dependence(Pooled(mean), [tokens_BL], data.info, data.info.signature)

    def years(x_BLD: torch.Tensor, is_token_BL1: torch.Tensor) -> torch.Tensor:
        return x_BLD.mean(1)

    network = nn.Sequential(Pooled(years, 1), Rescaled())
    assert dependence(network, SCORES)
    assert dependence(nn.Sequential(Pooled(masked_mean, 1), Rescaled()), SCORES) is None


class Rescaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor: return 5 * x + 1990  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pool", [masked_mean, masked_maximum])
def test_masked_padding_is_not_read(pool: Pool, seed: int) -> None:
    torch.manual_seed(seed)
    assert dependence(Pooled(pool)) is None


@pytest.mark.parametrize("task", [CLASSES, TAGS, SCORES])
def test_text_networks_of_the_zoo_do_not_read_it(task: Task) -> None:
    for max_length in (1, 2, 12, 100):
        info = replace(text_data(max_length=max_length).info, task=task)
        for reference in (
            text_nets.transformer_ref(TextTransformerConfig(dim=16, num_layers=1, num_heads=2), info),
            text_nets.transformer_ref(TextTransformerConfig(dim=16, num_layers=1, num_heads=2, causal=True), info),
            text_nets.lstm_ref(TextLstmConfig(dim=16, hidden_size=24), info),
        ):
            assert dependence(nets.build_seeded(reference, 0), task, max_length=max_length) is None


def test_outputs_of_tokens_are_compared_where_there_are_tokens() -> None:
    torch.manual_seed(0)
    assert dependence(Recurrent(5), TAGS) is None, "more positions, and the same ones as before"
    assert dependence(Recurrent(5, bidirectional=True), TAGS), "backwards, it begins with the padding"
    assert dependence(Recurrent(2, per_token=False)), "the last state is one of padding"
    assert dependence(Recurrent(40), LanguageModeling(vocabulary_size=40)) is None


def test_networks_of_one_length_or_of_no_texts_are_left_alone() -> None:
    assert dependence(nn.Sequential(nn.Embedding(40, 4), nn.Flatten(), nn.Linear(48, 2))) is None
    unlabeled = text_data()
    info = replace(unlabeled.info, task=Unlabeled())
    no_tokens = [torch.zeros(2, 12, dtype=torch.int64)]
    assert padding_dependence(Pooled(mean), no_tokens, info, unlabeled.info.signature) is None
    table = DatasetInfo("t", {"numbers": NumbersInfo(names=("a",), mean=(0.0,), std=(1.0,))}, SCORES)
    assert padding_dependence(nn.Linear(1, 1), [torch.zeros(2, 1)], table, table.signature) is None


@pytest.mark.skipif(extras.missing_extra("transformers") is not None, reason="needs ptpipe[transformers]")
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2"])
@pytest.mark.parametrize("is_masked", [True, False])
def test_networks_of_transformers(kind: str, is_masked: bool) -> None:
    library = transformers_models.transformers()
    sizes = {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 32}
    if kind != "distilbert":
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    config = library.AutoConfig.for_model(kind, vocab_size=40, pad_token_id=0, num_labels=2, **sizes)
    torch.manual_seed(0)
    network = library.AutoModelForSequenceClassification.from_config(config)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens_BL: torch.Tensor) -> Any:
            mask_BL = (tokens_BL != 0).long() if is_masked else torch.ones_like(tokens_BL)
            return self.network(input_ids=tokens_BL, attention_mask=mask_BL).logits

    reads_padding = not is_masked and kind != "gpt2"  # which is causal, and looks for the last token itself
    assert (dependence(Masked()) is not None) == reads_padding


OWN = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self, sizes=(3, 4), offset=0, positions=12):
        super().__init__()
        self.embeddings, self.offset = nn.ModuleList(nn.Embedding(size, 4) for size in sizes), offset
        self.head = nn.Linear(1 + 4 * len(sizes), 1)

    def forward(self, numbers, categories):
        embedded = [embed(categories[:, i] - self.offset) for i, embed in enumerate(self.embeddings)]
        return self.head(torch.cat([numbers, *embedded], 1))

class OneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(9, 1)

    def forward(self, numbers, categories):
        return self.head(nn.functional.one_hot(categories, 3).float().flatten(1).new_zeros(len(numbers), 9))

class Texts(nn.Module):
    def __init__(self, size=40, positions=64):
        super().__init__()
        self.embedding, self.head = nn.Embedding(size, 4), nn.Linear(4, 2)
        self.positions = nn.Embedding(positions, 4)

    def forward(self, tokens):
        return self.head((self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))).mean(1))
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


TABLE = DatasetInfo(
    "houses",
    {
        "numbers": NumbersInfo(names=("area",), mean=(0.0,), std=(1.0,)),
        "categories": CategoriesInfo(names=("city", "kind"), categories=(("oslo", "rome"), ("flat", "house", "hut"))),
    },
    SCORES,
)
ROWS = [torch.zeros(2, 1), torch.tensor([[1, 1], [2, 1]])]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("Mixed", {}, None),
        ("Mixed", {"sizes": (30, 40)}, None),
        ("Mixed", {"sizes": (3, 3)}, r"called with the largest ids of categories, raised IndexError: index out of"),
        ("Mixed", {"offset": 1}, r"called with the ids 0 of categories, raised IndexError: index out of range in self"),
        ("OneHot", {}, r"called with the largest ids of categories, raised RuntimeError: Class values must be smaller"),
    ],
)
def test_categories_that_the_first_rows_do_not_have(
    own: Path, function: str, arguments: dict[str, Any], message: str | None
) -> None:
    network = load_function(own, function)(**arguments)
    if message is None:
        check_ids(network, ROWS, TABLE, own)
        return
    with pytest.raises(StageError, match=message) as raised:
        check_ids(network, ROWS, TABLE, own)
    assert "(own.py:" in str(raised.value)
    assert str(raised.value).endswith(
        ": the columns of categories have 3, 4 ids, their number of categories + 1, as 0 is a value that train does "
        "not have: give their embeddings as many rows"
    )
    assert refuses_ids(raised.value.__cause__)


def test_tokens_that_the_first_texts_do_not_have(own: Path) -> None:
    info, tokens_BL = text_data().info, torch.tensor([[8, 9, 10], [11, 0, 0]])
    make = load_function(own, "Texts")
    check_ids(make(), [tokens_BL], info, own)
    with pytest.raises(
        StageError, match=r"called with the largest id of tokens, raised IndexError: .*own.py:30"
    ) as raised:
        check_ids(make(39), [tokens_BL], info, own)
    assert str(raised.value).endswith(": tokens has the ids 0 to 39: give their embedding 40 rows")
    check_ids(make(positions=2), [tokens_BL], info, own)  # which fails for other reasons than ids
