"""Throughput of `train.supervised`, relative to a hand-written training loop.

The bare loop starts with normalized images in the right memory format, and does what every tutorial does: zero_grad,
autocast, forward, cross-entropy, backward, SGD step. It is timed twice: as it is, and with the process keeping freed
memory (`ptpipe_torch.runtime.freed_memory_kept`), as the stage does. The stage is timed from its call to its return,
from uint8 images to the trained model.

All are run in turn, in changing order, in one process; a round gives one throughput of each. Network: model.small_cnn.
Images: MNIST under PTPIPE_DATA, else random images of the same shape. With --text: model.text_transformer on random
texts of 4 to 64 tokens, whose batches the bare loop finds ready and in the stage's order.

    python benchmarks/train_throughput.py [--rounds 7] [--steps 150] [--batch 128] [--threads 2] [--contiguous] [--text]
                                          [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ptpipe import Context
from ptpipe_data import MnistConfig, load_mnist
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    ImageInfo,
    LoaderOptions,
    Model,
    RaggedColumn,
    Split,
    TokensInfo,
)
from ptpipe_torch.runtime import freed_memory_kept, torch_threads
from ptpipe_train import TrainConfig, train
from ptpipe_zoo import SmallCnnConfig, TextTransformerConfig, small_cnn, text_transformer

Training = Callable[[], None]
BARE, BARE_KEPT, STAGE = "bare loop", "bare loop, memory kept", "train.supervised"
TARGET = 0.97
SEED = 7


def make_data(num_images: int, batch_size: int, context: Context) -> Data:
    if os.environ.get("PTPIPE_DATA"):
        published = load_mnist(MnistConfig(batch_size=batch_size), context)
        train_split = published.splits["train"].subset(np.arange(num_images))
        inputs, targets = (
            {name: ArrayColumn(column.values()) for name, column in columns.items()}
            for columns in (train_split.inputs, train_split.targets)
        )
        return Data(published.info, {"train": Split(train_split.ids, inputs, targets)}, published.loader)
    rng = np.random.default_rng(0)
    image = ImageInfo(shape_CHW=(1, 28, 28), mean=(0.13,), std=(0.31,))
    info = DatasetInfo("random images", {"images": image}, Classification(class_names=tuple("0123456789")))
    images = ArrayColumn(rng.integers(0, 256, (num_images, 28, 28, 1), dtype=np.uint8))
    labels = ArrayColumn(rng.integers(0, 10, num_images))
    split = Split(np.arange(num_images).astype(np.str_), {"images": images}, {"labels": labels})
    return Data(info, {"train": split}, LoaderOptions(batch_size))


def make_texts(num_texts: int, batch_size: int) -> Data:
    rng = np.random.default_rng(0)
    tokens = TokensInfo(vocabulary_size=2000, max_length=64)
    offsets_N = np.concatenate([[0], np.cumsum(rng.integers(4, 65, num_texts))])
    columns = {"tokens": RaggedColumn(rng.integers(1, 2000, offsets_N[-1]), offsets_N, 0)}
    labels = ArrayColumn(rng.integers(0, 2, num_texts))
    split = Split(np.arange(num_texts).astype(np.str_), columns, {"labels": labels})
    info = DatasetInfo("random texts", {"tokens": tokens}, Classification(class_names=("0", "1")))
    return Data(info, {"train": split}, LoaderOptions(batch_size, batch_by_length=True))


def bare_loop(model: Model, data: Data, config: TrainConfig) -> Training:
    last = config.memory_format == "channels_last"
    layout = torch.channels_last if last else torch.contiguous_format
    module = model.build_prepared().to(config.device, memory_format=layout).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    order_N = data.epoch_order("train", SEED, 0, data.loader.batch_size)
    batches = list(data.batches("train", order_N=order_N, channels_last=last, device=config.device))

    def run() -> None:
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast(config.device, torch.bfloat16) if config.precision == "bf16" else nullcontext():
                loss = cross_entropy(module(*batch.args), batch.targets["labels"])
            loss.backward()
            optimizer.step()
        if config.device == "cuda":
            torch.cuda.synchronize()

    return run


def trainings(model: Model, data: Data, config: TrainConfig) -> dict[str, Training]:
    plain = bare_loop(model, data, config)

    def kept() -> None:
        with freed_memory_kept():
            plain()

    def stage() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            train(config, Context("train", "train.supervised", SEED, Path(scratch)), model, data)

    return {BARE: plain, BARE_KEPT: kept, STAGE: stage}


def measure(runs: dict[str, Training], num_samples: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the samples per second of every round but the first, which is the warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_ in range(num_rounds + 1):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            begin_s = time.perf_counter()
            runs[name]()
            if round_:
                rates[name].append(num_samples / (time.perf_counter() - begin_s))
    return rates


def show(title: str, rates: dict[str, list[float]]) -> bool:
    """Print a table, and return whether the stage reaches its target relative to the bare loop."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{title}\n{'':24}{'samples/s':>10}{'min':>8}{'max':>8}{'stage / it':>12}")
    for name, values in rates.items():
        ratio = medians[STAGE] / medians[name]
        print(f"{name:24}{medians[name]:10.0f}{min(values):8.0f}{max(values):8.0f}{ratio:12.3f}")
    return medians[STAGE] >= TARGET * medians[BARE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--contiguous", action="store_true", help="also measure the contiguous format, which the stage doesn't choose"
    )
    parser.add_argument("--text", action="store_true", help="texts instead of images")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    num_samples = options.steps * options.batch
    layouts = ("channels_last", "contiguous") if options.contiguous else ("channels_last",)
    reached = True
    with tempfile.TemporaryDirectory() as scratch, torch_threads(options.threads):
        context = Context("net", "model.small_cnn", SEED, Path(scratch))
        if options.text:
            layouts, data = ("contiguous",), make_texts(num_samples, options.batch)
            model = text_transformer(TextTransformerConfig(), context, data)
        else:
            data = make_data(num_samples, options.batch, context)
            model = small_cnn(SmallCnnConfig(), context, data)
        where = f"{options.device}, {options.threads} threads, torch {torch.__version__}"
        print(f"{data.info.name}, batches of {options.batch}, {where}")
        for precision in ("fp32", "bf16"):
            for layout in layouts:
                config = TrainConfig(
                    epochs=1,
                    precision=precision,
                    memory_format=layout,
                    num_threads=options.threads,
                    device=options.device,
                )
                rates = measure(trainings(model, data, config), num_samples, options.rounds)
                reached &= show(f"{precision}, {layout}", rates)
    print(f"\nat least {TARGET} of the bare loop everywhere: {'yes' if reached else 'NO'}")


if __name__ == "__main__":
    main()
