"""The networks of `networks.py`, each with made-up data of the smallest size that it takes.

torchvision's and the zoo's networks come from their own stages; spellings are written out here. Weights are random.
Shape legend: N samples, C channels, H height, W width, T tokens or rows, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ptpipe import Context
from ptpipe_torch import (
    BATCH,
    ArrayColumn,
    Classification,
    Column,
    ColumnInfo,
    Data,
    DatasetInfo,
    FunctionRef,
    ImageInfo,
    LoaderOptions,
    Model,
    RaggedColumn,
    Recipe,
    Segmentation,
    Signature,
    Split,
    Task,
    TensorSpec,
    TokensInfo,
    builder,
)
from ptpipe_torch.runtime import seeded
from ptpipe_zoo import (
    MlpConfig,
    SmallCnnConfig,
    SmallUNetConfig,
    TextLstmConfig,
    TextTransformerConfig,
    TorchvisionConfig,
    mlp,
    small_cnn,
    small_unet,
    text_lstm,
    text_transformer,
    torchvision,
)

F = nn.functional

NUM_CLASSES, VOCABULARY, TOKENS, FEATURES, SIDE = 10, 100, 16, 16, 16
SPLITS = {"train": 24, "calibration": 32, "test": 64}
BATCH_SIZE = 8
CLASSES = Classification(class_names=tuple(str(number) for number in range(NUM_CLASSES)))


class WithFeatures(Classification):
    """Networks return features beside the logits."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (*super().outputs, TensorSpec("features", "float32", (BATCH, FEATURES)))


@dataclass(frozen=True)
class Network:
    """A network, and the data that it is quantized on."""

    family: str
    data: Callable[[], Data]
    model: Callable[[Context, Data], Model]


def dataset(name: str, info: ColumnInfo, task: Task, draw: Callable[[np.random.Generator, int], Any]) -> Data:
    """Return the splits of a data set. `draw` returns the input and the target column of so many samples."""
    splits = {}
    for seed, (split, num) in enumerate(SPLITS.items()):
        column, target = draw(np.random.default_rng(seed), num)
        ids = np.array([f"{split}/{row}" for row in range(num)])
        (target_name,) = task.targets
        splits[split] = Split(ids, {name: column}, {target_name: target})
    return Data(DatasetInfo(f"random {name}", {name: info}, task), splits, LoaderOptions(BATCH_SIZE))


