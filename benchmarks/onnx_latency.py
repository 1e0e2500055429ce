"""One image through ONNX Runtime: the float file, our int8 file, and what ONNX Runtime's own quantize_static makes.

Networks: model.small_cnn at 28x28; torchvision's mobilenet_v2 and resnet18 at 224x224; random weights (a latency does
not depend on them), batch norm statistics and ranges from the same synthetic images for all. Our file is what
quant.prepare, quant.calibrate, quant.convert and export.onnx make. quantize_static gets our float file, QDQ format,
uint8 activations, int8 weights per channel, after its own pre-processing. The files are run in turn, in changing
order, in one process, with one thread; figures are medians of all calls and the ratios of these.

    python benchmarks/onnx_latency.py [--networks small_cnn mobilenet_v2 resnet18] [--backend fbgemm] [--rounds 60]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ptpipe import Context
from ptpipe_data import SyntheticConfig, make_synthetic
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_onnx.kernels import Kernels
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import Data, Model, OnnxFile
from ptpipe_zoo import SmallCnnConfig, TorchvisionConfig, small_cnn, torchvision

NUM_CALIBRATION = 64
Images = npt.NDArray[np.float32]


def context(folder: Path, name: str) -> Context:
    scratch = folder / name
    scratch.mkdir(parents=True)
    return Context(name, name, 7, scratch)


def data_for(network: str, folder: Path) -> Data:
    size, channels = (28, 1) if network == "small_cnn" else (224, 3)
    config = SyntheticConfig(
        image_size=size, channels=channels, num_train=2 * NUM_CALIBRATION, num_test=8, calibration_size=NUM_CALIBRATION
    )
    return make_synthetic(config, context(folder, "data"))


def float_model(network: str, data: Data, folder: Path) -> Model:
    """Give the network with batch norms that know the images: without them a deep one has no signal to quantize."""
    ctx = context(folder, "net")
    if network == "small_cnn":
        model = small_cnn(SmallCnnConfig(), ctx, data)
    else:
        model = torchvision(TorchvisionConfig(name=network), ctx, data)
    module = model.build().train()
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.momentum = None
        for batch in data.batches("calibration", batch_size=16):
            module(batch.inputs["images"])
    return model.with_state_dict_of(module)


def our_files(model: Model, data: Data, backend: str, folder: Path) -> tuple[OnnxFile, OnnxFile]:
    """Give the float file and the int8 one."""
    options = ExportConfig(num_samples=8)
    float_file = export_onnx(options, context(folder, "float"), model, data)
    prepared = prepare(PrepareConfig.model_validate({"backend": backend}), context(folder, "prepare"), model)
    calibrated = calibrate(CalibrateConfig(), context(folder, "calibrate"), prepared, data).model
    int8 = convert(ConvertConfig(), context(folder, "convert"), calibrated)
    return float_file, export_onnx(options, context(folder, "int8"), int8, data)


def static_file(float_file: OnnxFile, data: Data, folder: Path) -> OnnxFile:
    """Give what onnxruntime.quantization makes of the float file."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime comes without types
        def __init__(self) -> None:
            self.batches: Iterator[Images] = (
                batch.inputs["images"].numpy() for batch in data.batches("calibration", batch_size=8)
            )

        def get_next(self) -> dict[str, Images] | None:
            images_NCHW = next(self.batches, None)
            return None if images_NCHW is None else {"images": np.ascontiguousarray(images_NCHW)}

    logging.getLogger().setLevel(logging.ERROR)
    prepared, path = folder / "prepared.onnx", folder / "quantize_static.onnx"
    quant_pre_process(str(float_file.path), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(path),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return OnnxFile(path, float_file.signature, "int8")


def measured(files: dict[str, OnnxFile], image_NCHW: Images, rounds: int) -> dict[str, float]:
    """Give the median time of a call in ms, by file."""
    times_s: dict[str, list[float]] = {name: [] for name in files}
    opened = {name: file.predictor(num_threads=1) for name, file in files.items()}
    predictors = {name: predictor.__enter__() for name, predictor in opened.items()}
    order = list(files)
    for round_ in range(-3, rounds):
        order = order[1:] + order[:1]
        for name in order:
            predictors[name]({"images": image_NCHW})
            for _ in range(4):
                start = time.perf_counter()
                predictors[name]({"images": image_NCHW})
                if round_ >= 0:
                    times_s[name].append(time.perf_counter() - start)
    for predictor in opened.values():
        predictor.__exit__(None, None, None)
    return {name: statistics.median(times) * 1000 for name, times in times_s.items()}


def report(network: str, backend: str, rounds: int, folder: Path) -> None:
    data = data_for(network, folder)
    float_file, int8_file = our_files(float_model(network, data, folder), data, backend, folder)
    rival = static_file(float_file, data, folder)
    files = {"float": float_file, f"export.onnx int8 ({backend})": int8_file, "quantize_static": rival}
    image_NCHW = np.ascontiguousarray(next(iter(data.batches("test", batch_size=1))).inputs["images"].numpy())
    medians_ms = measured(files, image_NCHW, rounds)
    for name, file in files.items():
        kernels = Kernels.of(file.path, folder)
        latency_ms = medians_ms[name]
        print(
            f"{network:14} {name:26} {latency_ms:9.4f} ms {latency_ms / medians_ms['float']:8.2f}x "
            f"{latency_ms / medians_ms['quantize_static']:8.2f}x {file.size_bytes:12,} "
            f"{kernels.integer.total():6} {kernels.float.total():6}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["small_cnn", "mobilenet_v2", "resnet18"])
    parser.add_argument("--backend", default="fbgemm", choices=["fbgemm", "x86", "onednn", "qnnpack"])
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"{'':54} ratio of medians to {'':19} operators in")
    print(
        f"{'network':14} {'file':26} {'median':>12} {'float':>9} {'static':>9} {'bytes':>12} {'int8':>6} {'float':>6}"
    )
    for network in arguments.networks:
        with tempfile.TemporaryDirectory() as folder:
            report(network, arguments.backend, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
