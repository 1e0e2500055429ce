"""Cost of a step of quantization-aware training, relative to a float step of the same network.

Every row is a training by `train.supervised`, as a manifest runs it: memory format, threads, allocator and data loading
are the stage's own, and the figure is the stage's throughput. All rows of a network, in both precisions, are run in
turn, in changing order, in one process; a figure is the ratio of the median times of a step to the float32 row's.
Memory formats are what the stage chose: a row whose format is not the float row's is marked.

Rows of each network: float; ours as `quant.prepare_qat` prepares it (batch norms trained, ranges observed), with ranges
frozen, and with batch norms folded; for small_cnn also torch's own `prepare_qat_fx` (which does not run under bf16).

    python benchmarks/qat_step.py [--networks small_cnn resnet18] [--rounds 5] [--images 1024] [--threads 1]
                                  [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ptpipe import Context, Event, Metric, StageError
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
    RaggedColumn,
    Split,
    TokensInfo,
    transform,
)
from ptpipe_train import TrainConfig, train
from ptpipe_zoo import (
    SmallCnnConfig,
    TextTransformerConfig,
    TorchvisionConfig,
    small_cnn,
    text_transformer,
    torchvision,
)

FLOAT, OURS, FROZEN, FOLDED = "float", "ours", "ours, ranges frozen", "ours, batch norm folded"
STOCK = "torch's own prepare_qat_fx"
BF16_TARGET = 0.8
PRECISIONS = ("fp32", "bf16")
TOKENS, VOCABULARY = 64, 1000


@transform
def stock_qat(module: nn.Module) -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    with warnings.catch_warnings(action="ignore"):
        mapping = get_default_qat_qconfig_mapping("fbgemm")
        prepared: nn.Module = prepare_qat_fx(module.train(), mapping, (torch.zeros(1, 1, 28, 28),))
        return prepared


CLASSES = Classification(class_names=tuple("0123456789"))


def images(num_channels: int, side: int, batch_size: int, num: int) -> Data:
    """Return random images."""
    rng = np.random.default_rng(0)
    image = ImageInfo(shape_CHW=(num_channels, side, side), mean=(0.5,) * num_channels, std=(0.3,) * num_channels)
    info = DatasetInfo("random images", {"images": image}, CLASSES)
    pixels = ArrayColumn(rng.integers(0, 256, (num, side, side, num_channels), dtype=np.uint8))
    return split_of(info, "images", pixels, batch_size)


def texts(batch_size: int, num: int) -> Data:
    """Return random texts of `TOKENS` tokens."""
    ids_V = np.random.default_rng(0).integers(1, VOCABULARY, num * TOKENS)
    tokens = TokensInfo(vocabulary_size=VOCABULARY, max_length=TOKENS, padding="max_length")
    info = DatasetInfo("random texts", {"tokens": tokens}, CLASSES)
    column = RaggedColumn(ids_V, np.arange(num + 1) * TOKENS, 0, TOKENS)
    return split_of(info, "tokens", column, batch_size)


def split_of(info: DatasetInfo, name: str, column: ArrayColumn | RaggedColumn, batch_size: int) -> Data:
    num = len(column)
    labels = ArrayColumn(np.random.default_rng(1).integers(0, 10, num))
    split = Split(np.arange(num).astype(np.str_), {name: column}, {"labels": labels})
    return Data(info, {"train": split}, LoaderOptions(batch_size))


@dataclass(frozen=True)
class Network:
    """A network, the data that it is trained on, and the largest ratio that is wanted."""

    target: float
    batch_size: int
    data: Callable[[int, int], Data]
    """Of batch size and number of samples."""
    model: Callable[[Context, Data], Model]


def of_torchvision(name: str) -> Callable[[Context, Data], Model]:
    return lambda context, data: torchvision(TorchvisionConfig(name=name), context, data)


NETWORKS = {
    "small_cnn": Network(
        1.3, 128, lambda *sizes: images(1, 28, *sizes), lambda *where: small_cnn(SmallCnnConfig(), *where)
    ),
    "mobilenet_v2": Network(1.6, 32, lambda *sizes: images(3, 64, *sizes), of_torchvision("mobilenet_v2")),
    "mobilenet_v3_small": Network(1.6, 32, lambda *sizes: images(3, 64, *sizes), of_torchvision("mobilenet_v3_small")),
    "resnet18": Network(1.3, 32, lambda *sizes: images(3, 64, *sizes), of_torchvision("resnet18")),
    "text_transformer": Network(1.5, 32, texts, lambda *where: text_transformer(TextTransformerConfig(), *where)),
}


@dataclass
class Bench:
    """Trains models by the stage, for one epoch each."""

    scratch: Path
    data: Data
    num_threads: int
    device: str = "cpu"
    num_runs: int = 0

    def context(self) -> Context:
        self.num_runs += 1
        folder = self.scratch / f"{id(self)}-{self.num_runs}"
        folder.mkdir()
        return Context("train", "train.supervised", 7, folder)

    def train(self, model: Model, precision: str) -> tuple[Model, float, str]:
        """Return the trained model, milliseconds per step, and the memory format."""
        events: list[Event] = []
        options = {"epochs": 1, "lr": 0.001, "num_threads": self.num_threads}
        config = TrainConfig.model_validate({**options, "precision": precision, "device": self.device})
        with warnings.catch_warnings(action="ignore"):
            trained = train(config, replace(self.context(), _tell=events.append), model, self.data)
        metrics = {event.name: event.value for event in events if isinstance(event, Metric)}
        step_ms = 1e3 * self.data.loader.batch_size / float(str(metrics["samples_per_s"]))
        return trained, step_ms, str(metrics["memory_format"])

    def models(self, network: Model, *, stock: bool) -> Iterator[tuple[str, Model]]:
        """Yield the rows' models."""
        yield FLOAT, network
        ours, frozen = self.prepared(network), self.prepared(network, freeze_at=0.0)
        yield OURS, ours
        # Frozen ranges must have been observed before.
        yield FROZEN, Model(frozen.recipe, self.train(ours, "fp32")[0].tensors)
        yield FOLDED, self.prepared(network, batch_norm="fold")
        if stock:
            recipe = replace(network.recipe, prepare=(FunctionRef.to(stock_qat),), backend="fbgemm")
            yield STOCK, Model.from_module(recipe, stock_qat(network.build()))

    def prepared(self, network: Model, **options: object) -> Model:
        config = PrepareQatConfig.model_validate({"backend": "fbgemm", **options})
        return prepare_qat(config, self.context(), network)


