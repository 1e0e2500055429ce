"""A plugin whose comparisons are made up, for commands that read runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from ptpipe import Artifact, Context, StageConfig, hookimpl, stage
from ptpipe_eval import Comparison, Row
from ptpipe_eval.quality.paired import ModelSamples, pair
from ptpipe_torch import Classification


class Text(Artifact):
    def __init__(self, text):
        self.text = text

    def save(self, folder):
        (folder / "text").write_text(self.text)

    @classmethod
    def load(cls, folder):
        return cls((folder / "text").read_text())


class TextConfig(StageConfig):
    text: str = "x"


class MadeUp(StageConfig):
    lost: tuple[int, ...] = Field((12, 0), description="samples that each model but the first has wrong beside its 20")
    total: int = 1000
    prefix: str = "a"
    reverse: bool = False
    extra_loss: float = 0.0
    is_known: bool = True
    targets_sha256: str | None = None
    has_loss: bool = Field(True, description="without it there is nothing to resample, which takes time")
    lost_by_seed: tuple[int, ...] = Field((0,), description="more of them, in turn for each seed")


@stage("toy.text")
def text(config: TextConfig, ctx: Context) -> Text:
    return Text(config.text)


@stage("toy.compare")
def compare(config: MadeUp, ctx: Context, models: Sequence[Text], data: Text) -> Comparison:
    task, rows, recorded = Classification(class_names=("no", "yes")), [], []
    ids = [f"{config.prefix}/{number:05}" for number in range(config.total)]
    for name, lost in zip(ctx.input_names["models"], (0, *config.lost), strict=True):
        right = np.ones(config.total, bool)
        more = config.lost_by_seed[ctx.seed % len(config.lost_by_seed)] if lost else 0
        right[: 20 + lost + more] = False
        loss = np.where(right, 0.1, 2.0) + config.extra_loss + np.linspace(0, 0.01, config.total)
        sums = {"accuracy": right, "loss": loss} if config.is_known else {}
        if not config.has_loss:
            sums.pop("loss", None)
        sums = {metric: values[:: -1 if config.reverse else 1] for metric, values in sums.items()}
        recorded.append(ModelSamples(sums, None, None, config.is_known and config.has_loss))
        metrics = {"accuracy": right.sum() / max(1, config.total), "loss": loss.sum() / max(1, config.total)}
        rows.append(Row(name, "onnx int8", 100, metrics))
    samples = pair(task, recorded, 0, ids[:: -1 if config.reverse else 1], 7)
    samples = replace(samples, targets_sha256=config.targets_sha256)
    return Comparison("mnist", "test", config.total, task.metrics, "float", tuple(rows), "", "2026-01-02", samples)


@hookimpl
def ptpipe_stages():
    return [text, compare]
