"""Networks of the library transformers, from a configuration or a local folder. Nothing is downloaded, no code is run.

Shape legend: B samples, L tokens of a text, C channels, H height, W width of an image.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Proxy

from ptpipe import JSON, Context, StageError, nearest
from ptpipe_torch import Data, DatasetInfo, FunctionRef, Model, TokensInfo, builder
from ptpipe_torch.errors import first_line
from ptpipe_torch.runtime import seeded
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_zoo import extras, nets
from ptpipe_zoo.config import TRANSFORMERS_RESERVED
from ptpipe_zoo.hf_folder import check_vocabulary, read_json
from ptpipe_zoo.nets import Rescale
from ptpipe_zoo.text_nets import TextSizes, attention_bias
from ptpipe_zoo.weights import refuse_not_finite

if TYPE_CHECKING:
    from ptpipe_zoo.config import TransformersConfig

_HEADS = {
    "text": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "next_token": "AutoModelForCausalLM",
    "image": "AutoModelForImageClassification",
}
"""The classes of networks, by what each number of their output is for: a class of a text, of a token, ..."""
_MAX_DIFFERENCE = 1e-4
"""Between the outputs of a network whose inputs are given in two equal forms, which differ by rounding."""
_FORMS = ("positions", "types", "bias", "causal_bias")


@cache
def transformers() -> ModuleType:
    """Import and return transformers, silenced. Raises StageError where it is not installed."""
    if (reason := extras.missing_extra("transformers")) is not None:
        raise StageError(reason)
    torchvision()  # transformers imports it where it finds it, which fails beside a CPU build of torch
    module = importlib.import_module("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


@builder
def transformers_network(  # noqa: PLR0913  # by keyword: the arguments of a recipe
    *,
    head: str,
    config: Mapping[str, JSON],
    padding_id: int = 0,
    length: object = None,
    form: Sequence[str] = (),
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Module:
    """Build a network with random weights that returns the logits alone.

    Args:
        head: of `_HEADS`.
        config: as in a `config.json`.
        padding_id: of the token ids.
        length: not used; former recipes have it.
        form: of `_FORMS`: which inputs are computed from the ids instead of by the network, and how.
        scale: of each output, to the units of a regression's targets; empty: none.
        shift: added after it.

    Raises StageError for a configuration that transformers has no network for.
    """
    network = _make(head, config)
    rescale = Rescale(scale, shift) if scale else None
    if head == "image":
        return ImageNetwork(network, rescale)
    return TokenNetwork(network, TokenInputs(padding_id, tuple(form)), rescale)


class ImageNetwork(nn.Module):
    """A network that gets images."""

    def __init__(self, network: nn.Module, rescale: nn.Module | None) -> None:
        super().__init__()
        self.network, self.rescale = network, rescale

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 (B, K)."""
        logits_BK: torch.Tensor = self.network(pixel_values=images_BCHW, return_dict=False)[0]
        return logits_BK if self.rescale is None else self.rescale(logits_BK)


