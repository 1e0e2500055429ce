"""Networks to start from. Importing this imports neither torch nor numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ptpipe import JSON, Context, Stage, StageConfig, hookimpl, nearest, stage
from ptpipe_torch import Data, FunctionRef, Model
from ptpipe_zoo.names import classifier_names


class MlpConfig(StageConfig):
    """Options of `model.mlp`."""

    hidden: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = Field(
        (256, 128), max_length=32, description="size of each hidden layer; none makes a linear classifier"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of hidden activations dropped in training")


@stage("model.mlp", packages=("torch",))
def mlp(config: MlpConfig, ctx: Context, data: Data) -> Model:
    """Make a multi-layer perceptron: linear layers with ReLU (and dropout) over the flattened image.

    Image size, channels and classes are the data set's; the initial weights follow from the seed alone.
    """
    from ptpipe_zoo import nets

    info = data.info
    part = FunctionRef.to(
        nets.mlp,
        shape_CHW=info.shape_CHW,
        num_classes=info.num_classes,
        hidden=config.hidden,
        dropout=config.dropout,
    )
    return nets.captured(part, nets.initialised(part, ctx.seed), info, ctx)


class SmallCnnConfig(StageConfig):
    """Options of `model.small_cnn`."""

    width: int = Field(32, ge=1, le=1024, description="channels of the first convolution; the second has twice as many")


@stage("model.small_cnn", packages=("torch",))
def small_cnn(config: SmallCnnConfig, ctx: Context, data: Data) -> Model:
    """Make a small convolutional network for small images (8x8 to 64x64).

    Two 3x3 convolutions of `width` and 2 x `width` channels, each with batch norm, ReLU and 2x2 max pooling; a
    linear layer of 128 with ReLU; a linear layer of the data set's classes. The initial weights follow from the
    seed alone.
    """
    from ptpipe_zoo import nets

    info = data.info
    part = FunctionRef.to(nets.small_cnn, shape_CHW=info.shape_CHW, num_classes=info.num_classes, width=config.width)
    return nets.captured(part, nets.initialised(part, ctx.seed), info, ctx)


class TorchvisionConfig(StageConfig):
    """Options of `model.torchvision`."""

    name: str = Field(description="the network: resnet18, mobilenet_v3_small, any of torchvision's classifiers")
    weights: str | None = Field(
        None, min_length=1, description="published weights to download: DEFAULT, or a name such as IMAGENET1K_V1"
    )
    weights_file: str | None = Field(
        None, min_length=1, description="local state dict to start from: safetensors, or written by torch.save"
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        names = classifier_names()
        if names and name not in names:
            raise PydanticCustomError(
                "unknown_network",
                "must name one of torchvision's classification networks",
                {"expected": ", ".join(names)},
            )
        return name

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.weights and self.weights_file:
            raise ValueError("give weights or weights_file, not both")
        return self


def _weights_file(config: TorchvisionConfig) -> Path | None:
    return Path(config.weights_file).expanduser() if config.weights_file else None


def _digest_weights(config: TorchvisionConfig) -> JSON:
    """The SHA-256 of the weights file; None without one, or where it is missing (the preflight says so)."""
    file = _weights_file(config)
    if file is None or not file.is_file():
        return None
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _find_lacks(config: TorchvisionConfig) -> Iterable[str]:
    """What keeps the network from being made here, a line each."""
    file = _weights_file(config)
    if file is not None and not file.is_file():
        yield f"there is no weights file {file}"
    try:
        from ptpipe_zoo import classifiers
    except (ImportError, RuntimeError) as error:
        yield f"torchvision can't be imported: {error}"
        return
    names = classifiers.names()
    if config.name not in names:
        yield f"the torchvision installed here has no classifier {config.name!r}{_hint(config.name, names)}"
    elif config.weights and config.weights not in (offered := classifiers.published(config.name)):
        yield f"{config.name} has no published weights {config.weights!r}; there are {', '.join(offered)}"


def _hint(word: str, words: Iterable[str]) -> str:
    suggestion = nearest(word, words)
    return f" (did you mean {suggestion!r}?)" if suggestion else ""


@stage("model.torchvision", packages=("torch", "torchvision"), fingerprint=_digest_weights, preflight=_find_lacks)
def torchvision(config: TorchvisionConfig, ctx: Context, data: Data) -> Model:
    """Make one of torchvision's classification networks for the data set's channels, image size and classes.

    It starts from random weights that follow from the seed alone, from a local file, or from published weights,
    which are downloaded once into torch's cache. Trained weights for RGB are made to take other channels, and a
    last layer for other classes starts afresh; both are said in a notice. The data set's own mean and spread
    normalize the images, also where the published weights were trained with ImageNet's.
    """
    from ptpipe_zoo import classifiers, nets, weights

    info = data.info
    arguments: dict[str, JSON] = {"name": config.name, "num_classes": info.num_classes}
    if config.weights and info.shape_CHW[0] == 3:
        arguments |= classifiers.published_input(config.name)
    part = FunctionRef.to(classifiers.classifier, shape_CHW=info.shape_CHW, **arguments)
    network = nets.initialised(part, ctx.seed)
    classifiers.check_images(config.name, network, info.shape_CHW, info.num_classes)
    file = _weights_file(config)
    if config.weights:
        file = weights.download(classifiers.published(config.name)[config.weights], ctx)
    if file is not None:
        for notice in weights.load_weights(network, weights.read_weights(file), info.num_classes, str(file)):
            ctx.notice(notice)
    return nets.captured(part, network, info, ctx)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Offer the networks."""
    return [mlp, small_cnn, torchvision]
