"""A whole job, whole process against whole process: `ptpipe run yardstick.yaml` and the script written by hand."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    mnist = Path(os.environ["PTPIPE_DATA"]) / "mnist"
    seconds: dict[str, list[float]] = {"plain": [], "ptpipe": []}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        unpack(mnist, root / "MNIST" / "raw")
        for number in range(arguments.rounds):
            taken, output = timed([sys.executable, str(HERE / "plain_script.py"), str(root)])
            seconds["plain"].append(taken)
            plain = json.loads(output)["variants"]
            artifacts = root / f"artifacts-{number}"
            manifest = str(HERE / "yardstick.yaml")
            command = [
                sys.executable,
                "-m",
                "ptpipe",
                "run",
                manifest,
                "--quiet",
                "--json",
                "--artifacts",
                str(artifacts),
            ]
            taken, output = timed(command)
            seconds["ptpipe"].append(taken)
            ours = json.loads(output)
    print_report(seconds, plain, ours)


def unpack(mnist: Path, raw: Path) -> None:
    raw.mkdir(parents=True)
    for archive in mnist.glob("*.gz"):
        with gzip.open(archive) as source, (raw / archive.stem).open("wb") as target:
            shutil.copyfileobj(source, target)


def timed(command: list[str]) -> tuple[float, str]:
    start = time.perf_counter()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return time.perf_counter() - start, output


def print_report(seconds: dict[str, list[float]], plain: dict[str, dict[str, float]], ours: dict[str, object]) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{'':10} {'wall, s':>9}")
    for name, median in medians.items():
        print(f"{name:10} {median:9.1f}   {[round(value, 1) for value in seconds[name]]}")
    print(f"ratio      {medians['ptpipe'] / medians['plain']:9.3f}   (target: at most 0.45)\n")
    stages = {stage["stage_id"]: stage for stage in ours["stages"]}  # type: ignore[index,attr-defined]
    table = next(iter(stages["compare"]["outputs"].values()))["summary"]
    rows = {row["name"]: row for row in table["rows"]}
    print(f"{'variant':10} {'plain, %':>9} {'ptpipe, %':>10} {'plain, bytes':>13} {'ptpipe, bytes':>14}")
    for name, theirs in plain.items():
        row = rows[{"fp32": "pretrain"}.get(name, name)]
        print(
            f"{name:10} {theirs['accuracy'] * 100:9.2f} {row['accuracy'] * 100:10.2f}"
            f" {theirs['bytes']:13,} {row['size_bytes']:14,}"
        )
    print("\nseconds by stage: " + ", ".join(f"{name} {stage['seconds']:.1f}" for name, stage in stages.items()))


if __name__ == "__main__":
    main()
