"""Throughput of parallel training on this machine: two processes of one thread, relative to one process, to two that
don't communicate, and to hand-written loops.

All are run in turn, in the same two processes; a round gives one throughput of each, and ratios are those of medians.
Network: model.small_cnn, channels-last. Images: MNIST under PTPIPE_DATA, else random images of the same shape.

    python benchmarks/parallel.py [--rounds 5] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import ptpipe
from ptpipe import Context, Metric, RunOptions
from ptpipe_data import MnistConfig, load_mnist
from ptpipe_elastic.torch_elastic import WorkersFailed, run_workers
from ptpipe_torch import ArrayColumn, Classification, Data, DatasetInfo, ImageInfo, LoaderOptions, Model, Split
from ptpipe_torch.distributed.worker_group import init_worker_group
from ptpipe_torch.runtime import freed_memory_kept, torch_threads
from ptpipe_train import TrainConfig, train
from ptpipe_train.config_parallel import Parallel
from ptpipe_zoo import SmallCnnConfig, small_cnn

BATCH, MICROBATCHES, SPLIT = 128, 8, 4
SINGLE, APART, DDP, BARE_DDP = "1 process", "2 apart", "ddp", "bare ddp loop"
PP, BARE_PP = "pp, 1f1b", "bare 1f1b loop"
MANIFEST = """
version: 1
name: start
seed: 7
stages:
  data: {uses: data.synthetic, with: {num_train: 130, val_size: 2}}
  net: {uses: model.small_cnn}
  train: {uses: train.supervised, with: {epochs: 1, batch_size: 128, num_threads: 1, parallel: {mode: ddp, workers: 2}}}
