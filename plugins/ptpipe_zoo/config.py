"""Options of the model.* stages."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, PositiveInt, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ptpipe import StageConfig
from ptpipe_torch import BATCH
from ptpipe_torch.model.axis_sizes import SYMBOL, names_of
from ptpipe_zoo import extras, names


class MlpConfig(StageConfig):
    """Options of `model.mlp`."""

    hidden: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = Field(
        (256, 128), max_length=32, description="size of each hidden layer; an empty list: a linear classifier"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of hidden activations")


class SmallCnnConfig(StageConfig):
    """Options of `model.small_cnn`."""

    width: int = Field(32, ge=1, le=1024, description="channels of the first convolution; the second has twice as many")


class SmallUNetConfig(StageConfig):
    """Options of `model.small_unet`."""

    width: int = Field(16, ge=1, le=1024, description="channels at half the resolution")
    depth: int = Field(2, ge=1, le=6, description="poolings; each halves the resolution and doubles the channels")


class TextTransformerConfig(StageConfig):
    """Options of `model.text_transformer`."""

    dim: int = Field(128, ge=1, le=65536, description="features of a token; a multiple of num_heads")
    num_layers: int = Field(2, ge=1, le=256, description="encoder layers")
    num_heads: int = Field(4, ge=1, le=1024, description="attention heads of each layer")
    feed_forward_dim: int | None = Field(
        None, ge=1, le=262144, description="hidden features of each feed-forward network; null: 4 x dim"
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout probability of embeddings and of each residual branch")
    pooling: Literal["mean", "first"] = Field(
        "mean",
        description="what represents a text: the mean over its tokens, or its first one; no meaning where each token "
        "has outputs",
    )
    causal: bool = Field(
        False,
        description="let each token attend to itself and those before it alone, as a language model must",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        if self.causal and self.pooling == "first":
            raise ValueError("pooling first would see a single token of a causal network: use pooling mean")
        return self


class TextLstmConfig(StageConfig):
    """Options of `model.text_lstm`."""

    dim: int = Field(128, ge=1, le=65536, description="features of a token")
    hidden_size: int = Field(128, ge=1, le=65536, description="features of the LSTM's state")
    num_layers: int = Field(1, ge=1, le=64, description="LSTM layers, each on the outputs of the one before")
    dropout: float = Field(
        0.1, ge=0, lt=1, description="dropout probability of embeddings, between layers and in front of the last one"
    )
    pooling: Literal["mean", "last"] = Field(
        "mean",
        description="what represents a text: the mean over its tokens, or its last one; no meaning where each token "
        "has outputs",
    )


WeightsEntry = Annotated[
    str | None,
    Field(min_length=1, description="the entry of weights_file to load, where several are state dicts: model_ema"),
]


class TorchvisionConfig(StageConfig):
    """Options of `model.torchvision`."""

    name: str = Field(
        description="the network: resnet18 or any other classifier of torchvision, or for segmentation "
        "lraspp_mobilenet_v3_large, deeplabv3_resnet50, fcn_resnet50 and others"
    )
    weights: str | None = Field(
        None, min_length=1, description="published weights to download: DEFAULT, or a name such as IMAGENET1K_V1"
    )
    weights_file: str | None = Field(
        None, min_length=1, description="local state dict to load: safetensors, or a file of torch.save"
    )
    weights_entry: WeightsEntry = None

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        known = (*names.classifier_names(), *names.segmenter_names())
        if known and name not in known:
            raise PydanticCustomError(
                "unknown_network",
                "must name one of torchvision's networks for classification or segmentation",
                {"expected": ", ".join(known)},
            )
        return name

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        _check_sources(self.weights, self.weights_file, self.weights_entry)
        return self


def _check_sources(weights: str | None, weights_file: str | None, weights_entry: str | None) -> None:
    if weights and weights_file:
        raise ValueError("give weights or weights_file, not both")
    if weights_entry and not weights_file:
        raise ValueError("weights_entry is an entry of weights_file, which is not given")


_ANY_JSON = {"type": ["boolean", "integer", "number", "string", "array", "object", "null"]}
TIMM_RESERVED = {"num_classes", "in_chans", "features_only", "out_indices"}
TIMM_RESERVED |= {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
TIMM_RESERVED |= {"scriptable", "exportable", "no_jit"}
"""What timm's `create_model` takes and `arguments` doesn't: the data set decides it, or it would load other files."""


class TimmConfig(StageConfig):
    """Options of `model.timm`."""

    name: str = Field(description="the network: resnet18, vit_tiny_patch16_224, or any other name that timm lists")
    arguments: dict[str, Annotated[JsonValue, WithJsonSchema(_ANY_JSON)]] = Field(
        {}, max_length=100, description="further arguments of the network, by name: drop_rate, drop_path_rate, img_size"
    )
    weights: str | None = Field(
        None,
        pattern=r"^\w[\w.-]*$",
        description="published weights to download: the part of their name behind the network's, such as a1_in1k",
    )
    weights_file: str | None = Field(
        None, min_length=1, description="local state dict to load: safetensors, or a file of torch.save"
    )
    weights_entry: WeightsEntry = None

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        known = extras.timm_names()
        if known and name not in known:
            expected = ", ".join(extras.longest_prefix_first(name, known))
            raise PydanticCustomError("unknown_network", "must name one of timm's networks", {"expected": expected})
        return name

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_sources(self.weights, self.weights_file, self.weights_entry)
        if reserved := sorted(TIMM_RESERVED & self.arguments.keys()):
            raise ValueError(f"arguments: {', '.join(reserved)} can't be given")
        return self


TRANSFORMERS_RESERVED = {"auto_map", "trust_remote_code", "quantization_config", "_name_or_path", "name_or_path"}
TRANSFORMERS_RESERVED |= {"attn_implementation", "_attn_implementation", "torch_dtype", "dtype", "architectures"}
TRANSFORMERS_RESERVED |= {"transformers_version"}
"""Entries of a `config.json` that are passed over: they name code, other files, or how to compute."""


class TransformersConfig(StageConfig):
    """Options of `model.transformers`."""

    config: dict[str, Annotated[JsonValue, WithJsonSchema(_ANY_JSON)]] = Field(
        {},
        max_length=200,
        description="a configuration, for random weights: {model_type: bert, hidden_size: 64, ...}; sizes of the data, "
        "such as vocab_size, may be left out",
    )
    folder: str | None = Field(
        None,
        min_length=1,
        description="a local folder with config.json and safetensors files, as save_pretrained writes it",
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if bool(self.config) == bool(self.folder):
            raise ValueError("give config or folder, one of them")
        if self.config and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type, such as bert")
        if reserved := sorted(TRANSFORMERS_RESERVED & self.config.keys()):
            raise ValueError(f"config: {', '.join(reserved)} can't be given")
        return self


class PythonModelConfig(StageConfig):
    """Options of `model.python`."""

    file: str = Field(min_length=1, description="a Python file, relative to the working directory")
    function: str = Field(
        pattern=r"^[^\W\d]\w*$", description="a function in it that returns a torch.nn.Module, or a class of one"
    )
    arguments: dict[str, Annotated[JsonValue, WithJsonSchema(_ANY_JSON)]] = Field(
        {}, max_length=100, description="what the function is called with, by name"
    )
    weights_file: str | None = Field(
        None,
        min_length=1,
        description="state dict to load, or a checkpoint with one: safetensors, or a file of torch.save",
    )
    weights_entry: WeightsEntry = None
    reads: tuple[str, ...] = Field(
        (),
        max_length=1000,
        description="files and folders that the function reads and that Python does not open, as for torch.jit.load: a "
        "change of one reruns the stage, as for a file that Python opens",
    )

    @model_validator(mode="after")
    def _has_the_file_of_its_entry(self) -> Self:
        _check_sources(None, self.weights_file, self.weights_entry)
        return self


class OnnxModelConfig(StageConfig):
    """Options of `model.onnx`."""

    file: str = Field(min_length=1, description="an .onnx file, relative to the working directory")
    inputs: dict[str, str] = Field(
        {},
        max_length=100,
        description="the data set's column for each input of the file, `x: images`; none: by name, or the only one",
    )
    outputs: dict[str, str] = Field(
        {},
        max_length=100,
        description="the task's output for each output of the file that counts, `y: logits`; none: by name, or the "
        "only one",
    )
    preprocessing: Literal["nhwc", "nchw"] | None = Field(
        None,
        description="what the file does before its network: it takes images as bytes, with channels as the last or the "
        "second axis, and normalizes them; null: what a file of `export.onnx` says of itself, else nothing",
    )

    @model_validator(mode="after")
    def _names_each_column_once(self) -> Self:
        for tensors in (self.inputs, self.outputs):
            if len({*tensors.values()}) < len(tensors):
                raise ValueError("inputs and outputs name each tensor once")
        return self


class DynamicShapesConfig(StageConfig):
    """Options of `model.dynamic_shapes`."""

    inputs: dict[str, tuple[PositiveInt | Annotated[str, Field(pattern=rf"^{SYMBOL}$")], ...]] = Field(
        min_length=1,
        max_length=100,
        description="the shape of a sample of each input, with a name for each axis of any size: {images: [3, height, "
        "width]}; where a network takes multiples alone, {images: [3, 32*height, 32*width]}",
    )

    @field_validator("inputs")
    @classmethod
    def _has_axes_of_any_size(cls, inputs: dict[str, tuple[int | str, ...]]) -> dict[str, tuple[int | str, ...]]:
        for name, shape in inputs.items():
            symbols = names_of(size for size in shape if isinstance(size, str))
            if not symbols:
                raise ValueError(f"{name}: [{', '.join(map(str, shape))}] has no name of an axis, such as height")
            if BATCH in symbols:
                raise ValueError(f"{name}: {BATCH} is the first axis, of any size already: leave it out")
        return inputs


class TorchModelConfig(StageConfig):
    """Options of `model.torch`."""

    folder: str = Field(min_length=1, description="a folder with recipe.json and tensors, as `ptpipe get` writes it")
    functions: tuple[Annotated[str, Field(pattern=r"^.+:[^\W\d]\w*$")], ...] = Field(
        (), max_length=100, description="functions of your own that it is built by, `mine.py:make_net`"
    )
