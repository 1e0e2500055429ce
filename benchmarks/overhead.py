"""A full run of mnist_qat.yaml: time outside training, calibration, evaluation and export, and peak memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MANIFEST = Path(__file__).parent.parent / "manifests" / "mnist_qat.yaml"
WORK = ("train.", "quant.calibrate", "eval.", "export.")


def main() -> None:
    with tempfile.TemporaryDirectory() as artifacts:
        command = [sys.executable, "-m", "ptpipe", "run", str(MANIFEST), "--quiet", "--json", "--artifacts", artifacts]
        start = time.perf_counter()
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        wall_s = time.perf_counter() - start
    stages = json.loads(finished.stdout)["stages"]
    work_s = sum(stage["seconds"] for stage in stages if stage["kind"].startswith(WORK))
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    for stage in stages:
        print(f"{stage['stage_id']:14} {stage['kind']:18} {stage['outcome']:8} {stage['seconds']:8.2f} s")
    print(f"\nexit code {finished.returncode}")
    print(f"whole process            {wall_s:8.2f} s")
    print(f"of which work            {work_s:8.2f} s")
    print(f"everything else          {wall_s - work_s:8.2f} s   (target: at most 2)")
    print(f"peak memory              {peak_mb:8.0f} MB  (target: at most 1500)")


if __name__ == "__main__":
    main()