"""


def make_data(num_images: int, context: Context) -> Data:
    if os.environ.get("PTPIPE_DATA"):
        published = load_mnist(MnistConfig(), context)
        some = published.splits["train"].subset(np.arange(num_images))
        inputs, targets = (
            {name: ArrayColumn(column.values()) for name, column in columns.items()}
            for columns in (some.inputs, some.targets)
        )
        return Data(published.info, {"train": Split(some.ids, inputs, targets)}, published.loader)
    rng = np.random.default_rng(0)
    image = ImageInfo(shape_CHW=(1, 28, 28), mean=(0.13,), std=(0.31,))
    info = DatasetInfo("random images", {"images": image}, Classification(class_names=tuple("0123456789")))
    images = ArrayColumn(rng.integers(0, 256, (num_images, 28, 28, 1), dtype=np.uint8))
    labels = ArrayColumn(rng.integers(0, 10, num_images))
    split = Split(np.arange(num_images).astype(np.str_), {"images": images}, {"labels": labels})
    return Data(info, {"train": split}, LoaderOptions())


class Layout(nn.Module):
    """Converts between contiguous messages and channels-last convolutions, which are faster."""

    def __init__(self, layout: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=self.layout if x.dim() == 4 else torch.contiguous_format)


class Bench:
    """The runs of one of the two processes. Each returns images per second, summed over both."""

    def __init__(self, rank: int, steps: int, scratch: Path) -> None:
        self.rank, self.steps, self.scratch, self.number = rank, steps, scratch, 0
        context = Context("make", "make", 7, scratch)
        self.data = make_data(2 * BATCH * steps, context)
        self.model: Model = small_cnn(SmallCnnConfig(), context, self.data)

    def context(self, num_workers: int) -> Context:
        self.number += 1  # names of process groups can be used only once
        folder = self.scratch / f"{self.number}"
        folder.mkdir(exist_ok=True)
        return Context(f"t{self.number}", "train.supervised", 7, folder, rank=self.rank, num_workers=num_workers)

    def stage(self, context: Context, parallel: Parallel, batch_size: int) -> float:
        rates: list[float] = []

        def tell(event: object) -> None:
            if isinstance(event, Metric) and event.name == "samples_per_s":
                rates.append(float(str(event.value)))

        config = TrainConfig(epochs=1, batch_size=batch_size, num_threads=1, parallel=parallel)
        train(config, Context(**{**vars(context), "_tell": tell}), self.model, self.data)
        return rates[0]

    def alone(self, *, both: bool) -> float:
        """Train on rank 0 while the other waits idle; or on both, without communication."""
        context = self.context(1)
        with init_worker_group(self.context(2)):  # starts both at the same time
            pass
        rate = self.stage(context, Parallel(), BATCH) if both or self.rank == 0 else 0.0
        with init_worker_group(self.context(2)) as workers:
            return workers.all_reduce([rate])[0]

    @contextmanager
    def bare(self) -> Iterator[nn.Module]:
        with init_worker_group(self.context(2)), torch_threads(1), freed_memory_kept():
            yield self.model.build_prepared().to(memory_format=torch.channels_last).train()

    def batches(self, size: int, first: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        order = np.arange(first, 2 * BATCH * self.steps, step)
        made = self.data.batches("train", order_N=order, batch_size=size, channels_last=True)
        return [(batch.inputs["images"], batch.targets["labels"]) for batch in made]

    def bare_ddp(self) -> float:
        with self.bare() as module:
            wrapped = nn.parallel.DistributedDataParallel(module)
            optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
            batches = self.batches(BATCH, self.rank, 2)
            begin_s = time.perf_counter()
            for images_NCHW, labels_N in batches:
                optimizer.zero_grad()
                cross_entropy(wrapped(images_NCHW), labels_N).backward()
                optimizer.step()
            return 2 * BATCH * len(batches) / (time.perf_counter() - begin_s)

    def bare_pp(self) -> float:
        with self.bare() as module:
            piece = nn.Sequential(Layout(torch.channels_last), (module[:SPLIT], module[SPLIT:])[self.rank], Layout())
            batches = self.batches(2 * BATCH, 0, 1)
            images_MCHW = batches[0][0][: 2 * BATCH // MICROBATCHES]
            between = torch.empty_like(module[:SPLIT](images_MCHW), memory_format=torch.contiguous_format)
            values = [images_MCHW, between.detach().requires_grad_(), module(images_MCHW).detach().requires_grad_()]
            given = {"input_args": values[self.rank], "output_args": values[self.rank + 1]}
            stage = PipelineStage(piece, self.rank, 2, torch.device("cpu"), **given)
            schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy)
            optimizer = torch.optim.SGD(piece.parameters(), 0.05, momentum=0.9)
            begin_s = time.perf_counter()
            for images_NCHW, labels_N in batches:
                optimizer.zero_grad()
                schedule.step(*((images_NCHW,) if self.rank == 0 else ()), target=labels_N if self.rank else None)
                optimizer.step()
            return 2 * BATCH * len(batches) / (time.perf_counter() - begin_s)

    def runs(self) -> dict[str, Callable[[], float]]:
        ddp = Parallel(mode="ddp", workers=2)
        pp = Parallel(mode="pp", microbatches=MICROBATCHES, split_at=(str(SPLIT),))
        return {
            SINGLE: lambda: self.alone(both=False),
            APART: lambda: self.alone(both=True),  # the upper bound
            DDP: lambda: self.stage(self.context(2), ddp, 2 * BATCH),
            BARE_DDP: self.bare_ddp,
            PP: lambda: self.stage(self.context(2), pp, 2 * BATCH),
            BARE_PP: self.bare_pp,
        }


def work(rounds: int, steps: int, output: Path) -> None:
    rank = int(os.environ["RANK"])
    scratch = output.parent / f"rank-{rank}"
    scratch.mkdir()
    runs = Bench(rank, steps, scratch).runs()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_ in range(rounds + 1):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            rate = runs[name]()
            if round_:  # the first one is the warm-up
                rates[name].append(rate)
    if rank == 0:
        output.write_text(json.dumps(rates))


def start_s() -> tuple[float, float]:
    """Return the seconds of a stage of two workers that takes one step, and of importing torch in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "start.yaml"
        manifest.write_text(MANIFEST)
        result = ptpipe.run(manifest, artifacts=Path(folder) / "artifacts", options=RunOptions(verbosity=-2))
    begin_s = time.perf_counter()
    imports = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(2)]
    for process in imports:
        process.wait()
    return result.stages["train"].seconds, time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        work(options.rounds, options.steps, options.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rates.json"
        arguments = ["--rounds", str(options.rounds), "--steps", str(options.steps), "--output", str(output)]
        sys.path.insert(0, str(Path(__file__).parent))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        try:
            run_workers("parallel", arguments, 2, Path(folder) / "logs")
        except WorkersFailed as error:
            raise SystemExit("\n".join(error.failures[0].last_lines)) from error
        rates = json.loads(output.read_text())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"small_cnn, batch {BATCH} a process, one thread a process, torch {torch.__version__}\n")
    print(f"{'':18}{'images/s':>10}{'min':>8}{'max':>8}")
    for name, values in rates.items():
        print(f"{name:18}{medians[name]:10.0f}{min(values):8.0f}{max(values):8.0f}")
    print()
    for one, other, target in ((DDP, SINGLE, 1.8), (DDP, APART, None), (DDP, BARE_DDP, 0.97), (PP, BARE_PP, 0.95)):
        wanted = f"   (target: at least {target})" if target else ""
        print(f"{one + ' / ' + other:30}{medians[one] / medians[other]:6.3f}{wanted}")
    starts = [start_s() for _ in range(3)]
    beyond = statistics.median(stage - imports for stage, imports in starts)
    print(f"{'start, one step, end of 2 workers':34}{beyond:6.2f} s beyond importing torch   (target: at most 2)")


if __name__ == "__main__":
    main()
