"""`data.shards` against `data.image_folder` on the same pictures from local disk, and its memory while it streams.

Both data sets are made by their stages, as a manifest runs them, and read in the order of an epoch in turn: pictures
per second, and the ratio of the medians. `--gigabytes 10` also writes made-up shards of that size into a temporary
folder, streams them once and prints the peak of the memory of all processes together (proportional set size: pages that
they share count once), sampled five times a second. Linux only.

    python benchmarks/shards.py [--rounds 5] [--pictures 1500] [--gigabytes 10] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

import ptpipe
from ptpipe import RunOptions
from ptpipe_data.shard_writer import ShardSize, write_shards
from ptpipe_torch import Data

NUM_CLASSES = 10
STREAM_SHARD_BYTES = 256_000_000
NUM_DIFFERENT = 64
"""Pictures of the streamed shards that differ: their content doesn't matter."""
GB, MB = 10**9, 10**6


def jpeg(rng: np.random.Generator, side: int, grain: int, quality: int) -> bytes:
    """A picture of random patches: the larger the grain, the smaller the file."""
    small = rng.integers(0, 256, (side // grain, side // grain, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=quality)
    return file.getvalue()


def run_data(folder: Path, kind: str, options: str, num_workers: int) -> Data:
    """The data set that a manifest's stage makes, as a later stage gets it."""
    manifest = folder / f"{kind}.yaml"
    manifest.write_text(
        f"version: 1\nname: shards\nseed: 7\nstages:\n  data: {{uses: {kind}, with: {{{options}}}}}\n", encoding="utf-8"
    )
    result = ptpipe.run(manifest, artifacts=folder / "artifacts", options=RunOptions(verbosity=-2))
    assert result.exit_code == 0, result.stages["data"].message
    data = result.artifact("data")
    assert isinstance(data, Data)
    return data.with_options({"num_workers": num_workers})


def seconds_of_epoch(data: Data, epoch: int) -> float:
    order_N = data.epoch_order("train", 7, epoch, data.loader.batch_size)
    started = time.perf_counter()
    for _ in data.batches("train", order_N=order_N):
        pass
    return time.perf_counter() - started


def compare_speed(folder: Path, num_pictures: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    for number in range(num_pictures):
        path = folder / "pictures" / f"class {number % NUM_CLASSES}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(rng, 320, 8, 85))
    size = sum(path.stat().st_size for path in folder.glob("pictures/*/*.jpg"))
    print(f"{num_pictures} pictures of 320 x 320, {size / num_pictures / 1000:.0f} kB each, decoded to 224 x 224")
    print(f"{'workers':>7} {'image_folder':>13} {'shards':>9} {'ratio':>6}   pictures/s, medians of {rounds} rounds")
    for num_workers in (0, 2):
        options = "batch_size: 64, val_size: 0, test_size: 1"
        files = run_data(folder, "data.image_folder", f"path: {folder}/pictures, {options}", num_workers)
        if not (folder / "shards").exists():
            write_shards(files, folder / "shards", ShardSize(num_bytes=10 * MB), seed=7)
        shards = run_data(folder, "data.shards", f"path: {folder}/shards, batch_size: 64", num_workers)
        times: dict[str, list[float]] = {"files": [], "shards": []}
        for epoch in range(rounds + 1):
            for name, data in (("files", files), ("shards", shards)):
                times[name].append(seconds_of_epoch(data, epoch))
        per_s = {name: num_pictures / statistics.median(of[1:]) for name, of in times.items()}  # the first warms up
        ratio = per_s["shards"] / per_s["files"]
        print(f"{num_workers:7} {per_s['files']:13.0f} {per_s['shards']:9.0f} {ratio:6.2f}", flush=True)


class PeakMemory:
    """Samples the memory of this process and of those that it starts."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()

    @contextmanager
    def sampled(self) -> Iterator[PeakMemory]:
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.2):
            self.peak_bytes = max(self.peak_bytes, proportional_bytes())


def proportional_bytes() -> int:
    """The proportional set size of this process and its children."""
    total = 0
    for name in ["self", *Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()]:
        try:
            lines = Path(f"/proc/{name}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def write_stream(folder: Path, num_bytes: int) -> int:
    """Write made-up shards; return the number of samples."""
    rng = np.random.default_rng(0)
    pictures = [jpeg(rng, 1024, 2, 90) for _ in range(NUM_DIFFERENT)]
    folder.mkdir()
    num_samples = written = 0
    while written < num_bytes:
        path = folder / f"train-{written // STREAM_SHARD_BYTES:06}.tar"
        with tarfile.open(path, "w") as tar:
            while tar.offset < STREAM_SHARD_BYTES:
                members = {"jpg": pictures[num_samples % NUM_DIFFERENT], "cls": b"%d" % (num_samples % NUM_CLASSES)}
                for extension, content in members.items():
                    header = tarfile.TarInfo(f"{num_samples:09}.{extension}")
                    header.size = len(content)
                    tar.addfile(header, io.BytesIO(content))
                num_samples += 1
        written += path.stat().st_size
    return num_samples


def stream(folder: Path, gigabytes: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1.2 * gigabytes * GB:
        raise SystemExit(f"{folder} has {free / GB:.0f} GB free: choose another --folder")
    num_samples = write_stream(folder / "stream", int(gigabytes * GB))
    size = sum(path.stat().st_size for path in (folder / "stream").iterdir())
    with PeakMemory().sampled() as memory:
        started = time.perf_counter()
        data = run_data(folder, "data.shards", f"path: {folder}/stream, val_size: 0, test_size: 1, batch_size: 64", 2)
        listed_s = time.perf_counter() - started
        stream_s = seconds_of_epoch(data, 0)
    print(
        f"\nstreamed {size / GB:.1f} GB, {num_samples:,} samples, with {data.loader.num_workers} workers in "
        f"{stream_s:.0f} s ({size / stream_s / MB:.0f} MB/s; the stage took {listed_s:.1f} s): peak of all processes "
        f"{memory.peak_bytes / MB:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=1500)
    parser.add_argument("--gigabytes", type=float, default=0)
    parser.add_argument("--folder", type=Path, help="where to write: default the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ptpipe-shards-", dir=options.folder) as folder:
        if options.pictures:
            compare_speed(Path(folder), options.pictures, options.rounds)
        if options.gigabytes:
            stream(Path(folder), options.gigabytes)


if __name__ == "__main__":
    main()
