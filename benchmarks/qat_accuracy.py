"""Accuracy of quantization-aware training on MNIST: ours, and torch's own FX graph mode with the same settings.

Both begin with the same float network, which train.supervised has trained on the first 6,000 training images, and end
with an int8 network that classifies the 10,000 test images. Ours goes through the stages, as a manifest runs it:
quant.prepare_qat, train.supervised, quant.convert. torch's is `prepare_qat_fx` and `convert_fx` around a plain loop
over the same batches, with the same fake quantization (moving averages of minimum and maximum, the same integers), the
same optimizer and learning rates, and ranges and batch norms frozen at the same step.

    python benchmarks/qat_accuracy.py [--networks small_cnn mobilenet_v3_small resnet50] [--seeds 0 1 2]
        [--float-epochs 6] [--float-lr 0.05] [--epochs 2] [--lr 0.005] [--schedule cosine] [--batch-norm train]
        [--threads 1]

ResNet50 learns with --float-lr 0.01 only.

A line is one seed; the last line of a network has the means and the difference, in points.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ptpipe import Context
from ptpipe_data import MnistConfig, load_mnist
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import Data, Model, epoch_order
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.runtime import seeded, torch_threads
from ptpipe_train import TrainConfig, train
from ptpipe_train.schedule import LearningRate
from ptpipe_zoo import SmallCnnConfig, TorchvisionConfig, small_cnn, torchvision

F = nn.functional
BACKEND = "fbgemm"
NUM_IMAGES, BATCH_SIZE, MOMENTUM = 6000, 64, 0.9


@dataclass(frozen=True)
class Bench:
    """One seed of one network."""

    folder: Path
    data: Data
    seed: int
    options: argparse.Namespace

    def context(self, name: str) -> Context:
        scratch = self.folder / f"{name}-{self.seed}"
        scratch.mkdir(parents=True, exist_ok=True)
        return Context(name, name, self.seed, scratch)

    def train(self, model: Model, name: str, **options: object) -> Model:
        config = TrainConfig.model_validate({**options, "device": "cpu", "num_threads": self.options.threads})
        return train(config, self.context(name), model, self.data)

    def float_model(self, network: str) -> Model:
        ctx = self.context("net")
        if network == "small_cnn":
            model = small_cnn(SmallCnnConfig(), ctx, self.data)
        else:
            model = torchvision(TorchvisionConfig(name=network), ctx, self.data)
        schedule = {"name": "one_cycle"}
        return self.train(
            model, "pretrain", epochs=self.options.float_epochs, lr=self.options.float_lr, schedule=schedule
        )

    def prepare(self, model: Model) -> Model:
        config = PrepareQatConfig.model_validate({"backend": BACKEND, "batch_norm": self.options.batch_norm})
        return prepare_qat(config, self.context("prepare"), model)

    def ours(self, prepared: Model) -> float:
        options = self.options
        schedule = {"name": options.schedule}
        tuned = self.train(prepared, "finetune", epochs=options.epochs, lr=options.lr, schedule=schedule)
        return self.accuracy(convert(ConvertConfig(), self.context("convert"), tuned))

    def accuracy(self, model: Model) -> float:
        with model.predictor(self.options.threads) as predict:
            return self.percent(lambda images: torch.from_numpy(predict({"images": images.numpy()})["logits"]))

    def percent(self, classify: Any) -> float:
        """Return the percentage of the test images that `classify`, from images to logits, gets right."""
        batches = self.data.batches("test", batch_size=500)
        right = [
            (classify(batch.inputs["images"]).argmax(1) == batch.targets["labels"]).sum().item() for batch in batches
        ]
        return 100 * sum(right) / len(self.data.splits["test"])

    def torchs(self, model: Model, prepared: Model) -> float:
        """Return the accuracy of torch's own QAT of the float `model`; `prepared` is ours, for its settings."""
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_qat_fx

        arguments = prepared.recipe.prepare[0].arguments
        example = zeros(model.signature.inputs, 1)
        with torch_threads(self.options.threads), quantized_engine(BACKEND), warnings.catch_warnings(action="ignore"):
            mapping = torch_mapping(narrow_weights=bool(arguments["narrow_weights"]))
            module = prepare_qat_fx(model.build().train(), mapping, example)
            with seeded(self.seed, torch.device("cpu")):
                self.plain_loop(module.to(memory_format=torch.channels_last), float(str(arguments["freeze_at"])))
            int8 = convert_fx(module.eval())
            with torch.inference_mode():
                return self.percent(int8)

    def plain_loop(self, module: nn.Module, freeze_at: float) -> None:
        from torch.ao.nn.intrinsic.qat import freeze_bn_stats
        from torch.ao.quantization import disable_observer

        config = TrainConfig.model_validate({"schedule": {"name": self.options.schedule}})
        steps_per_epoch = -(-NUM_IMAGES // BATCH_SIZE)
        num_steps = self.options.epochs * steps_per_epoch
        lr = LearningRate(self.options.lr, config.schedule, num_steps, steps_per_epoch)
        optimizer = torch.optim.SGD(module.parameters(), self.options.lr, momentum=MOMENTUM)
        step = 0
        for epoch in range(self.options.epochs):
            order_N = epoch_order(NUM_IMAGES, self.seed, epoch)
            for batch in self.data.batches("train", order_N=order_N, channels_last=True):
                if step / num_steps >= freeze_at:
                    module.apply(disable_observer).apply(freeze_bn_stats)
                optimizer.param_groups[0]["lr"] = lr.at(step)
                F.cross_entropy(module(batch.inputs["images"]), batch.targets["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1


def torch_mapping(*, narrow_weights: bool) -> Any:
    """Return torch's default QAT settings, with the integers that ours have."""
    from torch.ao.quantization import (
        FusedMovingAvgObsFakeQuantize,
        MovingAverageMinMaxObserver,
        QConfig,
        default_fused_per_channel_wt_fake_quant,
        get_default_qat_qconfig_mapping,
    )

    activation = FusedMovingAvgObsFakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    limits = {"quant_min": -64, "quant_max": 64} if narrow_weights else {}
    weight = default_fused_per_channel_wt_fake_quant.with_args(**limits)
    return get_default_qat_qconfig_mapping(BACKEND).set_global(QConfig(activation=activation, weight=weight))


def first_images(folder: Path) -> Data:
    data = load_mnist(MnistConfig(batch_size=BATCH_SIZE), Context("data", "data.mnist", 0, folder))
    train_split = data.splits["train"].subset(np.arange(NUM_IMAGES))
    return Data(data.info, {"train": train_split, "test": data.splits["test"]}, data.loader)


def report(network: str, data: Data, folder: Path, options: argparse.Namespace) -> None:
    rows = []
    for seed in options.seeds:
        bench = Bench(folder / network, data, seed, options)
        start = time.perf_counter()
        model = bench.float_model(network)
        prepared = bench.prepare(model)
        rows.append((bench.accuracy(model), bench.ours(prepared), bench.torchs(model, prepared)))
        print(f"{network:20} {seed:>5} {row_text(rows[-1])} {time.perf_counter() - start:8.0f} s", flush=True)
    print(f"{network:20} {'mean':>5} {row_text([statistics.mean(column) for column in zip(*rows, strict=True)])}")


def row_text(row: Any) -> str:
    float_percent, ours, torchs = row
    return f"{float_percent:8.2f} {ours:8.2f} {torchs:8.2f} {ours - torchs:+10.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["small_cnn", "mobilenet_v3_small", "resnet50"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--float-epochs", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--float-lr", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--schedule", default="cosine", choices=["constant", "cosine"])
    parser.add_argument("--batch-norm", default="train", choices=["train", "fold"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(f"{'network':20} {'seed':>5} {'float':>8} {'ours':>8} {'torch':>8} {'difference':>10}")
    with tempfile.TemporaryDirectory() as folder:
        data = first_images(Path(folder))
        for network in options.networks:
            report(network, data, Path(folder), options)


if __name__ == "__main__":
    main()
