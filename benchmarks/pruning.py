"""Accuracy of pruned networks on MNIST: pruned at once and trained again, and pruned by a schedule in that training.

All begin with the same float `small_cnn`, which train.supervised has trained on the first 12,000 training images.
Trained as often and at the same learning rates again: without pruning; after prune.magnitude, which prunes each layer
at once; and with `pruning` of train.supervised, which prunes each layer along the cubic schedule. Then all 10,000 test
images are classified in float, and in int8 after quant.prepare and quant.convert.

    python benchmarks/pruning.py [--amounts 0.8 0.9 0.95] [--seeds 0 1 2] [--float-epochs 3] [--epochs 2] [--lr 0.02]
        [--end 0.75] [--threads 1]

A line is one amount; its figures are means over the seeds, in percent: float, then int8.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ptpipe import Context
from ptpipe_data import MnistConfig, load_mnist
from ptpipe_prune import MagnitudeConfig, magnitude
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import Data, Model
from ptpipe_train import TrainConfig, train
from ptpipe_zoo import SmallCnnConfig, small_cnn

NUM_IMAGES, BATCH_SIZE = 12_000, 64


@dataclass(frozen=True)
class Bench:
    """One seed."""

    folder: Path
    data: Data
    seed: int
    options: argparse.Namespace

    def context(self, name: str) -> Context:
        scratch = self.folder / f"{name}-{self.seed}"
        scratch.mkdir(parents=True, exist_ok=True)
        return Context(name, name, self.seed, scratch)

    def train(self, model: Model, name: str, **options: object) -> Model:
        given = {"device": "cpu", "num_threads": self.options.threads, "schedule": {"name": "one_cycle"}, **options}
        return train(TrainConfig.model_validate(given), self.context(name), model, self.data)

    def float_model(self) -> Model:
        net = small_cnn(SmallCnnConfig(), self.context("net"), self.data)
        return self.train(net, "pretrain", epochs=self.options.float_epochs, lr=0.05)

    def retrained(self, model: Model, name: str, **options: object) -> Model:
        schedule = {"name": "cosine"}
        return self.train(model, name, epochs=self.options.epochs, lr=self.options.lr, schedule=schedule, **options)

    def at_once(self, model: Model, amount: float) -> Model:
        pruned = magnitude(MagnitudeConfig(amount=amount), self.context("prune"), model)
        return self.retrained(pruned, f"at-once-{amount}")

    def by_schedule(self, model: Model, amount: float) -> Model:
        return self.retrained(model, f"schedule-{amount}", pruning={"amount": amount, "end": self.options.end})

    def percents(self, model: Model) -> tuple[float, float]:
        """Return the accuracy in float and in int8."""
        prepared = prepare(PrepareConfig(), self.context("prepare"), model)
        calibrated = calibrate(CalibrateConfig(num_samples=1000), self.context("calibrate"), prepared, self.data).model
        return self.percent(model), self.percent(convert(ConvertConfig(), self.context("convert"), calibrated))

    def percent(self, model: Model) -> float:
        right = 0
        with model.predictor(self.options.threads) as predict:
            for batch in self.data.batches("test", batch_size=500):
                logits_NK = torch.from_numpy(predict(batch.input_arrays())["logits"])
                right += int((logits_NK.argmax(1) == batch.targets["labels"]).sum())
        return 100 * right / len(self.data.splits["test"])


def first_images(folder: Path) -> Data:
    data = load_mnist(MnistConfig(batch_size=BATCH_SIZE), Context("data", "data.mnist", 0, folder))
    splits = {name: data.splits[name] for name in ("calibration", "test")}
    return Data(data.info, splits | {"train": data.splits["train"].subset(np.arange(NUM_IMAGES))}, data.loader)


def means(results: list[tuple[float, float]]) -> str:
    return "  ".join(f"{statistics.mean(column):6.2f}" for column in zip(*results, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amounts", nargs="+", type=float, default=[0.8, 0.9, 0.95])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--float-epochs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--end", type=float, default=0.75)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(f"{'pruned':>8}  {'not pruned':>14}  {'at once':>14}  {'by a schedule':>14}")
    with tempfile.TemporaryDirectory() as folder:
        data = first_images(Path(folder))
        benches = [Bench(Path(folder), data, seed, options) for seed in options.seeds]
        models = [bench.float_model() for bench in benches]
        pairs = list(zip(benches, models, strict=True))
        dense = means([bench.percents(bench.retrained(model, "dense")) for bench, model in pairs])
        for amount in options.amounts:
            at_once = means([bench.percents(bench.at_once(model, amount)) for bench, model in pairs])
            by_schedule = means([bench.percents(bench.by_schedule(model, amount)) for bench, model in pairs])
            print(f"{100 * amount:7.0f}%  {dense}  {at_once}  {by_schedule}", flush=True)


if __name__ == "__main__":
    main()
