"""Time of `eval.predict`, relative to a bare loop of the float network on the same samples in the same layout.

The stage as a manifest runs it, with building the network, reading the data and computing metrics, in a process of its
own: it keeps freed memory for the next batch, and glibc would remember that for the bare loop. Each process takes the
median of its runs; figures are medians of processes, which are started in turn. Random images, random weights.

    python benchmarks/evaluate.py [--rounds 5] [--samples 2048] [--batch 128] [--networks small_cnn mobilenet_v2]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ptpipe import Context
from ptpipe_data import SyntheticConfig, make_synthetic
from ptpipe_eval import PredictConfig, eval_predict
from ptpipe_torch import Data, Model
from ptpipe_zoo import SmallCnnConfig, TorchvisionConfig, small_cnn, torchvision

NETWORKS = ("small_cnn", "mobilenet_v2", "resnet18")
BARE, STAGE = "bare loop", "eval.predict"
NUM_RUNS = 5


def context(folder: Path, name: str) -> Context:
    scratch = folder / name
    scratch.mkdir(parents=True, exist_ok=True)
    return Context(name, name, 7, scratch)


def make(network: str, num_samples: int, batch_size: int, folder: Path) -> tuple[Model, Data]:
    size, channels = (28, 1) if network == "small_cnn" else (64, 3)
    config = SyntheticConfig(
        image_size=size, channels=channels, num_train=8, num_test=num_samples, batch_size=batch_size
    )
    data, ctx = make_synthetic(config, context(folder, "data")), context(folder, "net")
    if network == "small_cnn":
        return small_cnn(SmallCnnConfig(), ctx, data), data
    return torchvision(TorchvisionConfig(name=network), ctx, data), data


def bare_loop(model: Model, data: Data) -> None:
    network = model.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's
    with torch.inference_mode():
        for batch in data.batches("test", channels_last=True):
            network(*batch.args)


def measure(row: str, network: str, num_samples: int, batch_size: int) -> None:
    """Print the median seconds of a row."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, data = make(network, num_samples, batch_size, folder)
        rows: dict[str, Callable[[], object]] = {
            BARE: lambda: bare_loop(model, data),
            STAGE: lambda: eval_predict(PredictConfig(), context(folder, "predict"), model, data),
        }
        seconds = []
        for _ in range(NUM_RUNS + 1):
            begin_s = time.perf_counter()
            rows[row]()
            seconds.append(time.perf_counter() - begin_s)
        print(statistics.median(seconds[1:]))  # the first one warms up


def report(network: str, num_rounds: int, options: list[str]) -> None:
    seconds: dict[str, list[float]] = {BARE: [], STAGE: []}
    for round_ in range(num_rounds):
        for row in list(seconds)[:: 1 if round_ % 2 else -1]:
            command = [sys.executable, __file__, "--networks", network, *options, "--measure", row]
            seconds[row].append(float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    medians = {row: statistics.median(values) for row, values in seconds.items()}
    for row, value in medians.items():
        print(f"{network:14} {row:14} {value:7.3f} s  {value / medians[BARE]:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("--rounds", 5), ("--samples", 2048), ("--batch", 128)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--measure", choices=(BARE, STAGE), help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    for network in arguments.networks:
        if arguments.measure:
            measure(arguments.measure, network, arguments.samples, arguments.batch)
        else:
            report(network, arguments.rounds, ["--samples", str(arguments.samples), "--batch", str(arguments.batch)])


if __name__ == "__main__":
    main()