def images(side: int, channels: int = 3, task: Task = CLASSES) -> Data:
    """Return images of smooth random patterns with noise."""

    def draw(rng: np.random.Generator, num: int) -> tuple[Column, Column]:
        coarse_NHWC = rng.integers(0, 256, (num, 4, 4, channels)).repeat(-(-side // 4), 1).repeat(-(-side // 4), 2)
        pixels_NHWC = coarse_NHWC[:, :side, :side] + rng.normal(0, 20, (num, side, side, channels))
        target = ArrayColumn(rng.integers(0, NUM_CLASSES, num))
        if isinstance(task, Segmentation):
            target = ArrayColumn((coarse_NHWC[:, :side, :side, 0] // 26).astype(np.uint8))
        return ArrayColumn(pixels_NHWC.clip(0, 255).astype(np.uint8)), target

    return dataset(
        "images", ImageInfo(shape_CHW=(channels, side, side), mean=(0.5,) * channels, std=(0.3,) * channels), task, draw
    )


def scenes(side: int) -> Data:
    """Return images whose brightness tells the class of each pixel."""
    return images(side, task=Segmentation(class_names=CLASSES.class_names, shape_HW=(side, side)))


def texts() -> Data:
    """Return random texts of `TOKENS` tokens."""

    def draw(rng: np.random.Generator, num: int) -> tuple[Column, Column]:
        ids = rng.integers(1, VOCABULARY, num * TOKENS)
        column = RaggedColumn(ids, np.arange(num + 1) * TOKENS, 0, TOKENS)
        return column, ArrayColumn(rng.integers(0, NUM_CLASSES, num))

    tokens = TokensInfo(vocabulary_size=VOCABULARY, max_length=TOKENS, padding="max_length")
    return dataset("tokens", tokens, CLASSES, draw)


class Rows(nn.Module):
    """Reads an image row by row: a linear layer, the part in question, a linear layer."""

    def __init__(self, part: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.part = nn.Linear(3 * SIDE, FEATURES), part
        self.head = nn.Linear(FEATURES, NUM_CLASSES)
        self.call = call

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        rows_NTD = F.relu(self.embed(images_NCHW.transpose(1, 2).flatten(2)))
        logits_NK: torch.Tensor = self.head(self.call(self.part, rows_NTD).mean(1))
        return logits_NK


class Maps(nn.Module):
    """A convolution, the part in question, pooling, a linear layer."""

    def __init__(self, part: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, FEATURES, 3, padding=1), nn.BatchNorm2d(FEATURES), nn.ReLU())
        self.part, self.head = part, nn.Linear(FEATURES, NUM_CLASSES)
        self.call = call or (lambda part, x: part(x))

    def features(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return F.relu(self.call(self.part, self.stem(images_NCHW))).mean((2, 3))

    def forward(self, images_NCHW: torch.Tensor) -> Any:
        return self.head(self.features(images_NCHW))


class TupleOutputs(Maps):
    """Returns the logits and the features."""

    def forward(self, images_NCHW: torch.Tensor) -> Any:
        features_ND = self.features(images_NCHW)
        return self.head(features_ND), features_ND


class DictOutputs(Maps):
    """Returns the logits and the features by name."""

    def forward(self, images_NCHW: torch.Tensor) -> Any:
        features_ND = self.features(images_NCHW)
        return {"features": features_ND, "logits": self.head(features_ND)}


class Weights(nn.Module):
    """Has weights and no layers."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / 4) for shape in shapes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.weights[index]


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(FEATURES, FEATURES, 3, **{"padding": 1, **options})


def viewed(part: Any, x: torch.Tensor) -> torch.Tensor:
    maps_NCHW = part(x)
    flat_ND = maps_NCHW.view(maps_NCHW.size(0), FEATURES, -1)
    return flat_ND.view(maps_NCHW.shape)


def branching(part: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] > 8:
        x = F.max_pool2d(x, 2)
    return part(x) if x.size(1) == FEATURES else x


def normalized(part: Any, x: torch.Tensor) -> torch.Tensor:
    weight = part[0]
    return F.conv2d(x, weight / weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1), padding=1)


def attended(part: Any, x: torch.Tensor) -> torch.Tensor:
    return x + part(x, x, x, need_weights=False)[0]


SQUARE = (FEATURES, FEATURES)
SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    "functional linear": lambda: Rows(Weights(SQUARE, SQUARE[:1]), lambda part, x: F.linear(x, part[0], part[1])),
    "functional matmul": lambda: Rows(Weights(SQUARE, SQUARE[:1]), lambda part, x: x @ part[0].t() + part[1]),
    "functional convolution": lambda: Maps(Weights((*SQUARE, 3, 3)), lambda part, x: F.conv2d(x, part[0], padding=1)),
    "functional, packed": lambda: Rows(
        Weights((2 * FEATURES, FEATURES)), lambda part, x: F.linear(x, part[0][:FEATURES]) + x @ part[0][FEATURES:].t()
    ),
    "functional, normalized": lambda: Maps(Weights((*SQUARE, 3, 3)), normalized),
    "keywords": lambda: Maps(conv(), lambda part, x: torch.add(input=part(input=x), other=x)),
    "view": lambda: Maps(conv(), viewed),
    "branches on shapes": lambda: Maps(conv(), branching),
    **{
        f"padding {mode}": lambda mode=mode: Maps(conv(padding_mode=mode))
        for mode in ("reflect", "replicate", "circular")
    },
    "padding same": lambda: Maps(conv(padding="same", dilation=2)),
    "shared layer": lambda: Maps(conv(), lambda part, x: part(F.relu(part(x)))),
    "weight norm": lambda: Maps(nn.utils.parametrizations.weight_norm(conv())),
    "outputs in a tuple": lambda: TupleOutputs(conv()),
    "outputs in a dict": lambda: DictOutputs(conv()),
    "MultiheadAttention": lambda: Rows(nn.MultiheadAttention(FEATURES, 2, batch_first=True), attended),
    "TransformerEncoderLayer": lambda: Rows(
        nn.TransformerEncoderLayer(FEATURES, 2, 32, dropout=0.0, batch_first=True), lambda part, x: part(x)
    ),
    "LSTM": lambda: Rows(nn.LSTM(FEATURES, FEATURES, batch_first=True), lambda part, x: part(x)[0]),
    "GRU": lambda: Rows(nn.GRU(FEATURES, FEATURES, batch_first=True), lambda part, x: part(x)[0]),
}
SEVERAL_OUTPUTS = ("outputs in a tuple", "outputs in a dict")


@builder
def spelling(*, name: str) -> nn.Module:
    """Build a network of `SPELLINGS`."""
    return SPELLINGS[name]()


def of_spelling(name: str) -> Network:
    task = WithFeatures(class_names=CLASSES.class_names) if name in SEVERAL_OUTPUTS else CLASSES

    def model(ctx: Context, data: Data) -> Model:
        with seeded(ctx.seed):
            module = spelling(name=name)
        signature = Signature(data.info.signature.inputs, data.info.signature.outputs)
        return Model.from_module(Recipe(FunctionRef.to(spelling, name=name), signature), module)

    return Network("spellings", lambda: images(SIDE, task=task), model)


def of_torchvision(family: str, name: str, side: int = 64, data: Callable[[int], Data] = images) -> Network:
    return Network(family, lambda: data(side), lambda *where: torchvision(TorchvisionConfig(name=name), *where))


FAMILIES = {
    "residual": ("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "regnet_y_400mf", "densenet121"),
    "mobile": (
        *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_0", "squeezenet1_1"),
        *("mnasnet1_0", "efficientnet_b0", "efficientnet_v2_s"),
    ),
    "plain and inception": ("alexnet", "vgg11_bn", "googlenet", "inception_v3"),
    "transformers": ("convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t"),
    "segmentation": ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50"),
}
SIDES = {"efficientnet_b0": 128, "efficientnet_v2_s": 128, "inception_v3": 96, "maxvit_t": 224, "vit_b_16": 32}

NETWORKS: dict[str, Network] = {
    "small_cnn": Network("ptpipe's own", lambda: images(28, 1), lambda *where: small_cnn(SmallCnnConfig(), *where)),
    "small_unet": Network("ptpipe's own", lambda: scenes(32), lambda *where: small_unet(SmallUNetConfig(), *where)),
    "mlp": Network("ptpipe's own", lambda: images(8), lambda *where: mlp(MlpConfig(), *where)),
    "text_transformer": Network(
        "ptpipe's own", texts, lambda *where: text_transformer(TextTransformerConfig(), *where)
    ),
    "text_lstm": Network("ptpipe's own", texts, lambda *where: text_lstm(TextLstmConfig(), *where)),
    **{name: of_spelling(name) for name in SPELLINGS},
    **{
        name: of_torchvision(family, name, SIDES.get(name, 64), scenes if family == "segmentation" else images)
        for family, names in FAMILIES.items()
        for name in names
    },
}
