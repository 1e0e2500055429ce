"""What the repairs of post-training quantization bring on a depthwise-separable network with one scale per weight.

The task is classification of photographs: windows of 32 x 32 pixels of the CamVid pictures (160 x 120), each with the
class that most of its pixels have; windows without a majority are left out. Train, validation and test pictures are
those of the data set. A MobileNet-like network with batch norms (`activation`: ReLU or ReLU6) is trained through
train.supervised, then quantized by quant.prepare, quant.calibrate and quant.convert with min-max ranges, and repaired
in all combinations that the table names. Calibration has 512 windows of the training pictures.

    python benchmarks/repairs.py [--epochs 4] [--lr 0.3] [--weight-decay 5e-4] [--seeds 0 1 2] [--backend qnnpack]
        [--weights per_tensor] [--observer min_max] [--activation ReLU] [--absorb-bias] [--quick] [--threads 1]

A line is one variant: accuracy on the test windows in percent, the loss against float in points, and agreement of its
predictions with float.

Shape legend: N windows, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from ptpipe import Context
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_quant.repairs import adaround, bias_correct, equalize
from ptpipe_quant.repairs.config import (
    AdaroundConfig,
    BiasCorrectConfig,
    EqualizeConfig,
)
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    FunctionRef,
    ImageInfo,
    LoaderOptions,
    Model,
    Recipe,
    Split,
    builder,
)
from ptpipe_train import TrainConfig, train

CLASSES = ("sky", "building", "road", "pavement", "tree", "car")
_MASK_CLASSES = {0: 0, 1: 1, 3: 2, 4: 3, 5: 4, 8: 5}
SIZE, STRIDE, CALIBRATION = 32, 16, 512


@builder
def separable(*, width: int, activation: str, num_classes: int) -> nn.Module:
    """Build a network in the style of MobileNet: 3x3 convolution, eight depthwise and pointwise pairs, linear layer."""

    def block(layer: nn.Module, channels: int) -> list[nn.Module]:
        return [layer, nn.BatchNorm2d(channels), getattr(nn, activation)()]

    layers = block(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), width)
    channels = width
    for stride, factor in ((1, 2), (2, 2), (1, 1), (1, 1), (2, 2), (1, 1), (1, 1), (1, 1)):
        depthwise = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        layers += block(depthwise, channels)
        layers += block(nn.Conv2d(channels, channels * factor, 1, bias=False), channels * factor)
        channels *= factor
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def windows(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows of one split's pictures, uint8 N x H x W x C, and the class of each."""
    pixels, labels = [], []
    for path in sorted((folder / "images").glob("*.png")):
        image, mask = np.asarray(Image.open(path)), np.asarray(Image.open(folder / "masks" / path.name))
        for top in range(0, image.shape[0] - SIZE + 1, STRIDE):
            for left in range(0, image.shape[1] - SIZE + 1, STRIDE):
                counts = np.bincount(mask[top : top + SIZE, left : left + SIZE].ravel(), minlength=12)
                if counts.max() > SIZE * SIZE / 2 and int(counts.argmax()) in _MASK_CLASSES:
                    pixels.append(image[top : top + SIZE, left : left + SIZE])
                    labels.append(_MASK_CLASSES[int(counts.argmax())])
    return np.stack(pixels), np.array(labels, np.int64)


def load(batch_size: int) -> Data:
    root = Path(os.environ["PTPIPE_DATA"]) / "camvid"
    splits = {}
    for name in ("train", "val", "test"):
        pixels_NHWC, labels_N = windows(root / name)
        ids = np.array([f"{name}/{index:05d}" for index in range(len(labels_N))])
        splits[name] = Split(ids, {"images": ArrayColumn(pixels_NHWC)}, {"labels": ArrayColumn(labels_N)})
    chosen_N = np.random.default_rng(0).permutation(len(splits["train"]))[:CALIBRATION]
    splits["calibration"] = splits["train"].subset(chosen_N)
    images = ImageInfo(shape_CHW=(3, SIZE, SIZE), mean=(0.45, 0.45, 0.45), std=(0.28, 0.28, 0.28))
    info = DatasetInfo("camvid windows", {"images": images}, Classification(class_names=CLASSES))
    return Data(info, splits, LoaderOptions(batch_size=batch_size))


