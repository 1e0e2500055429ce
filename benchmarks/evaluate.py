"""Time of `eval.predict`, relative to a bare loop of the float network on the same samples in the same layout.

The stage as a manifest runs it, with building the network, reading the data and computing metrics, in a process of its
own: it keeps freed memory for the next batch, and glibc would remember that for the bare loop. Each process takes the
median of its runs; figures are medians of processes, which are started in turn. Random images, random weights.

    python benchmarks/evaluate.py [--rounds 5] [--samples 2048] [--batch 128] [--networks small_cnn mobilenet_v2]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from timing import median_s, race

from ptpipe import Context
from ptpipe_data import SyntheticConfig, make_synthetic
from ptpipe_eval import PredictConfig, eval_predict
from ptpipe_torch import Data, Model
from ptpipe_zoo import SmallCnnConfig, TorchvisionConfig, small_cnn, torchvision

NETWORKS = ("small_cnn", "mobilenet_v2", "resnet18")
BARE, STAGE = "bare loop", "eval.predict"


def make(network: str, num_samples: int, batch_size: int, ctx: Context) -> tuple[Model, Data]:
    size, channels = (28, 1) if network == "small_cnn" else (64, 3)
    config = SyntheticConfig(
        image_size=size, channels=channels, num_train=8, num_test=num_samples, batch_size=batch_size
    )
    data = make_synthetic(config, ctx)
    if network == "small_cnn":
        return small_cnn(SmallCnnConfig(), ctx, data), data
    return torchvision(TorchvisionConfig(name=network), ctx, data), data


def bare_loop(model: Model, data: Data) -> None:
    network = model.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's
    with torch.inference_mode():
        for batch in data.batches("test", channels_last=True):
            network(*batch.args)


def measure(row: str, network: str, num_samples: int, batch_size: int) -> float:
    """Return the median seconds of a row."""
    with tempfile.TemporaryDirectory() as scratch:
        ctx = Context("predict", "eval.predict", 7, Path(scratch))
        model, data = make(network, num_samples, batch_size, ctx)
        if row == BARE:
            return median_s(lambda: bare_loop(model, data))
        return median_s(lambda: eval_predict(PredictConfig(), ctx, model, data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("--rounds", 5), ("--samples", 2048), ("--batch", 128)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--measure", choices=(BARE, STAGE), help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.measure, arguments.networks[0], arguments.samples, arguments.batch))
        return
    for network in arguments.networks:
        options = ["--networks", network, "--samples", str(arguments.samples), "--batch", str(arguments.batch)]
        medians = race(__file__, (BARE, STAGE), arguments.rounds, options)
        for row, value in medians.items():
            print(f"{network:14} {row:14} {value:7.3f} s  {value / medians[BARE]:.2f}x", flush=True)


if __name__ == "__main__":
    main()
