"""Cost of a step of quantization-aware training, relative to a float step of the same network.

Every row is a training by `train.supervised`, as a manifest runs it: memory format, threads, allocator and data
loading are the stage's own, and the figure is the stage's throughput. Network: model.small_cnn on random 28x28 images.
Rows: the float network; ours with batch norm folded (the default of quant.prepare_qat), observing ranges and with
ranges frozen; ours with batch norm trained; and torch's own `prepare_qat_fx` (under bf16 it does not run). All are
run in turn, in changing order, in one process; a figure is the ratio of medians to the float row of the same precision.

    python benchmarks/qat_step.py [--rounds 5] [--steps 30] [--batch 128] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ptpipe import Context, Event, Metric
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    FunctionRef,
    ImageInfo,
    LoaderOptions,
    Model,
    Split,
    transform,
)
from ptpipe_train import TrainConfig, train
from ptpipe_zoo import SmallCnnConfig, small_cnn

TARGET = 1.5
FLOAT, STOCK = "float", "torch's own prepare_qat_fx"


@transform
def stock_qat(module: nn.Module) -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    with warnings.catch_warnings(action="ignore"):
        mapping = get_default_qat_qconfig_mapping("fbgemm")
        prepared: nn.Module = prepare_qat_fx(module.train(), mapping, (torch.zeros(1, 1, 28, 28),))
        return prepared


def make_data(num_images: int, batch_size: int) -> Data:
    rng = np.random.default_rng(0)
    image = ImageInfo(shape_CHW=(1, 28, 28), mean=(0.13,), std=(0.31,))
    info = DatasetInfo("random images", {"images": image}, Classification(class_names=tuple("0123456789")))
    images = ArrayColumn(rng.integers(0, 256, (num_images, 28, 28, 1), dtype=np.uint8))
    labels = ArrayColumn(rng.integers(0, 10, num_images))
    split = Split(np.arange(num_images).astype(np.str_), {"images": images}, {"labels": labels})
    return Data(info, {"train": split}, LoaderOptions(batch_size))


class Bench:
    """Trains models by the stage, for one epoch each."""

    def __init__(self, scratch: Path, data: Data, num_threads: int) -> None:
        self.scratch, self.data, self.num_threads = scratch, data, num_threads
        self.num_runs = 0

    def context(self) -> Context:
        self.num_runs += 1
        folder = self.scratch / str(self.num_runs)
        folder.mkdir()
        return Context("train", "train.supervised", 7, folder)

    def train(self, model: Model, precision: str) -> tuple[Model, float, str]:
        """Return the trained model, milliseconds per step, and the memory format."""
        events: list[Event] = []
        config = TrainConfig.model_validate(
            {"epochs": 1, "lr": 0.005, "precision": precision, "num_threads": self.num_threads, "device": "cpu"}
        )
        context = replace(self.context(), _tell=events.append)
        trained = train(config, context, model, self.data)
        metrics = {event.name: event.value for event in events if isinstance(event, Metric)}
        step_ms = 1e3 * self.data.loader.batch_size / float(str(metrics["samples_per_s"]))
        return trained, step_ms, str(metrics["memory_format"])

    def models(self, precision: str) -> tuple[dict[str, Model], dict[str, str]]:
        """Return the rows' models, and for missing rows the reason."""
        network = small_cnn(SmallCnnConfig(), self.context(), self.data)

        def ours(**options: object) -> Model:
            config = PrepareQatConfig.model_validate({"backend": "fbgemm", **options})
            return prepare_qat(config, self.context(), network)

        folded, frozen = ours(), ours(freeze_at=0.0)
        # Frozen ranges must have been observed before.
        observed = self.train(folded, precision)[0]
        models = {
            FLOAT: network,
            "ours, batch norm folded": folded,
            "ours, folded, ranges frozen": Model(frozen.recipe, observed.tensors),
            "ours, batch norm trained": ours(batch_norm="train"),
        }
        recipe = replace(network.recipe, prepare=(FunctionRef.to(stock_qat),), backend="fbgemm")
        with warnings.catch_warnings(action="ignore"):
            module = stock_qat(network.build())
        stock = Model.from_module(recipe, module)
        try:
            self.train(stock, precision)
        except RuntimeError as error:  # torch 2.13's fused fake quantization supports float32 only
            return models, {STOCK: f"does not run: {str(error).splitlines()[0]}"}
        return models | {STOCK: stock}, {}


def race(bench: Bench, models: dict[str, Model], precision: str, num_rounds: int) -> dict[str, tuple[float, str]]:
    """Return the median milliseconds per step and the memory format of each row, timed in turn."""
    step_ms: dict[str, list[float]] = {name: [] for name in models}
    formats: dict[str, str] = {}
    names = list(models)
    for round_ in range(num_rounds + 1):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            with warnings.catch_warnings(action="ignore"):
                _, ms, formats[name] = bench.train(models[name], precision)
            if round_:  # the first one warms up
                step_ms[name].append(ms)
    return {name: (statistics.median(values), formats[name]) for name, values in step_ms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("--rounds", 5), ("--steps", 30), ("--batch", 128), ("--threads", 2)):
        parser.add_argument(option, type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), make_data(arguments.batch * arguments.steps, arguments.batch), arguments.threads)
        for precision in ("fp32", "bf16"):
            models, missing = bench.models(precision)
            rows = race(bench, models, precision, arguments.rounds)
            print(f"\n{precision:32} ms/step  images/s  of float (target: at most {TARGET})  memory format")
            for name, (ms, memory_format) in rows.items():
                ratio = ms / rows[FLOAT][0]
                print(f"{name:32} {ms:7.1f} {1e3 * arguments.batch / ms:9.0f}  {ratio:31.2f}  {memory_format}")
            for name, reason in missing.items():
                print(f"{name:32} {reason}")


if __name__ == "__main__":
    main()