class Bench:
    """One seed."""

    def __init__(self, folder: Path, data: Data, seed: int, options: argparse.Namespace) -> None:
        self.folder, self.data, self.seed, self.options = folder, data, seed, options
        self.scheme = {"backend": options.backend, "weights": options.weights, "reduce_range": False}
        self.labels_N = data.splits["test"].targets["labels"].values()

    def context(self, name: str) -> Context:
        scratch = self.folder / f"{name}-{self.seed}"
        scratch.mkdir(parents=True, exist_ok=True)
        return Context(name, name, self.seed, scratch)

    def float_model(self) -> Model:
        torch.manual_seed(self.seed)
        arguments = {"width": 16, "activation": self.options.activation, "num_classes": len(CLASSES)}
        recipe = Recipe(FunctionRef.to(separable, **arguments), self.data.info.signature)
        config = TrainConfig.model_validate(
            {
                "epochs": self.options.epochs,
                "lr": self.options.lr,
                "weight_decay": self.options.weight_decay,
                "schedule": {"name": "one_cycle"},
                "device": "cpu",
                "num_threads": self.options.threads,
            }
        )
        return train(config, self.context("train"), Model.from_module(recipe, separable(**arguments)), self.data)

    def int8(self, model: Model, *, cle: bool, ada: bool, bias: bool) -> Model:
        if cle:
            model = equalize(EqualizeConfig(absorb_bias=self.options.absorb_bias), self.context("equalize"), model)
        config = PrepareConfig.model_validate({**self.scheme, "observer": self.options.observer})
        model = prepare(config, self.context("prepare"), model)
        model = calibrate(CalibrateConfig(), self.context("calibrate"), model, self.data).model
        if ada:
            model = adaround(AdaroundConfig(), self.context("adaround"), model, self.data)
        if bias:
            model = bias_correct(BiasCorrectConfig(num_samples=CALIBRATION), self.context("bias"), model, self.data)
        return convert(ConvertConfig(), self.context("convert"), model)

    def predictions(self, model: Model) -> np.ndarray:
        with model.predictor(self.options.threads) as predict:
            batches = self.data.batches("test", batch_size=500)
            return np.concatenate(
                [predict({"images": batch.inputs["images"].numpy()})["logits"].argmax(1) for batch in batches]
            )


VARIANTS: dict[str, dict[str, bool]] = {
    "static, no repair": {},
    "equalize": {"cle": True},
    "bias_correct": {"bias": True},
    "adaround": {"ada": True},
    "equalize + bias_correct": {"cle": True, "bias": True},
    "equalize + adaround + bias_correct": {"cle": True, "ada": True, "bias": True},
}


def report(bench: Bench, row: Callable[[str, float, float, float], None]) -> None:
    model = bench.float_model()
    float_N = bench.predictions(model)
    float_accuracy = 100 * (float_N == bench.labels_N).mean()
    row("float", float_accuracy, 0.0, 100.0)
    for name, repairs in VARIANTS.items():
        start = time.perf_counter()
        if bench.options.quick and "ada" in repairs:
            continue
        flags = dict.fromkeys(("cle", "ada", "bias"), False) | repairs
        found_N = bench.predictions(bench.int8(model, **flags))
        accuracy = 100 * (found_N == bench.labels_N).mean()
        row(
            f"{name} ({time.perf_counter() - start:.0f} s)",
            accuracy,
            float_accuracy - accuracy,
            100 * (found_N == float_N).mean(),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--quick", action="store_true", help="leave out AdaRound")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--backend", default="qnnpack")
    parser.add_argument("--weights", default="per_tensor")
    parser.add_argument("--observer", default="min_max")
    parser.add_argument("--activation", default="ReLU", choices=["ReLU", "ReLU6"])
    parser.add_argument("--absorb-bias", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    def row(name: str, accuracy: float, loss: float, agreement: float) -> None:
        print(f"{name:56} {accuracy:8.2f} {loss:8.2f} {agreement:9.2f}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        data = load(batch_size=64)
        sizes = ", ".join(f"{name} {len(split)}" for name, split in data.splits.items())
        print(f"{options.backend}, {options.weights}, {options.observer}, {options.activation}; windows: {sizes}")
        print(f"{'':56} {'accuracy':>8} {'loss':>8} {'agreement':>9}")
        for seed in options.seeds:
            print(f"seed {seed}")
            report(Bench(Path(folder), data, seed, options), row)


if __name__ == "__main__":
    main()
