"""How often the int8 ONNX file and the torch int8 model that it was exported from predict the same class.

Networks: model.small_cnn on MNIST; torchvision's mobilenet_v2 on photographs: the windows of the CamVid pictures that
`repairs.py` describes, enlarged to 64 x 64. Each is trained through train.supervised, then quantized both ways:
quant.prepare, quant.calibrate and quant.convert; quant.prepare_qat, one more epoch of training and quant.convert. All
test images go through the int8 network in torch and through the file in ONNX Runtime.

    python benchmarks/agreement.py [--networks small_cnn mobilenet_v2] [--backends fbgemm qnnpack]
        [--variants static qat] [--epochs 4] [--seed 0] [--train-images 8000] [--test-images 10000] [--layers]
        [--keep FOLDER] [--threads 1]

A line is one variant: accuracy of the float network, the int8 network and its file in percent; in how many percent
of the images the file predicts the same class, and in how many it computes the same logits, bit for bit. `--layers`
adds the layers where the two first differ, with the number of images. `--keep` keeps the trained networks, or takes
them from there.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from repairs import CALIBRATION, CLASSES, windows

from ptpipe import Context
from ptpipe_data import MnistConfig, load_mnist
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_onnx.layerwise import integers_of
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    Deployable,
    ImageInfo,
    LoaderOptions,
    Model,
    OnnxFile,
    Split,
)
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.int8_recorder import Int8Recorder
from ptpipe_torch.int8.layer_parity import layer_name, quantize_nodes
from ptpipe_torch.runtime import torch_threads
from ptpipe_train import TrainConfig, train
from ptpipe_zoo import SmallCnnConfig, TorchvisionConfig, small_cnn, torchvision

SIZE, BATCH_SIZE = 64, 64
LEARNING_RATES = {"small_cnn": (0.05, 0.005), "mobilenet_v2": (0.05, 0.002)}
"""Of the float network, and of quantization-aware training."""


def photographs() -> Data:
    """Return the windows, enlarged."""
    root, splits = Path(os.environ["PTPIPE_DATA"]) / "camvid", {}
    for name in ("train", "test"):
        pixels_NHWC, labels_N = windows(root / name)
        large_NHWC = np.stack([np.asarray(Image.fromarray(window).resize((SIZE, SIZE))) for window in pixels_NHWC])
        ids = np.array([f"{name}/{index:05d}" for index in range(len(labels_N))])
        splits[name] = Split(ids, {"images": ArrayColumn(large_NHWC)}, {"labels": ArrayColumn(labels_N)})
    images = ImageInfo(shape_CHW=(3, SIZE, SIZE), mean=(0.45, 0.45, 0.45), std=(0.28, 0.28, 0.28))
    info = DatasetInfo("camvid windows", {"images": images}, Classification(class_names=CLASSES))
    return Data(info, splits, LoaderOptions(batch_size=BATCH_SIZE))


def limited(data: Data, options: argparse.Namespace) -> Data:
    """Return fewer images, with a split for calibration."""
    sizes = {"train": options.train_images, "test": options.test_images}
    splits = {}
    for name, size in sizes.items():
        order_N = np.random.default_rng(0).permutation(len(data.splits[name]))
        splits[name] = data.splits[name].subset(order_N[:size])
    splits["calibration"] = splits["train"].subset(np.arange(CALIBRATION))
    return Data(data.info, splits, data.loader)


@dataclass(frozen=True)
class Bench:
    """One network."""

    folder: Path
    network: str
    data: Data
    options: argparse.Namespace

    def context(self, name: str) -> Context:
        scratch = self.folder / f"{self.network}-{name}"
        scratch.mkdir(parents=True, exist_ok=True)
        return Context(name, name, self.options.seed, scratch)

    def trained(self, name: str, model: Model, lr: float, epochs: int) -> Model:
        keep = self.options.keep
        kept = None if keep is None else keep / f"{self.network}-{name}-seed{self.options.seed}"
        if kept is not None and kept.exists():
            return Model.load(kept)
        config = TrainConfig.model_validate(
            {
                "epochs": epochs,
                "lr": lr,
                "schedule": {"name": "one_cycle"},
                "device": "cpu",
                "num_threads": self.options.threads,
            }
        )
        model = train(config, self.context(name), model, self.data)
        if kept is not None:
            kept.mkdir(parents=True)
            model.save(kept)
        return model

    def float_model(self) -> Model:
        ctx = self.context("net")
        if self.network == "small_cnn":
            model = small_cnn(SmallCnnConfig(), ctx, self.data)
        else:
            model = torchvision(TorchvisionConfig(name=self.network), ctx, self.data)
        return self.trained("float", model, LEARNING_RATES[self.network][0], self.options.epochs)

    def int8(self, model: Model, variant: str, backend: str) -> Model:
        if variant == "static":
            model = prepare(PrepareConfig.model_validate({"backend": backend}), self.context("prepare"), model)
            model = calibrate(CalibrateConfig(), self.context("calibrate"), model, self.data).model
        else:
            model = prepare_qat(PrepareQatConfig.model_validate({"backend": backend}), self.context("prepare"), model)
            model = self.trained(f"{variant}-{backend}", model, LEARNING_RATES[self.network][1], 1)
        return convert(ConvertConfig(), self.context(f"convert-{variant}-{backend}"), model)

    def logits(self, model: Deployable) -> npt.NDArray[np.float32]:
        with model.predictor(self.options.threads) as predict:
            batches = self.data.batches("test", batch_size=500)
            return np.concatenate([predict({"images": images(batch)})["logits"] for batch in batches])

    def accuracy(self, logits_NK: npt.NDArray[np.float32]) -> float:
        labels_N = self.data.splits["test"].targets["labels"].values()
        return 100 * float(np.mean(logits_NK.argmax(1) == labels_N))

    def first_differences(self, model: Model, file: OnnxFile, backend: str) -> Counter[str]:
        """Count the images by the first layer whose integers differ."""
        with quantized_engine(backend), torch_threads(self.options.threads), torch.no_grad(), deprecations_silenced():
            reference, int8 = reference_network(model.build_prepared())[0], model.build()
            counts: Counter[str] = Counter()
            for batch in self.data.batches("test", batch_size=500):
                recorder = Int8Recorder(int8, reference)
                recorder.run(batch.inputs["images"])
                found = integers_of(file.path, reference, {"images": images(batch)}, self.folder)
                counts.update(first(reference, recorder.found, found))
        return counts


def images(batch: object) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(batch.inputs["images"].numpy())  # type: ignore[attr-defined]


def first(
    reference: torch.fx.GraphModule, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> Iterator[str]:
    """Yield, for each image with a difference, the layer that has the first one."""
    left = None
    for node in quantize_nodes(reference):
        if node.name not in expected or node.name not in found:
            continue
        differs_N = (expected[node.name].float() != found[node.name].float()).flatten(1).any(1)
        left = torch.ones_like(differs_N) if left is None else left
        yield from [layer_name(node, reference)] * int((differs_N & left).sum())
        left &= ~differs_N


def report(bench: Bench) -> None:
    model = bench.float_model()
    float_accuracy = bench.accuracy(bench.logits(model))
    for variant in bench.options.variants:
        for backend in bench.options.backends:
            int8 = bench.int8(model, variant, backend)
            file = export_onnx(ExportConfig(num_samples=64), bench.context("onnx"), int8, bench.data)
            torch_NK, onnx_NK = bench.logits(int8), bench.logits(file)
            agreement = 100 * np.mean(torch_NK.argmax(1) == onnx_NK.argmax(1))
            identical = 100 * np.mean((torch_NK == onnx_NK).all(1))
            print(
                f"{f'{bench.network}, {variant}, {backend}':32} {float_accuracy:8.2f} {bench.accuracy(torch_NK):8.2f} "
                f"{bench.accuracy(onnx_NK):8.2f} {agreement:10.3f} {identical:10.2f}",
                flush=True,
            )
            if bench.options.layers:
                for layer, count in bench.first_differences(int8, file, backend).most_common():
                    print(f"    {count:6} {layer}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["small_cnn", "mobilenet_v2"])
    parser.add_argument("--backends", nargs="+", default=["fbgemm", "qnnpack"])
    parser.add_argument("--variants", nargs="+", default=["static", "qat"])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-images", type=int, default=8000)
    parser.add_argument("--test-images", type=int, default=10000)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(f"{'':32} {'float':>8} {'int8':>8} {'onnx':>8} {'agreement':>10} {'identical':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for network in options.networks:
            ctx = Context("data", "data", options.seed, Path(folder))
            data = load_mnist(MnistConfig(), ctx) if network == "small_cnn" else photographs()
            report(Bench(Path(folder), network, limited(data, options), options))


if __name__ == "__main__":
    main()