@dataclass
class Row:
    """A model trained in a precision."""

    name: str
    precision: str
    model: Model
    step_ms: list[float]
    memory_format: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


def race(bench: Bench, models: dict[str, Model], num_rounds: int) -> tuple[list[Row], list[str]]:
    """Time all models in all precisions in turn; return the rows, and why others are missing."""
    rows, missing = [], []
    for precision in PRECISIONS:
        for name, model in models.items():
            row = Row(name, precision, model, [])
            try:
                row.memory_format = bench.train(model, precision)[2]  # warms up
            except (RuntimeError, StageError) as error:  # torch 2.13's fused fake quantization supports float32 only
                missing.append(f"{name}, {precision}: does not run: {str(error).splitlines()[0]}")
                continue
            rows.append(row)
    for round_ in range(num_rounds):
        first = round_ % len(rows)
        for row in rows[first:] + rows[:first]:
            row.step_ms.append(bench.train(row.model, row.precision)[1])
    return rows, missing


def print_table(name: str, network: Network, rows: list[Row], missing: list[str]) -> None:
    reference = rows[0]
    wanted = f"at most {network.target} in fp32, {BF16_TARGET} in bf16"
    print(f"\n{name}, batch {network.batch_size}: a step as a fraction of the float32 one ({wanted})")
    for row in rows:
        ratio = row.median_ms / reference.median_ms
        target = None if row.name != OURS else network.target if row.precision == "fp32" else BF16_TARGET
        verdict = "" if target is None else "met" if ratio <= target else "MISSED"
        other = "" if row.memory_format == reference.memory_format else ", unlike float"
        print(
            f"{row.name:28} {row.precision} {row.median_ms:8.1f} ms {ratio:6.2f} {verdict:7} {row.memory_format}{other}"
        )
    for line in missing:
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    for option, default in (("--rounds", 5), ("--images", 1024), ("--threads", 1)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.networks:
            network = NETWORKS[name]
            num = max(1, arguments.images // network.batch_size) * network.batch_size
            bench = Bench(Path(scratch), network.data(network.batch_size, num), arguments.threads, arguments.device)
            float_model = network.model(bench.context(), bench.data)
            models = dict(bench.models(float_model, stock=name == "small_cnn"))
            print_table(name, network, *race(bench, models, arguments.rounds))


if __name__ == "__main__":
    main()
