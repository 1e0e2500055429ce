"""Builders of the MLPs and the small CNN, and seeded construction of any network.

Every nonlinearity is a module, so that FX quantization can fuse it with the preceding layer.
Shape legend: B samples; C channels, H height, W width of an image; K classes; F numeric, D categorical columns of a
table; T outputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_torch import DatasetInfo, FunctionRef, Model, Recipe, Signature, builder

if TYPE_CHECKING:
    from ptpipe_zoo.config import MlpConfig


def image_classifier_sizes(kind: str, info: DatasetInfo) -> tuple[tuple[int, int, int], int]:
    """Return the shape (C, H, W) of an image, and K. Raises StageError for data that is not images and their classes.

    `kind`: of the stage, for errors.
    """
    match info.signature.inputs, info.signature.outputs:
        case (image,), (logits,):
            match image.sample_shape, logits.sample_shape:
                case (int(channels), int(height), int(width)), (int(num_classes),):
                    return (channels, height, width), num_classes
    raise StageError(f"{kind} takes images and returns a number for each class; {info.name} has {info.signature}")


@builder
def mlp(
    *,
    shape_CHW: Sequence[int],
    num_classes: int,
    hidden: Sequence[int],
    dropout: float,
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Sequential:
    """Build fully connected layers with ReLU, and dropout unless it is 0, on the flattened image.

    `scale`, `shift`: of each output, from units of a standard deviation to those of the target; empty: none.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    channels, height, width = shape_CHW
    size = channels * height * width
    for next_size in hidden:
        layers += [nn.Linear(size, next_size), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        size = next_size
    return nn.Sequential(*layers, nn.Linear(size, num_classes), *([Rescale(scale, shift)] if scale else []))


@builder
def table_mlp(  # noqa: PLR0913  # by keyword: the arguments of a recipe
    *,
    num_numbers: int,
    vocabulary_sizes: Sequence[int],
    num_outputs: int,
    hidden: Sequence[int],
    dropout: float,
    scale: Sequence[float],
    shift: Sequence[float],
) -> nn.Module:
    """Build an `mlp` on numbers (B, F), embedded categories (B, D), or both."""
    # Number 0 is of values that train does not have: no vector rather than a random one.
    embeddings = [nn.Embedding(size, _embedding_size(size), padding_idx=0) for size in vocabulary_sizes]
    size = num_numbers + sum(embedding.embedding_dim for embedding in embeddings)
    layers = mlp(
        shape_CHW=(1, 1, size), num_classes=num_outputs, hidden=hidden, dropout=dropout, scale=scale, shift=shift
    )
    if not embeddings:
        return layers
    return MixedMlp(embeddings, layers) if num_numbers else CategoricalMlp(embeddings, layers)


class Rescale(nn.Module):
    """Outputs times a scale, plus a shift: from units of a standard deviation to those of the targets.

    `num_axes`: of a target's positions: 2, height and width, for maps.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, scale: Sequence[float], shift: Sequence[float], num_axes: int = 0) -> None:
        super().__init__()
        for name, numbers_T in (("scale", scale), ("shift", shift)):
            self.register_buffer(name, torch.tensor(numbers_T, dtype=torch.float32).view(-1, *(1,) * num_axes))

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, (B, T, ...), in units of the targets, of the same shape."""
        return outputs * self.scale + self.shift


class Rescaled(nn.Sequential):
    """`network`, followed by `Rescale` with `scale`, `shift` and `num_axes`."""

    def __init__(self, network: nn.Module, scale: Sequence[float], shift: Sequence[float], num_axes: int = 0) -> None:
        super().__init__(OrderedDict(network=network, rescale=Rescale(scale, shift, num_axes)))


def unscaled(network: nn.Module) -> nn.Module:
    """Return the network that a `Rescaled` has, whose weights are published; another one as it is."""
    return network.get_submodule("network") if isinstance(network, Rescaled) else network


def with_units(
    builder_ref: FunctionRef, module: nn.Module, units: Mapping[str, Sequence[float]] | None
) -> tuple[FunctionRef, nn.Module]:
    """Return what builds a `Rescaled` network with the `scale` and `shift` of its weights, and that network.

    `units`: what `weights.units_of` returns. Any other network stays as it is.
    """
    if units is None or not isinstance(module, Rescaled):
        return builder_ref, module
    arguments: dict[str, Any] = {**builder_ref.arguments, "scale": [], "shift": [], **units}
    for name, numbers_T in units.items():
        buffer = module.get_submodule("rescale").get_buffer(name)
        buffer.copy_(torch.tensor(numbers_T).view_as(buffer))
    return FunctionRef(builder_ref.address, arguments), module if units else unscaled(module)


def rescaling(info: DatasetInfo) -> dict[str, Any]:
    """Return the arguments `scale` and `shift` of builders; none where outputs have no units."""
    task = info.task
    return {"scale": task.output_scale, "shift": task.output_shift} if task.output_scale else {}


class CategoricalMlp(nn.Module):
    """Layers on embedded categories."""

    def __init__(self, embeddings: Sequence[nn.Embedding], layers: nn.Module) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(embeddings)
        self.layers = layers

    def forward(self, categories_BD: torch.Tensor) -> torch.Tensor:
        """`categories_BD`: int64."""
        outputs: torch.Tensor = self.layers(torch.cat(_embedded(self.embeddings, categories_BD), 1))
        return outputs


class MixedMlp(nn.Module):
    """Layers on numbers and embedded categories."""

    def __init__(self, embeddings: Sequence[nn.Embedding], layers: nn.Module) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(embeddings)
        self.layers = layers

    def forward(self, numbers_BF: torch.Tensor, categories_BD: torch.Tensor) -> torch.Tensor:
        """`numbers_BF`: float32; `categories_BD`: int64."""
        outputs: torch.Tensor = self.layers(torch.cat([numbers_BF, *_embedded(self.embeddings, categories_BD)], 1))
        return outputs


def _embedded(embeddings: Iterable[nn.Module], categories_BD: torch.Tensor) -> list[torch.Tensor]:
    return [embedding(categories_BD[:, number]) for number, embedding in enumerate(embeddings)]


def _embedding_size(vocabulary_size: int) -> int:
    return min(32, (vocabulary_size + 1) // 2)


@builder
def small_cnn(
    *,
    shape_CHW: Sequence[int],
    num_classes: int,
    width: int,
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Sequential:
    """Build two blocks (3x3 convolution, batch norm, ReLU, 2x2 max pooling) and two linear layers.

    `scale`, `shift`: as in `mlp`. Raises StageError for images below 4x4: pooling twice would leave nothing.
    """
    channels, height, image_width = shape_CHW
    if min(height, image_width) < 4:
        raise StageError(f"model.small_cnn needs images of at least 4x4 pixels, not {height}x{image_width}")
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (image_width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
        *([Rescale(scale, shift)] if scale else []),
    )


def mlp_ref(config: MlpConfig, info: DatasetInfo) -> FunctionRef:
    """Return the builder of an MLP for the data set. Raises StageError where it is neither of images nor a table."""
    signature = info.signature
    rescaling = {"scale": info.task.output_scale, "shift": info.task.output_shift}
    options = {"hidden": config.hidden, "dropout": config.dropout, **rescaling}
    if all(spec.dtype == "float32" and len(spec.shape) == 4 for spec in signature.inputs):
        shape_CHW, num_classes = image_classifier_sizes("model.mlp", info)
        return FunctionRef.to(mlp, shape_CHW=shape_CHW, num_classes=num_classes, **options)
    num_numbers, vocabulary_sizes, num_outputs = _table_sizes(info)
    return FunctionRef.to(
        table_mlp,
        num_numbers=num_numbers,
        vocabulary_sizes=vocabulary_sizes,
        num_outputs=num_outputs,
        **options,
    )


def _table_sizes(info: DatasetInfo) -> tuple[int, tuple[int, ...], int]:
    """Return F, the vocabulary size of each categorical column, and T. Raises StageError for anything but a table."""
    signature = info.signature
    vocabularies = [info.inputs[spec.name].vocabulary_sizes for spec in signature.inputs]
    inputs = [(spec.dtype, *spec.sample_shape) for spec in signature.inputs]
    match inputs, [spec.sample_shape for spec in signature.outputs]:
        case [("float32", int(num_numbers))], [(int(num_outputs),)]:
            return num_numbers, (), num_outputs
        case [("int64", size)], [(int(num_outputs),)] if size == len(vocabularies[0]):
            return 0, vocabularies[0], num_outputs
        case [("float32", int(num_numbers)), ("int64", size)], [(int(num_outputs),)] if size == len(vocabularies[1]):
            return num_numbers, vocabularies[1], num_outputs
    raise StageError(f"model.mlp takes an image, or a row of a table; {info.name} has {signature}")


def build_seeded(builder_ref: FunctionRef, seed: int) -> nn.Module:
    """Build the network with initial weights that depend on the seed alone, without touching torch's global RNG."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return builder_ref.resolve("builder")(**builder_ref.arguments)


def make_model(builder_ref: FunctionRef, network: nn.Module, info: DatasetInfo, ctx: Context) -> Model:
    """Return a Model with the weights of `network`, which `builder_ref` built; record its number of parameters."""
    return with_signature(builder_ref, network, info.signature, ctx)


def with_signature(builder_ref: FunctionRef, network: nn.Module, signature: Signature, ctx: Context) -> Model:
    """Return a Model as `make_model`, with outputs that the data set doesn't say."""
    ctx.metric(num_parameters=sum(parameter.numel() for parameter in network.parameters()))
    return Model.from_module(Recipe(builder_ref, signature), network)
