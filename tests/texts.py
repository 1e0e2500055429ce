"""Data sets of made-up texts, token ids whose class depends on whether a certain one occurs.

Shape legend: N texts, L tokens of the longest one, V tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ptpipe import Context
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, DynamicConfig, PrepareConfig, PrepareQatConfig
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Column,
    Data,
    DatasetInfo,
    LoaderOptions,
    Model,
    RaggedColumn,
    Split,
    Task,
    TokenClassification,
    TokensInfo,
    TrainingCallback,
    epoch_order,
)
from ptpipe_torch.runtime import seeded, torch_threads
from ptpipe_zoo import TextLstmConfig, TextTransformerConfig, text_lstm, text_transformer

KEY = 7
"""The token that decides a text's class."""


CLASSES = Classification(class_names=("without", "with"))
TAGS = TokenClassification(class_names=("a", "b", "c", "d", "e"))
"""The class of a token is its id modulo 5."""


def texts(
    num: int, seed: int, *, vocabulary_size: int = 40, min_length: int = 0, max_length: int = 12
) -> npt.NDArray[np.int64]:
    """Return ids, (N, L), of texts of so many tokens, padded with 0; `KEY` occurs in half of them."""
    random = np.random.default_rng(seed)
    ids_NL = random.integers(KEY + 1, vocabulary_size, (num, max_length))
    length_N = random.integers(min_length, max_length + 1, num)
    place_N = (random.random(num) * length_N).astype(int)
    chosen_N = np.flatnonzero((random.random(num) < 0.5) & (length_N > 0))
    ids_NL[chosen_N, place_N[chosen_N]] = KEY
    return ids_NL * (np.arange(max_length) < length_N[:, None])


def text_data(
    task: Task = CLASSES,
    *,
    num: Sequence[int] = (160, 64, 64),
    vocabulary_size: int = 40,
    min_length: int = 0,
    max_length: int = 12,
    padded: bool = False,
) -> Data:
    """Return texts in the splits train, test and calibration, in batches of 16. `padded`: all to `max_length`."""
    padding: Literal["longest", "max_length"] = "max_length" if padded else "longest"
    tokens = TokensInfo(vocabulary_size=vocabulary_size, max_length=max_length, padding=padding)
    splits = {}
    for seed, (name, size) in enumerate(zip(("train", "test", "calibration"), num, strict=True)):
        sizes = {"vocabulary_size": vocabulary_size, "min_length": min_length, "max_length": max_length}
        ids_NL = texts(size, seed, **sizes)
        values_V, offsets = ids_NL[ids_NL != 0], np.append(0, (ids_NL != 0).sum(1).cumsum())
        length = max_length if padded else None
        targets: dict[str, Column] = {"labels": ArrayColumn((ids_NL == KEY).any(1).astype(np.int64))}
        if "tags" in task.targets:
            targets = {"tags": RaggedColumn(values_V % 5, offsets, -1, length)}
        elif "next_tokens" in task.targets:
            targets = {"next_tokens": RaggedColumn(values_V, offsets, -1, length)}
        elif "targets" in task.targets:
            num_outputs = len(task.target_names)  # type: ignore[attr-defined]  # of a regression
            targets = {"targets": ArrayColumn(np.full((size, num_outputs), seed, np.float32))}
        ids = np.array([f"{name}/{row}" for row in range(size)])
        splits[name] = Split(ids, {"tokens": RaggedColumn(values_V, offsets, 0, length)}, targets)
    return Data(DatasetInfo("words", {"tokens": tokens}, task), splits, LoaderOptions(batch_size=16))


def network_of(name: str, data: Data, ctx: Context, num_layers: int = 1) -> Model:
    """Return an untrained transformer, causal transformer, or LSTM. `num_layers`: of a transformer."""
    if name == "lstm":
        return text_lstm(TextLstmConfig(dim=16, hidden_size=24, dropout=0.0), ctx, data)
    options = {"dim": 16, "num_layers": num_layers, "num_heads": 2, "dropout": 0.0}
    return text_transformer(TextTransformerConfig(**options, causal=name == "causal"), ctx, data)


def trained(model: Model, data: Data, *, epochs: int = 4, lr: float = 5e-3) -> Model:
    """What a trainer does to a model, in the fewest lines."""
    network, task = model.build_prepared().train(), data.info.task
    optimizer = torch.optim.Adam(network.parameters(), lr)
    with seeded(0), torch_threads(1):
        for epoch in range(epochs):
            for layer in network.modules():
                if isinstance(layer, TrainingCallback):
                    layer.on_progress(epoch / epochs)
            for batch in data.batches("train", order_N=epoch_order(len(data.splits["train"]), 7, epoch)):
                task.losses({"logits": network(*batch.args)}, batch.targets).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return model.with_state_dict_of(network)


def quantized(model: Model, data: Data, ctx: Context, backend: str, path: str) -> Model:
    """Return the int8 model of a path: `dynamic`, `static` or `qat`."""
    if path == "dynamic":
        return stages.dynamic(DynamicConfig(backend=backend), ctx, model)
    if path == "qat":
        prepared = stages.prepare_qat(PrepareQatConfig(backend=backend), ctx, model)
        return stages.convert(ctx, trained(prepared, data, epochs=1, lr=1e-4))
    prepared = stages.prepare(PrepareConfig(backend=backend, observer="min_max"), ctx, model)
    return stages.convert(ctx, stages.calibrate(CalibrateConfig(), ctx, prepared, data)[0])
