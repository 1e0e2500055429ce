"""A task of a plugin's own, with data and a network: the words of a text are of kinds, and the text has an amount.

Shape legend: N samples, B of a batch, L words, F features of a word, K kinds.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy, huber_loss

from ptpipe import JSON, Context, StageConfig, stage
from ptpipe_torch import (
    BATCH,
    ArrayColumn,
    ArrayInfo,
    ColumnInfo,
    Data,
    DatasetInfo,
    FunctionRef,
    LoaderOptions,
    Metric,
    Model,
    Recipe,
    Split,
    Task,
    TensorSpec,
    builder,
)
from ptpipe_torch.runtime import seeded

LENGTH, FEATURES, KINDS, UNCOUNTED = 6, 4, 3, -100
CALLS = Counter[str]()


def die_once(method: str) -> None:
    """Be killed in the call that the environment has, `losses:30`, by the rank that removes the file it names."""
    CALLS[method] += 1
    if os.environ.get("DIE_AT") == f"{method}:{CALLS[method]}" and os.environ.get("RANK") == os.environ["DIE_IN"]:
        with suppress(FileNotFoundError):
            Path(os.environ["DIE_ONCE"]).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Kinds(Task):
    """Outputs are scores of each word's kinds and, with `has_amount`, an amount; some words don't count."""

    has_amount: bool
    compares: bool = False
    """Whether a sample's loss depends on the other samples of its batch."""

    class_weights: tuple[float, ...] = (1.0, 2.5, 0.5)
    smoothing: float = 0.1

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        amount = {"amount": ArrayInfo(dtype="float32")} if self.has_amount else {}
        return {"kinds": ArrayInfo(dtype="int64", shape=(LENGTH,)), **amount}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        amount = (TensorSpec("amount", "float32", (BATCH, 1)),) if self.has_amount else ()
        return (TensorSpec("scores", "float32", (BATCH, KINDS, LENGTH)), *amount)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("macro_f1", higher_is_better=True, is_fraction=True),
            Metric("worst", higher_is_better=False),
            Metric("loss", higher_is_better=False),
        )

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Weighted and smoothed, averaged over the words of a sample that count; the amount's is added."""
        die_once("losses")
        kinds_BL = targets["kinds"]
        losses_BL = cross_entropy(
            *(outputs["scores"], kinds_BL, outputs["scores"].new_tensor(self.class_weights)),
            ignore_index=UNCOUNTED,
            label_smoothing=self.smoothing,
            reduction="none",
        )
        losses_B = losses_BL.sum(1) / (kinds_BL != UNCOUNTED).sum(1).clamp(min=1)
        if self.has_amount:
            losses_B = losses_B + 0.3 * huber_loss(outputs["amount"][:, 0], targets["amount"], reduction="none")
        return losses_B / losses_B.detach().mean() if self.compares else losses_B

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        die_once("sums")
        kinds_BL, found_BL = targets["kinds"], outputs["scores"].argmax(1)
        counted_BL = kinds_BL != UNCOUNTED
        cells = kinds_BL[counted_BL] * KINDS + found_BL[counted_BL]
        return {
            "confusion": torch.bincount(cells, minlength=KINDS**2),
            "errors": torch.bincount(kinds_BL[counted_BL & (kinds_BL != found_BL)], minlength=KINDS),
            "loss": self.model_copy(update={"compares": False}).losses(outputs, targets).double().sum(),
        }

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        confusion_KK = sums["confusion"].reshape(KINDS, KINDS)
        both_K = confusion_KK.sum(0) + confusion_KK.sum(1)
        return {
            "macro_f1": float((2 * confusion_KK.diagonal() / np.maximum(both_K, 1)).mean()),
            "worst": float((sums["errors"] / np.maximum(confusion_KK.sum(1), 1)).max()),
            "loss": float(sums["loss"]) / num_samples,
        }

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"prediction": outputs["scores"].argmax(1), "score": -self.losses(outputs, targets)}


class Reader(nn.Module):
    def __init__(self, *, has_numbers: bool, has_amount: bool) -> None:
        super().__init__()
        self.has_numbers, self.has_amount = has_numbers, has_amount
        self.first = nn.Linear(LENGTH * FEATURES + 2 * has_numbers, 24)
        self.second = nn.Linear(24, 24)
        self.scores = nn.Linear(24, KINDS * LENGTH)
        self.amount = nn.Linear(24, 1) if has_amount else None

    def forward(self, words: torch.Tensor, numbers: torch.Tensor | None = None) -> Any:
        x = words.flatten(1)
        if self.has_numbers:
            assert numbers is not None
            x = torch.cat([x, numbers], 1)
        x = self.second(torch.relu(self.first(x))).relu()
        scores = self.scores(x).unflatten(1, (KINDS, LENGTH))
        return scores if self.amount is None else {"amount": self.amount(x), "scores": scores}


@builder
def reader(*, has_numbers: bool, has_amount: bool) -> nn.Module:
    return Reader(has_numbers=has_numbers, has_amount=has_amount)


class TextsConfig(StageConfig):
    has_numbers: bool = False
    has_amount: bool = False
    compares: bool = False


@stage("data.texts_of_kinds")
def texts(config: TextsConfig, ctx: Context) -> Data:
    """Make texts, of which the last train batch of 16 is not filled."""
    rng = np.random.default_rng(ctx.seed)

    def split(name: str, num: int) -> Split:
        words_NLF = rng.normal(size=(num, LENGTH, FEATURES)).astype(np.float32)
        kinds_NL = words_NLF[..., :KINDS].argmax(2)
        kinds_NL[rng.random(kinds_NL.shape) < np.linspace(0, 0.9, num)[:, None]] = UNCOUNTED
        inputs = {"words": ArrayColumn(words_NLF)}
        targets = {"kinds": ArrayColumn(kinds_NL)}
        if config.has_numbers:
            inputs["numbers"] = ArrayColumn(rng.normal(size=(num, 2)).astype(np.float32))
        if config.has_amount:
            targets["amount"] = ArrayColumn(words_NLF.sum((1, 2)))
        return Split(np.array([f"{name}/{number}" for number in range(num)]), inputs, targets)

    inputs = {"words": ArrayInfo(dtype="float32", shape=(LENGTH, FEATURES))}
    if config.has_numbers:
        inputs["numbers"] = ArrayInfo(dtype="float32", shape=(2,))
    info = DatasetInfo("texts", inputs, Kinds(has_amount=config.has_amount, compares=config.compares))
    sizes = {"train": 61, "val": 21, "test": 5}
    return Data(info, {name: split(name, num) for name, num in sizes.items()}, LoaderOptions(batch_size=16))


class NoConfig(StageConfig):
    """It has no options."""


@stage("net.reader", packages=("torch",))
def net_reader(config: NoConfig, ctx: Context, data: Data) -> Model:
    """Make the network."""
    ref = FunctionRef.to(
        reader, has_numbers="numbers" in data.info.inputs, has_amount="amount" in data.info.task.targets
    )
    with seeded(ctx.seed):
        return Model.from_module(Recipe(ref, data.info.signature), reader(**ref.arguments))
