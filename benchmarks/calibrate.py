"""Time of `quant.calibrate`, relative to a bare float forward pass of the same samples in the same layout.

The rows of a network are timed in turn, in changing order and on one thread: the stage as a manifest runs it, with
building the network, reading the data and storing the result; and a loop that calls the float network in channels-last
on the same batches. Each time a process of its own takes the median of five: what stages set in glibc's malloc would
speed up the loop after them. Random images at 64 x 64, random weights. Figures are ratios of medians.

    python benchmarks/calibrate.py [--rounds 5] [--samples 1024] [--batch 64] [--observers mse min_max]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from timing import median_s, race

from ptpipe import Context
from ptpipe_quant import CalibrateConfig, PrepareConfig, calibrate, prepare
from ptpipe_torch import ArrayColumn, Classification, Data, DatasetInfo, ImageInfo, LoaderOptions, Model, Split
from ptpipe_torch.runtime import torch_threads
from ptpipe_zoo import TorchvisionConfig, torchvision

NETWORKS = ("mobilenet_v2", "resnet18")
OBSERVERS = ("mse", "percentile", "entropy", "min_max", "moving_average")
TARGET = 1.5
FLOAT = "float forward pass"


def make_data(num_images: int, batch_size: int) -> Data:
    rng = np.random.default_rng(0)
    image = ImageInfo(shape_CHW=(3, 64, 64), mean=(0.5,) * 3, std=(0.25,) * 3)
    info = DatasetInfo("random images", {"images": image}, Classification(class_names=tuple("0123456789")))
    images = ArrayColumn(rng.integers(0, 256, (num_images, 64, 64, 3), dtype=np.uint8))
    labels = ArrayColumn(rng.integers(0, 10, num_images))
    split = Split(np.arange(num_images).astype(np.str_), {"images": images}, {"labels": labels})
    return Data(info, {"calibration": split}, LoaderOptions(batch_size))


def float_pass(model: Model, data: Data, num_samples: int) -> None:
    network = model.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's
    with torch_threads(None), torch.no_grad():
        for batch in data.batches("calibration", order_N=np.arange(num_samples), channels_last=True):
            network(*batch.args)


def rows_of(model: Model, data: Data, observers: list[str], scratch: Path) -> dict[str, Callable[[], object]]:
    num_samples = len(data.splits["calibration"])
    ctx = Context("calibrate", "quant.calibrate", 7, scratch)
    rows: dict[str, Callable[[], object]] = {FLOAT: lambda: float_pass(model, data, num_samples)}
    for observer in observers:
        prepared = prepare(PrepareConfig.model_validate({"observer": observer}), ctx, model)
        config = CalibrateConfig(num_samples=num_samples)
        rows[observer] = lambda prepared=prepared, config=config: calibrate(config, ctx, prepared, data)
    return rows


def measure(row: str, network: str, data: Data) -> float:
    """Return the median seconds of a row."""
    with tempfile.TemporaryDirectory() as scratch:
        ctx = Context("net", "model.torchvision", 7, Path(scratch))
        model = torchvision(TorchvisionConfig(name=network), ctx, data)
        return median_s(rows_of(model, data, [] if row == FLOAT else [row], Path(scratch))[row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("--rounds", 5), ("--samples", 1024), ("--batch", 64)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--observers", nargs="+", choices=OBSERVERS, default=list(OBSERVERS))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure:
        print(measure(arguments.measure, arguments.networks[0], make_data(arguments.samples, arguments.batch)))
        return
    for network in arguments.networks:
        options = ["--networks", network, "--samples", str(arguments.samples), "--batch", str(arguments.batch)]
        seconds = race(__file__, [FLOAT, *arguments.observers], arguments.rounds, options)
        print(f"\n{network:20} {'s':>6}  of float (target: at most {TARGET})")
        for row, value in seconds.items():
            print(f"{row:20} {value:6.2f}  {value / seconds[FLOAT]:.2f}")


if __name__ == "__main__":
    main()
