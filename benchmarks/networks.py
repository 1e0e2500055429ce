"""Which networks go the whole way to an int8 ONNX file: each of `network_list.py`, each variant, each backend.

dynamic: quant.dynamic, export.onnx. static: quant.prepare, quant.calibrate, quant.convert, export.onnx. qat:
quant.prepare_qat, train.supervised (three steps), quant.convert, export.onnx. Weights are random, batch norm
statistics those of the data. Each row runs in a process of its own, within limits of time and memory, and is written
to `--out` as a line of JSON; rows that are there are not run again.

    python benchmarks/networks.py --out rows.jsonl [--only 'resnet*'] [--variants static] [--backends fbgemm]
    python benchmarks/networks.py --table rows.jsonl

Latency ratios are rough: a dozen calls of each file, in turn, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from network_list import NETWORKS, Network
from torch import nn

from ptpipe import Context, PtpipeError
from ptpipe.events import Event, LogLine, Metric, Notice
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    DynamicConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    dynamic,
    prepare,
    prepare_qat,
)
from ptpipe_torch import Data, Model, OnnxFile
from ptpipe_torch.runtime import torch_threads
from ptpipe_train import TrainConfig, train

VARIANTS, BACKENDS = ("dynamic", "static", "qat"), ("fbgemm", "qnnpack")
NUM_CALLS = 12
MIN_BYTES = 100_000
"""Of the weights, for a size to be shown: of a smaller network, the file is mostly the names in it."""
_FLOAT_LOG = " computes in float: "
_SUMMARY = "ONNX Runtime"
_STAYS_FLOAT, _PATH = re.compile(" stays? float: "), re.compile(r"\S*/(?=[\w-]+\.py:\d)")


@dataclass
class Row:
    """What became of one network in one variant on one backend."""

    network: str
    variant: str
    backend: str
    result: str = "works"
    """`works`, `refused` (an error of ours), `exception` (any other), `time`, `memory`."""
    message: str = ""
    int8_layers: int = 0
    float_layers: int = 0
    reasons: list[str] = field(default_factory=list)
    """Why layers are float."""
    max_steps: float | None = None
    """By how many steps of its output a layer of the file differs, at most, from torch's, given the same integers."""
    agreement: float | None = None
    """Fraction of the samples for which ONNX Runtime and torch's int8 model predict the same class. Networks that are
    not trained make another class of any rounding."""
    size_ratio: float | None = None
    """Of the int8 file to the float tensors."""
    latency_ratio: float | None = None
    """Of the int8 file to the float file."""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.network, self.variant, self.backend