@dataclass(frozen=True)
class TokenInputs:
    """What a network gets beside token ids: the mask of the padding that is found in them.

    Where `form` says so, also positions, token types and a mask of four axes: what the network would compute itself,
    in ways that depend on a buffer's length and can't be exported for a length that is a symbol.
    """

    padding_id: int
    form: tuple[str, ...]

    def mask(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Return 1 for tokens, int64 (B, L), or what is added to scores, float32 (B, 1, 1, L) or (B, 1, L, L)."""
        if "bias" in self.form:
            return attention_bias(tokens_BL == self.padding_id)
        if "causal_bias" in self.form:  # no token of a text is behind padding: what hides the future hides padding
            number_BL = _numbers(tokens_BL)
            is_hidden_BLL = number_BL.unsqueeze(1) > number_BL.unsqueeze(2)
            return attention_bias(is_hidden_BLL).squeeze(1)
        return (tokens_BL != self.padding_id).long()

    def others(self, tokens_BL: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return further inputs by name, int64 (B, L)."""
        inputs = {}
        if "positions" in self.form:
            inputs["position_ids"] = _numbers(tokens_BL) - 1
        if "types" in self.form:
            inputs["token_type_ids"] = torch.zeros_like(tokens_BL)
        return inputs


class TokenNetwork(nn.Module):
    """A network that gets token ids."""

    def __init__(self, network: nn.Module, inputs: TokenInputs, rescale: nn.Module | None) -> None:
        super().__init__()
        self.network, self.inputs, self.rescale = network, inputs, rescale

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, K), or (B, L, K) for a network with outputs for each token. `tokens_BL`: int64."""
        mask, others = self.inputs.mask(tokens_BL), self.inputs.others(tokens_BL)
        given: Any = tokens_BL
        if isinstance(given, Proxy) or torch.compiler.is_exporting():
            # Of a mixture of experts: the default is for devices, and has no ONNX form.
            config: Any = self.network.config
            config._experts_implementation = "batched_mm"
        outputs: torch.Tensor = self.network(input_ids=tokens_BL, attention_mask=mask, return_dict=False, **others)[0]
        return outputs if self.rescale is None else self.rescale(outputs)


def build_model(config: TransformersConfig, ctx: Context, data: Data) -> Model:
    """Implement `model.transformers`."""
    folder = Path(config.folder).expanduser() if config.folder else None
    content = dict(config.config) if folder is None else read_json(folder / "config.json")
    if folder is not None and isinstance(tokens := next(iter(data.info.inputs.values())), TokensInfo):
        check_vocabulary(folder, content, tokens, data)
    arguments = _arguments(content, data.info)
    arguments["config"] = _full_config(_configuration(arguments["config"]))
    reference = FunctionRef.to(transformers_network, **arguments)
    with _one_line_errors("this configuration"):
        network = nets.build_seeded(reference, ctx.seed)
    has_all = folder is not None and _load(network.get_submodule("network"), arguments, folder, ctx)
    if has_all and arguments.get("scale"):
        arguments = {name: value for name, value in arguments.items() if name not in ("scale", "shift")}
        network.register_module("rescale", None)  # its last layer was trained in the targets' own units
        reference = FunctionRef.to(transformers_network, **arguments)
    if isinstance(network, TokenNetwork):
        with _one_line_errors(f"texts of {_tokens(data.info).max_length} tokens"):
            form = _fitting_form(network, data.info)
        reference = FunctionRef.to(transformers_network, **arguments, form=form)
    return nets.make_model(reference, network, data.info, ctx)


def _numbers(tokens_BL: torch.Tensor) -> torch.Tensor:
    """Return 1, 2, ... in each row: a range of L numbers can't be traced where L is a symbol."""
    return torch.cumsum(torch.ones_like(tokens_BL), 1)


def _arguments(content: Mapping[str, JSON], info: DatasetInfo) -> dict[str, Any]:
    """Return the builder's arguments for a configuration, with the data set's sizes."""
    # Names of a folder's own labels: some versions take their number for that of the outputs.
    content = {name: value for name, value in content.items() if name not in ("id2label", "label2id")}
    if not any(isinstance(column, TokensInfo) for column in info.inputs.values()):
        (channels, *sides), num_classes = nets.image_classifier_sizes("model.transformers", info)
        size = sides[0] if sides[0] == sides[1] and not _takes_two_sides(content) else sides
        own: dict[str, Any] = {"num_channels": channels, "image_size": size, "num_labels": num_classes}
        return {"head": "image", "config": {**content, **own}, **nets.rescaling(info)}
    sizes = TextSizes.of("model.transformers", info)
    given = content.get("vocab_size", sizes.vocabulary_size)
    is_enough = isinstance(given, int) and given >= sizes.vocabulary_size
    if not is_enough or (sizes.is_language_model and given != sizes.num_outputs):
        raise StageError(
            f"vocab_size is {given}, but the data's tokenizer has {sizes.vocabulary_size} tokens: leave it out, or "
            "give data.text the tokenizer of the network"
        )
    own = {"vocab_size": given, "pad_token_id": sizes.padding_id, "use_cache": False}
    if not sizes.is_language_model:
        own["num_labels"] = sizes.num_outputs
    head = "next_token" if sizes.is_language_model else "tokens" if sizes.per_token else "text"
    options: dict[str, Any] = {"padding_id": sizes.padding_id}
    options |= {"scale": sizes.scale, "shift": sizes.shift}
    return {"head": head, "config": {**content, **own}, **options}


def _takes_two_sides(content: Mapping[str, JSON]) -> bool:
    """Return whether the image size of this type of network is a list by default."""
    model_type = content.get("model_type")
    if model_type not in list(transformers().CONFIG_MAPPING):
        return False
    with _one_line_errors("this configuration"):
        default = transformers().AutoConfig.for_model(model_type)
    return isinstance(getattr(default, "image_size", None), list | tuple)


def _configuration(content: Mapping[str, Any]) -> Any:
    """Return a configuration object. Raises StageError for an unknown `model_type`."""
    known = list(transformers().CONFIG_MAPPING)
    model_type = content.get("model_type")
    if model_type not in known:
        suggestion = nearest(str(model_type), extras.longest_prefix_first(str(model_type), known))
        hint = f" (did you mean {suggestion!r}?)" if suggestion else ""
        raise StageError(f"transformers {transformers().__version__} has no model_type {model_type!r}{hint}")
    options = {name: value for name, value in content.items() if name not in {"model_type", *TRANSFORMERS_RESERVED}}
    with _one_line_errors("this configuration"):
        return transformers().AutoConfig.for_model(model_type, **options)


