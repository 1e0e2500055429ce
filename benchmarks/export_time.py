"""How long export.onnx takes: up to its parity pass, and that pass against the forward passes that it is made of.

The stage runs as in a manifest, on int8 models with random weights and on the float ones that they were made of; its
own events say when the parity pass starts (the last metric before its first predictions) and ends. The forward passes
are then run alone, on the same batches, which are in memory: ONNX Runtime, torch int8, torch float, and torch int8
again, which the pass gives inputs with noise. Every table has one warm-up export of a small network.

    python benchmarks/export_time.py [--networks resnet18 mobilenet_v2 vit_b_16] [--size 64] [--samples 512]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from onnx_latency import context, float_model

from ptpipe import Context, Event, Metric, Progress
from ptpipe_data import SyntheticConfig, make_synthetic
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import Data, Model, OnnxFile, epoch_order
from ptpipe_torch.parity.comparison import torch_predictors

TARGETS_S = {"resnet18": 6.0, "mobilenet_v2": 6.0, "vit_b_16": 12.0}
MAX_PARITY_RATIO = 1.5
BATCH_SIZE = 64


def int8_model(model: Model, data: Data, backend: str, folder: Path) -> Model:
    prepared = prepare(PrepareConfig.model_validate({"backend": backend}), context(folder, "prepare"), model)
    calibrated = calibrate(CalibrateConfig(), context(folder, "calibrate"), prepared, data).model
    return convert(ConvertConfig(), context(folder, "convert"), calibrated)


def timed_export(model: Model, data: Data, num_samples: int, ctx: Context) -> tuple[OnnxFile, float, float]:
    """Return the file, the seconds up to the parity pass, and those of the pass."""
    events: list[tuple[float, Event]] = []
    start = time.perf_counter()
    timed = replace(ctx, _tell=lambda event: events.append((time.perf_counter(), event)))
    file = export_onnx(ExportConfig(num_samples=num_samples), timed, model, data)
    in_pass = [moment for moment, event in events if isinstance(event, Progress) and event.unit == "predictions"]
    before = max(moment for moment, event in events if isinstance(event, Metric) and moment < in_pass[0])
    return file, before - start, in_pass[-1] - before


def forward_passes_s(file: OnnxFile, model: Model, data: Data, num_samples: int) -> float:
    """Return the seconds that the predictors take for the samples of the parity pass."""
    order_N = epoch_order(len(data.splits["test"]), 7, 0)[:num_samples]
    batches = [batch.input_arrays() for batch in data.batches("test", order_N=order_N, batch_size=BATCH_SIZE)]
    with ExitStack() as stack:
        onnx = stack.enter_context(file.predictor())
        int8, plain = stack.enter_context(torch_predictors(model))
        assert plain is not None
        predictors = (onnx, int8, plain, int8)
        start = time.perf_counter()
        for inputs in batches:
            for predict in predictors:
                predict(inputs)
        return time.perf_counter() - start


def report(network: str, size: int, num_samples: int, backend: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pixels, channels = (28, 1) if network == "small_cnn" else (size, 3)
        counts = {"num_train": 128, "num_test": num_samples, "calibration_size": 64}
        config = SyntheticConfig.model_validate({"image_size": pixels, "channels": channels, **counts})
        data = make_synthetic(config, context(folder, "data"))
        floating = float_model(network, data, folder)
        _, float_s, _ = timed_export(floating, data, 8, context(folder, "export_float"))
        model = int8_model(floating, data, backend, folder)
        file, export_s, parity_s = timed_export(model, data, num_samples, context(folder, "export"))
        forward_s = forward_passes_s(file, model, data, num_samples)
        target = f"{TARGETS_S[network]:6.0f} s" if network in TARGETS_S else f"{'':8}"
        print(
            f"{network:14} {float_s:8.2f} s {export_s:8.2f} s {target} {parity_s:8.2f} s {forward_s:8.2f} s "
            f"{parity_s / forward_s:6.2f}x (target: {MAX_PARITY_RATIO}x)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "mobilenet_v2", "vit_b_16"])
    parser.add_argument("--size", type=int, default=64, help="pixels of a side; 224 for networks that take no other")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--backend", default="fbgemm", choices=["fbgemm", "x86", "onednn", "qnnpack"])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"{'network':14} {'float':>10} {'int8':>10} {'target':>8} {'parity':>10} {'passes':>10}")
    report("small_cnn", 28, 8, arguments.backend)  # imports, and the exporter's table of operators
    for network in arguments.networks:
        size = 224 if network.startswith("vit") else arguments.size
        report(network, size, arguments.samples, arguments.backend)


if __name__ == "__main__":
    main()
