"""How long the command line takes when there is nothing to do. Wall time of whole processes, medians."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MANIFEST = Path(__file__).parent.parent / "manifests" / "mnist_qat.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--manifest", default=str(MANIFEST))
    parser.add_argument("--artifacts", help="an artifacts folder where the manifest is cached already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifacts = arguments.artifacts or folder
        ptpipe = [sys.executable, "-m", "ptpipe"]
        rows = [
            ("python -c pass", [sys.executable, "-c", "pass"], None),
            ("ptpipe --help", [*ptpipe, "--help"], 0.2),
            ("ptpipe validate", [*ptpipe, "validate", arguments.manifest], 0.5),
            ("ptpipe plan", [*ptpipe, "plan", arguments.manifest, "--artifacts", artifacts], 0.5),
            ("ptpipe run, all cached", [*ptpipe, "run", arguments.manifest, "--artifacts", artifacts], 1.0),
        ]
        subprocess.run(rows[-1][1], check=False, capture_output=True)  # fills the store where it's empty
        seconds: dict[str, list[float]] = {name: [] for name, _, _ in rows}
        for _ in range(arguments.rounds):
            for name, command, _ in rows:
                start = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - start)
        print(f"{'command':24} {'median, s':>10} {'target, s':>10} {'imports torch':>14}")
        for name, command, target in rows:
            median = statistics.median(seconds[name])
            print(f"{name:24} {median:10.3f} {target or '':>10} {imports_torch(command):>14}")


def imports_torch(command: list[str]) -> str:
    """Whether the same command line, run again with its imports traced, imports torch."""
    if command[1] != "-m":
        return "no"
    traced = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True, check=True)
    return "yes" if any(line.endswith("| torch") for line in traced.stderr.splitlines()) else "no"


if __name__ == "__main__":
    main()