def _full_config(configuration: Any) -> dict[str, JSON]:
    """Return a configuration with the defaults of the installed version: a later one may have others."""
    content: dict[str, JSON] = json.loads(configuration.to_json_string(use_diff=False))
    return {name: value for name, value in content.items() if name not in TRANSFORMERS_RESERVED}


def _make(head: str, config: Mapping[str, JSON]) -> nn.Module:
    if head not in _HEADS:
        raise StageError(f"{head!r} is no head of a network of transformers")
    configuration = _configuration(config)
    configuration.architectures = configuration.architectures or []  # some versions iterate over it
    with _offline():
        network: nn.Module = getattr(transformers(), _HEADS[head]).from_config(
            configuration, attn_implementation="eager", dtype=torch.float32
        )
    _use_linear_layers(network)
    return network


def _use_linear_layers(network: nn.Module) -> None:
    """Replace GPT-2's `Conv1D`, a linear layer with a transposed weight, which quantization does not know, in place."""
    for name, layer in list(network.named_modules()):
        if type(layer) is transformers().pytorch_utils.Conv1D:
            linear = nn.Linear(layer.nx, layer.nf, device="meta")
            linear.weight = nn.Parameter(layer.weight.detach().T.contiguous())
            linear.bias = layer.bias
            network.set_submodule(name, linear)


def _load(network: nn.Module, arguments: Mapping[str, Any], folder: Path, ctx: Context) -> bool:
    """Copy the weights of a folder's safetensors files into the network, in place; return whether it has all."""
    with _one_line_errors(f"the weights in {folder}"), _offline(), seeded(ctx.seed):
        loaded, found = getattr(transformers(), _HEADS[arguments["head"]]).from_pretrained(
            folder,
            config=_configuration(arguments["config"]),
            attn_implementation="eager",
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _use_linear_layers(loaded)
    network.load_state_dict(loaded.state_dict())
    refuse_not_finite(network, str(folder))
    others = {entry[0] if isinstance(entry, tuple) else entry for entry in found["mismatched_keys"]}
    fresh = sorted({*found["missing_keys"], *others})
    base = f"{getattr(network, 'base_model_prefix', '')}."
    if wrong := [name for name in fresh if name.startswith(base)]:
        raise StageError(f"{folder} has no weights that fit {', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}")
    if fresh:
        ctx.notice(f"{folder} has no weights for {', '.join(fresh[:5])}: they are initialized")
    return not fresh


def _fitting_form(network: TokenNetwork, info: DatasetInfo) -> tuple[str, ...]:
    """Return the forms of inputs in which the network computes the same; tried on texts of the maximum length."""
    tokens = _tokens(info)
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(tokens.vocabulary_size, (2, tokens.max_length), generator=generator)
    tokens_BL[tokens_BL == tokens.padding_id] = (tokens.padding_id + 1) % tokens.vocabulary_size
    tokens_BL[1, (tokens.max_length + 1) // 2 :] = tokens.padding_id
    expected = _counting(network, tokens_BL)
    for form in _FORMS:
        plain = network.inputs
        if form == "causal_bias" and "bias" in plain.form:
            continue
        network.inputs = replace(plain, form=(*plain.form, form))
        try:
            found = _counting(network, tokens_BL)
        except Exception:  # noqa: BLE001  # a network without this input raises anything
            network.inputs = plain
            continue
        if found.shape != expected.shape or (found - expected).abs().max() > _MAX_DIFFERENCE:
            network.inputs = plain
    return network.inputs.form


def _counting(network: TokenNetwork, tokens_BL: torch.Tensor) -> torch.Tensor:
    """Return the outputs in eval mode, of texts or of tokens; those of padding count for nothing."""
    with torch.no_grad():
        outputs: torch.Tensor = network.eval()(tokens_BL)
    return outputs[tokens_BL != network.inputs.padding_id] if outputs.dim() == 3 else outputs


def _tokens(info: DatasetInfo) -> TokensInfo:
    return next(column for column in info.inputs.values() if isinstance(column, TokensInfo))


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the Hub's client from its network: a configuration may name further repositories."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Convert any error of transformers into a StageError of one line."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:  # hundreds of networks: each may raise anything
        reason = first_line(error)
        raise StageError(f"transformers has no network for {what}: {reason}") from error