class Job:
    """Takes one network through one variant."""

    def __init__(self, network: Network, variant: str, backend: str, scratch: Path) -> None:
        self.variant, self.backend, self.scratch = variant, backend, scratch
        self.events: list[Event] = []
        self.data = network.data()
        self.float_model = with_statistics(network.model(self.context("net"), self.data), self.data)

    def context(self, name: str) -> Context:
        scratch = self.scratch / name
        scratch.mkdir()
        return Context(name, name, 7, scratch, _tell=self.events.append)

    def int8_model(self) -> Model:
        options = {"backend": self.backend}
        if self.variant == "dynamic":
            return dynamic(DynamicConfig.model_validate(options), self.context("int8"), self.float_model)
        if self.variant == "static":
            config = PrepareConfig.model_validate({**options, "observer": "min_max"})
            prepared = prepare(config, self.context("prepare"), self.float_model)
            ready = calibrate(CalibrateConfig(), self.context("calibrate"), prepared, self.data).model
        else:
            prepared = prepare_qat(PrepareQatConfig.model_validate(options), self.context("prepare"), self.float_model)
            options = TrainConfig(epochs=1, lr=1e-4, num_threads=1, device="cpu")
            ready = train(options, self.context("train"), prepared, self.data)
        return convert(ConvertConfig(), self.context("int8"), ready)

    def fill(self, row: Row, *, measures_latency: bool) -> None:
        """Run the stages; write what they report into the row."""
        file = self.export(self.int8_model(), "onnx")
        metrics = self.metrics()
        row.int8_layers, row.float_layers = int(metrics["num_int8_layers"]), int(metrics["num_float_layers"])
        row.reasons = list(self.reasons())
        row.max_steps = metrics.get("max_layer_difference_steps")
        row.agreement = next((float(metrics[name]) for name in metrics if name.endswith("top1_agreement")), None)
        float_bytes = sum(tensor.nbytes for tensor in self.float_model.tensors.values())
        row.size_ratio = file.size_bytes / float_bytes if float_bytes > MIN_BYTES else None
        if measures_latency:
            row.latency_ratio = latency_ratio(file, self.export(self.float_model, "float"), self.data)

    def export(self, model: Model, name: str) -> OnnxFile:
        return export_onnx(ExportConfig(num_samples=64), self.context(name), model, self.data)

    def metrics(self) -> dict[str, Any]:
        return {event.name: event.value for event in self.events if isinstance(event, Metric)}

    def reasons(self) -> Iterator[str]:
        """Yield why layers are float: what the quantizing stages tell, then what reading the file shows, by reason."""
        texts = [event.text for event in self.events if isinstance(event, LogLine | Notice)]
        yield from (_PATH.sub("", text) for text in texts if _STAYS_FLOAT.search(text))
        parts = [event.text.partition(_FLOAT_LOG) for event in self.events if isinstance(event, LogLine)]
        logged = [(name, reason) for name, found, reason in parts if found and name != _SUMMARY]
        for reason, num in Counter(reason for _, reason in logged).items():
            names = [name for name, of in logged if of == reason]
            yield f"{', '.join(names[:2])}{f' and {num - 2} more' if num > 2 else ''}: {reason}"


def with_statistics(model: Model, data: Data) -> Model:
    """Return the network with the batch norm statistics of the data; without them a deep one has no signal.

    Weights that begin as zeros (the last layer of vision transformers), or nearly so (the scales in ConvNeXt), get
    values: a network that ignores its input agrees with anything.
    """
    torch.manual_seed(0)
    module = model.build().train()
    with torch.no_grad(), torch_threads(1):
        for name, parameter in module.named_parameters():
            if name.endswith("layer_scale"):
                parameter.fill_(0.1)
            elif parameter.dim() > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.1)
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d) and part.track_running_stats]
        for norm in norms:
            norm.momentum = None
        for batch in data.batches("calibration", batch_size=32) if norms else ():
            module(*batch.args)
    return model.with_state_dict_of(module)


def latency_ratio(file: OnnxFile, float_file: OnnxFile, data: Data) -> float:
    """Return the ratio of the medians of calls with one sample, in turn."""
    inputs = next(iter(data.batches("test", batch_size=1))).input_arrays()
    times_s: tuple[list[float], list[float]] = ([], [])
    with file.predictor(num_threads=1) as int8, float_file.predictor(num_threads=1) as reference:
        for round_ in range(-2, NUM_CALLS):
            for predict, times in zip((int8, reference), times_s, strict=True):
                start = time.perf_counter()
                predict(inputs)
                if round_ >= 0:
                    times.append(time.perf_counter() - start)
    return statistics.median(times_s[0]) / statistics.median(times_s[1])


def run_here(row: Row, *, measures_latency: bool) -> Row:
    """Fill a row in this process."""
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
            job = Job(NETWORKS[row.network], row.variant, row.backend, Path(folder))
            job.fill(row, measures_latency=measures_latency)
    except PtpipeError as error:
        row.result, row.message = "refused", str(error).splitlines()[0]
    except MemoryError:
        row.result = "memory"
    except Exception as error:  # noqa: BLE001  # what this table is to show
        is_memory = "memory" in str(error) and "alloc" in str(error)
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip().splitlines() or [""])[0]
        row.result = "memory" if is_memory else "exception"
        row.message = f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"
    row.seconds = round(time.monotonic() - start, 1)
    return row


