"""One sample through ONNX Runtime: the float file, our int8 file, and what ONNX Runtime's own quantize_static makes.

Of networks for images also our int8 file with `preprocessing: nhwc`, which takes pixels.

Networks: model.small_cnn at 28x28; torchvision's at 224x224; model.text_transformer, texts of 64 tokens; random weights
(a latency does not depend on them), batch norm statistics and ranges from the same synthetic samples for all. Our file
is what quant.prepare, quant.calibrate, quant.convert and export.onnx make. quantize_static gets our float file, QDQ
format, uint8 activations, int8 weights per channel, after its own pre-processing. The files run in turn, in changing
order, in one process, with one thread; figures are medians of all calls and the ratios of these. `--operators` lists
what ONNX Runtime runs for the two int8 files, after its fusions.

    python benchmarks/onnx_latency.py [--networks small_cnn vit_b_16 ...] [--backend fbgemm] [--rounds 60] [--operators]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch

from ptpipe import Context
from ptpipe_data import SyntheticConfig, make_synthetic
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_onnx.kernels import Kernels
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    LoaderOptions,
    Model,
    OnnxFile,
    RaggedColumn,
    Split,
    TokensInfo,
)
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_zoo import (
    SmallCnnConfig,
    TextTransformerConfig,
    TorchvisionConfig,
    small_cnn,
    text_transformer,
    torchvision,
)

NUM_CALIBRATION = 64
OURS = "export.onnx int8"
NETWORKS = [
    *("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "mobilenet_v3_large", "shufflenet_v2_x1_0"),
    *("vit_b_16", "text_transformer", "small_cnn"),
]
VOCABULARY_SIZE, LENGTH = 8192, 64
Inputs = Mapping[str, npt.NDArray[Any]]
"""By name, batch axis first."""


def context(folder: Path, name: str) -> Context:
    scratch = folder / name
    scratch.mkdir(parents=True)
    return Context(name, name, 7, scratch)


def data_for(network: str, folder: Path) -> Data:
    if network == "text_transformer":
        return texts()
    size, channels = (28, 1) if network == "small_cnn" else (224, 3)
    config = SyntheticConfig(
        image_size=size, channels=channels, num_train=2 * NUM_CALIBRATION, num_test=8, calibration_size=NUM_CALIBRATION
    )
    return make_synthetic(config, context(folder, "data"))


def texts() -> Data:
    """Give random texts of one length."""
    rng, splits = np.random.default_rng(7), {}
    for name, size in {"train": 2 * NUM_CALIBRATION, "calibration": NUM_CALIBRATION, "test": 8}.items():
        ids = rng.integers(1, VOCABULARY_SIZE, size * LENGTH)
        tokens = RaggedColumn(ids, np.arange(size + 1) * LENGTH, 0, LENGTH)
        labels = ArrayColumn(rng.integers(0, 4, size))
        splits[name] = Split(np.array([f"{name}/{row}" for row in range(size)]), {"tokens": tokens}, {"labels": labels})
    info = TokensInfo(vocabulary_size=VOCABULARY_SIZE, max_length=LENGTH)
    task = Classification(class_names=("a", "b", "c", "d"))
    return Data(DatasetInfo("texts", {"tokens": info}, task), splits, LoaderOptions(batch_size=16))


def float_model(network: str, data: Data, folder: Path) -> Model:
    """Give the network with batch norms that know the images: without them a deep one has no signal to quantize.

    Nor has one whose last layer is zero, as torchvision initializes vision transformers.
    """
    ctx = context(folder, "net")
    if network == "small_cnn":
        model = small_cnn(SmallCnnConfig(), ctx, data)
    elif network == "text_transformer":
        model = text_transformer(TextTransformerConfig(), ctx, data)
    else:
        model = torchvision(TorchvisionConfig(name=network), ctx, data)
    module = model.build().train()
    norms = [part for part in module.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, torch.nn.Linear) and not part.weight.any():
                torch.nn.init.trunc_normal_(part.weight, std=0.02)
        for norm in norms:
            norm.momentum = None
        for batch in data.batches("calibration", batch_size=16) if norms else ():
            module(*batch.args)
    return model.with_state_dict_of(module)


def our_files(model: Model, data: Data, backend: str, folder: Path) -> dict[str, OnnxFile]:
    """Give the float file, the int8 one and, of images, the int8 one that takes pixels."""
    options = ExportConfig(num_samples=8)
    float_file = export_onnx(options, context(folder, "float"), model, data)
    prepared = prepare(PrepareConfig.model_validate({"backend": backend}), context(folder, "prepare"), model)
    calibrated = calibrate(CalibrateConfig(), context(folder, "calibrate"), prepared, data).model
    int8 = convert(ConvertConfig(), context(folder, "convert"), calibrated)
    files = {"float": float_file, OURS: export_onnx(options, context(folder, "int8"), int8, data)}
    if "images" in data.info.inputs:
        options = ExportConfig(num_samples=8, preprocessing="nhwc")
        files[f"{OURS}, pixels"] = export_onnx(options, context(folder, "pixels"), int8, data)
    return files


def static_file(float_file: OnnxFile, data: Data, folder: Path) -> OnnxFile:
    """Give what onnxruntime.quantization makes of the float file."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime comes without types
        def __init__(self) -> None:
            self.batches: Iterator[Inputs] = (
                batch.input_arrays() for batch in data.batches("calibration", batch_size=8)
            )

        def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
            inputs = next(self.batches, None)
            return None if inputs is None else {name: np.ascontiguousarray(array) for name, array in inputs.items()}

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


