"""Peak memory of each stage, and the memory still held after it, as multiples of the float file's size.

Each network is trained for a tiny epoch, quantized in every way, exported and compared by one manifest, in its own
process. A first run with a very small network loads all libraries and fills their caches; the resident set after it is
the baseline that is subtracted. Linux only: peaks are the kernel's VmHWM, reset before each stage.

    python benchmarks/memory.py [resnet18 ...]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import ptpipe
from ptpipe import RunOptions

NETWORKS = ("small_cnn", "mobilenet_v2", "resnet18", "resnet50", "vgg11_bn")
TARGET = 6.0
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): reset the peak resident set size to the current value
_MB = 2**20

MANIFEST = """
version: 1
name: memory
stages:
  data:
    uses: data.synthetic
    with: {{image_size: {size}, channels: 3, num_train: 16, num_test: 4, batch_size: 4}}
  net:        {{uses: {network}}}
  pretrain:   {{uses: train.supervised, needs: {{model: net}}, with: {{epochs: 1, lr: 0.001}}}}
  dynamic:    {{uses: quant.dynamic, needs: {{model: pretrain}}}}
  observed:   {{uses: quant.prepare, needs: {{model: pretrain}}}}
  calibrated: {{uses: quant.calibrate, needs: {{model: observed}}}}
  static:     {{uses: quant.convert, needs: {{model: calibrated.model}}}}
  fake_quant: {{uses: quant.prepare_qat, needs: {{model: pretrain}}}}
  finetune:   {{uses: train.supervised, needs: {{model: fake_quant}}, with: {{epochs: 1, lr: 0.0001}}}}
  qat:        {{uses: quant.convert, needs: {{model: finetune}}}}
  onnx_float:   {{uses: export.onnx, needs: {{model: pretrain}}}}
  onnx_dynamic: {{uses: export.onnx, needs: {{model: dynamic}}}}
  onnx_static:  {{uses: export.onnx, needs: {{model: static}}}}
  onnx_qat:     {{uses: export.onnx, needs: {{model: qat}}}}
  compare:
    uses: eval.compare
    needs: {{models: [pretrain, dynamic, static, qat, onnx_float, onnx_dynamic, onnx_static, onnx_qat]}}
    with: {{batch_sizes: [1], budget_s: 0.05}}
"""


class MemoryReporter(ptpipe.Reporter):
    """Notes, for each stage, the peak of the process and what it holds at the end, in bytes."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float | str]] = {}

    def stage_started(self, event: ptpipe.StageStarted) -> None:
        _CLEAR_REFS.write_text(_RESET_PEAK)

    def stage_finished(self, event: ptpipe.StageFinished) -> None:
        peak = resident_bytes("VmHWM")
        sizes = [int(output["size_bytes"]) for output in event.outputs.values()]  # type: ignore[call-overload]
        self.stages[event.stage_id] = {
            "kind": event.kind,
            "outcome": str(event.outcome) + (f": {event.message}" if event.message else ""),
            "peak": peak,
            "held": settled_bytes(),
            "size": sum(sizes),
        }


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status, e.g. VmRSS (present) or VmHWM (peak)."""
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found, field
    return int(found[1]) * 1024


def settled_bytes() -> int:
    """Resident bytes once unreachable objects are collected and the allocator has returned its free pages."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes("VmRSS")


def measure(network: str) -> None:
    """Run the manifest for a very small network, then for this one; print what was measured as JSON."""
    logging.disable(logging.WARNING)
    warm_up = "model.small_cnn, with: {width: 2}"
    if network == "small_cnn":
        network = "model.small_cnn, with: {width: 64}"
    else:
        network = f"model.torchvision, with: {{name: {network}}}"
    run_manifest(warm_up, size=16)
    baseline = settled_bytes()
    print(json.dumps({"baseline": baseline, "stages": run_manifest(network, size=64)}))


def run_manifest(network: str, size: int) -> dict[str, dict[str, float | str]]:
    """Run all stages in a new artifacts folder."""
    reporter = MemoryReporter()
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "memory.yaml"
        manifest.write_text(MANIFEST.format(network=network, size=size))
        options = RunOptions(keep_going=True, verbosity=-1)
        ptpipe.run(manifest, artifacts=Path(folder) / "artifacts", options=options, reporters=[reporter])
    return reporter.stages


def report(network: str) -> None:
    """Measure a network in a process of its own and print its table."""
    finished = subprocess.run(
        [sys.executable, __file__, "--measure", network], stdout=subprocess.PIPE, text=True, check=True
    )
    measured = json.loads(finished.stdout.splitlines()[-1])
    stages, before = measured["stages"], measured["baseline"]
    float_bytes = stages["pretrain"]["size"]
    print(f"\n{network}: float file {float_bytes / _MB:.1f} MB; libraries {before / _MB:.0f} MB")
    print(f"{'stage':13} {'kind':18} {'peak MB':>8} {'x file':>7} {'held MB':>8} {'x file':>7}")
    for name, stage in stages.items():
        peak, held = stage["peak"] - measured["baseline"], stage["held"] - before
        note = "" if stage["outcome"] == "done" else f"  {stage['outcome'][:80]}"
        note += f"  above {TARGET:g}x" if peak > TARGET * float_bytes else ""
        print(
            f"{name:13} {stage['kind']:18} {peak / _MB:8.0f} {peak / float_bytes:7.1f} "
            f"{held / _MB:8.0f} {held / float_bytes:7.1f}{note}"
        )
        before = stage["held"]
    total = before - measured["baseline"]
    print(f"{'all':13} {'':18} {'':8} {'':7} {total / _MB:8.0f} {total / float_bytes:7.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, help="small_cnn, or networks of torchvision")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    for network in arguments.networks:
        (measure if arguments.measure else report)(network)


if __name__ == "__main__":
    main()