def run_in_child(row: Row, arguments: argparse.Namespace) -> Row:
    """Fill a row in a process of its own, within the limits."""
    command = [sys.executable, __file__, "--row", json.dumps(row.key), "--memory-gb", str(arguments.memory_gb)]
    command += ["--no-latency"] * arguments.no_latency
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=arguments.timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        row.result, row.seconds = "time", arguments.timeout_s
        return row
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        row.result = "exception"
        row.message = f"exit status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
        return row
    return Row(**json.loads(lines[-1]))


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a file, the last of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return list({row.key: row for row in rows}.values())


def wanted(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows to run."""
    known = {row.key for row in rows_of(arguments.out)}
    for name in NETWORKS:
        if any(fnmatchcase(name, pattern) for pattern in arguments.only):
            for variant in arguments.variants:
                for backend in arguments.backends:
                    row = Row(name, variant, backend)
                    if row.key not in known:
                        yield row


def run(arguments: argparse.Namespace) -> None:
    """Run what is wanted and not there yet."""
    for row in wanted(arguments):
        filled = run_in_child(row, arguments)
        with arguments.out.open("a") as file:
            file.write(json.dumps(asdict(filled)) + "\n")
        print(f"{' '.join(row.key):48} {filled.result:9} {filled.seconds:6.1f} s  {filled.message}", flush=True)


def print_table(rows: list[Row], *, shows_latency: bool) -> None:
    """Print Markdown: a table for each family, a line for each network and variant; `fbgemm · qnnpack`."""
    by_key = {row.key: row for row in rows}
    columns = ["network", "variant", "int8 layers", "size", "steps", *["latency"] * shows_latency, "float, and why"]
    for family in dict.fromkeys(network.family for network in NETWORKS.values()):
        lines = []
        for name in (name for name, network in NETWORKS.items() if network.family == family):
            for variant in VARIANTS:
                found = [by_key[key] for backend in BACKENDS if (key := (name, variant, backend)) in by_key]
                if found:
                    lines.append([name, variant, *_cells(found, shows_latency=shows_latency)])
        if lines:
            print(f"**{family if family.startswith('ptpipe') else family.capitalize()}**\n")
            for line in (columns, ["---"] * len(columns), *lines):
                print(f"| {' | '.join(line)} |")
            print()


def _cells(rows: list[Row], *, shows_latency: bool) -> Iterator[str]:
    yield _joined(_layers(row) for row in rows)
    yield _joined(_percent(row.size_ratio) for row in rows)
    yield _joined("" if row.max_steps is None else f"{row.max_steps:.0f}" for row in rows)
    if shows_latency:
        yield _joined(_ratio(row) for row in rows)
    notes = [reason for row in rows for reason in ([row.message] if row.message else row.reasons)]
    yield "; ".join(dict.fromkeys(notes)).replace("|", "\\|").replace("\n", " ")


def _layers(row: Row) -> str:
    if row.result != "works":
        return f"**{row.result}**"
    return f"{row.int8_layers} of {row.int8_layers + row.float_layers}"


def _ratio(row: Row) -> str:
    """Return a latency ratio; of networks without a size to show, it says little but how many nodes there are."""
    return "" if row.latency_ratio is None or row.size_ratio is None else f"{row.latency_ratio:.2f}x"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def _joined(texts: Iterable[str]) -> str:
    found = list(texts)
    return found[0] if len(set(found)) == 1 else " · ".join(text or "-" for text in found)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the rows")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of the networks' names")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--memory-gb", type=float, default=10)
    parser.add_argument("--table", type=Path, help="print the rows of this file as Markdown")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.out or arguments.table or arguments.row):
        parser.error("give --out or --table")
    return arguments


def main() -> None:
    arguments = parsed()
    if arguments.table:
        rows = rows_of(arguments.table)
        print_table(rows, shows_latency=not arguments.no_latency and any(row.latency_ratio for row in rows))
    elif arguments.row:
        limit = int(arguments.memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        row = run_here(Row(*json.loads(arguments.row)), measures_latency=not arguments.no_latency)
        print(json.dumps(asdict(row)))
    else:
        run(arguments)


if __name__ == "__main__":
    main()