def inputs_of(file: OnnxFile, data: Data) -> Inputs:
    """Give one sample in the form that a file takes."""
    (first, *_) = data.batches("test", batch_size=1, input_form=file.input_form)
    return {name: np.ascontiguousarray(array) for name, array in first.input_arrays().items()}


def measured(files: dict[str, OnnxFile], data: Data, rounds: int) -> dict[str, float]:
    """Give the median time of a call in ms, by file."""
    inputs = {name: inputs_of(file, data) for name, file in files.items()}
    times_s: dict[str, list[float]] = {name: [] for name in files}
    opened = {name: file.predictor(num_threads=1) for name, file in files.items()}
    predictors = {name: predictor.__enter__() for name, predictor in opened.items()}
    order = list(files)
    for round_ in range(-3, rounds):
        order = order[1:] + order[:1]
        for name in order:
            predictors[name](inputs[name])
            for _ in range(4):
                start = time.perf_counter()
                predictors[name](inputs[name])
                if round_ >= 0:
                    times_s[name].append(time.perf_counter() - start)
    for predictor in opened.values():
        predictor.__exit__(None, None, None)
    return {name: statistics.median(times) * 1000 for name, times in times_s.items()}


def operators(path: Path, folder: Path) -> Counter[str]:
    """Give the number of operators by type in the graph that ONNX Runtime runs."""
    import onnxruntime as ort

    optimized, options = folder / "optimized.onnx", session_options(num_threads=1)
    options.optimized_model_filepath = str(optimized)
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)


def report(network: str, backend: str, rounds: int, folder: Path, *, list_operators: bool) -> None:
    data = data_for(network, folder)
    files = our_files(float_model(network, data, folder), data, backend, folder)
    float_file = files["float"]
    files["quantize_static"] = static_file(float_file, data, folder)
    medians_ms = measured(files, data, rounds)
    for name, file in files.items():
        kernels = Kernels.of(file.path, folder)
        latency_ms = medians_ms[name]
        print(
            f"{network:18} {name:26} {latency_ms:9.4f} ms {latency_ms / medians_ms['float']:8.2f}x "
            f"{latency_ms / medians_ms['quantize_static']:8.2f}x {file.size_bytes:12,} "
            f"{file.size_bytes / float_file.size_bytes:6.1%} {kernels.integer.total():6} {kernels.float.total():6}",
            flush=True,
        )
    if list_operators:
        ours, theirs = (operators(files[name].path, folder) for name in (OURS, "quantize_static"))
        for op_type in sorted(ours | theirs):
            print(f"    {op_type:28} {ours[op_type]:5} {theirs[op_type]:5}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--backend", default="fbgemm", choices=["fbgemm", "x86", "onednn", "qnnpack"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--operators", action="store_true", help="list the operators of both int8 files: ours, theirs")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"{'':58} ratio of medians to {'':26} operators in")
    print(
        f"{'network':18} {'file':26} {'median':>12} {'float':>9} {'static':>9} {'bytes':>12} {'float':>6} "
        f"{'int8':>6} {'float':>6}"
    )
    for network in arguments.networks:
        with tempfile.TemporaryDirectory() as folder:
            report(network, arguments.backend, arguments.rounds, Path(folder), list_operators=arguments.operators)


if __name__ == "__main__":
    main()
