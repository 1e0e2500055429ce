"""A model is a recipe and a tensor file."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ptpipe import JSON, IntegrityError, PtpipeError, StageError
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.int8_state import unpack_state
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.model.registry import FunctionRef
from ptpipe_torch.runtime import torch_threads

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import nn

T = TypeVar("T")

_RECIPE, _TENSORS, _INT8_TENSORS = "recipe.json", "tensors.safetensors", "int8.safetensors"


@dataclass(frozen=True)
class Recipe:
    """How to rebuild a network around its tensors. All of it is JSON."""

    builder: FunctionRef
    input_shape_CHW: tuple[int, int, int]
    num_classes: int
    prepare: tuple[FunctionRef, ...] = ()
    """Transforms before the tensors are loaded: they add reporters or fake quantization."""
    convert: tuple[FunctionRef, ...] = ()
    """Transforms after: they make it int8."""
    backend: str | None = None
    """The quantized engine that it was prepared for; None for a float model."""

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Inverse of `to_json`. Raises IntegrityError for anything else."""
        try:
            content = _typed(json.loads(text), dict)
            channels, height, width = (_typed(size, int) for size in _typed(content["input_shape_CHW"], list))
            return cls(
                builder=_function_ref(content["builder"]),
                input_shape_CHW=(channels, height, width),
                num_classes=_typed(content["num_classes"], int),
                prepare=tuple(_function_ref(part) for part in _typed(content["prepare"], list)),
                convert=tuple(_function_ref(part) for part in _typed(content["convert"], list)),
                backend=None if content["backend"] is None else _typed(content["backend"], str),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise IntegrityError(f"not a model recipe: {error!r}") from error

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=1)


class Model(Deployable):
    """A torch classifier, float, prepared or int8: recipe and tensors. Immutable.

    `tensors` is the state dict that goes in between `prepare` and `convert`: float weights, observer and
    fake-quantization state. An int8 model also has `int8_tensors`: the int8 weights and scales alone, which is the
    file one would ship and what `build` loads.
    """

    def __init__(
        self,
        recipe: Recipe,
        tensors: Mapping[str, torch.Tensor] | Path,
        int8_tensors: Mapping[str, torch.Tensor] | Path | None = None,
    ) -> None:
        self.recipe = recipe
        self._tensors = tensors
        self._int8_tensors = int8_tensors

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """State dict between `prepare` and `convert`; on the CPU; not to be written to."""
        return _read(self._tensors)

    @cached_property
    def int8_tensors(self) -> Mapping[str, torch.Tensor] | None:
        """Flat int8 state of a converted model, None for others."""
        return None if self._int8_tensors is None else _read(self._int8_tensors)

    @classmethod
    def from_module(cls, recipe: Recipe, module: nn.Module) -> Model:
        """The model that this module is, a copy of its state dict taken now.

        Raises StageError where the state dict holds anything but tensors.
        """
        state = module.state_dict()
        for name, value in state.items():
            if not hasattr(value, "detach"):
                raise StageError(
                    f"the network keeps {name} ({type(value).__name__}) in its state; only tensors can be stored"
                )
        return cls(recipe, {name: tensor.detach().cpu().clone() for name, tensor in state.items()})

    def with_state_dict_of(self, module: nn.Module) -> Model:
        """The same recipe with the module's present state: what training returns."""
        return Model.from_module(self.recipe, module)

    def with_recipe(self, **changes: Any) -> Model:
        """The same tensors under a changed recipe."""
        return Model(replace(self.recipe, **changes), self._tensors)

    def build(self) -> nn.Module:
        """The network, on the CPU, in eval mode, bit-equal each time. Without `convert`: `build_prepared`.

        An int8 network runs on the engine that it was prepared for: call it inside `quantized_engine(recipe.backend)`.
        Raises StageError where this machine lacks that engine, IntegrityError where recipe and tensors don't fit.
        """
        if not self.recipe.convert:
            return self.build_prepared()
        with quantized_engine(self.recipe.backend), deprecations_silenced():
            module = self.build_prepared() if self.int8_tensors is None else self._skeleton().eval()
            for part in self.recipe.convert:
                module = _apply(part, "transform", module)
            if self.int8_tensors is not None:
                _load(module, unpack_state(self.int8_tensors, module.state_dict()))
        return module.eval()

    def build_prepared(self) -> nn.Module:
        """The network before `convert`, in eval mode: what is trained, calibrated and exported."""
        module = self._skeleton()
        _load(module, self.tensors)
        return module.eval()

    def _skeleton(self) -> nn.Module:
        import torch

        with torch.random.fork_rng(devices=[]):  # initial weights are overwritten: draw them from nobody's stream
            module = _apply(self.recipe.builder, "builder")
            for part in self.recipe.prepare:
                module = _apply(part, "transform", module)
        return module

    @property
    def format(self) -> str:
        if not self.recipe.backend:
            return "torch float32"
        if not self.recipe.convert:
            return f"torch prepared {self.recipe.backend}"
        return f"torch int8{'' if self.recipe.prepare else ' dynamic'} {self.recipe.backend}"

    @property
    def input_shape_CHW(self) -> tuple[int, int, int]:  # noqa: N802
        return self.recipe.input_shape_CHW

    @property
    def num_classes(self) -> int:
        return self.recipe.num_classes

    @property
    def size_bytes(self) -> int:
        shipped = self._tensors if self._int8_tensors is None else self._int8_tensors
        return shipped.stat().st_size if isinstance(shipped, Path) else len(_serialized(shipped))

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        import torch

        backend = self.recipe.backend if self.recipe.convert else None
        with torch_threads(num_threads), quantized_engine(backend), torch.inference_mode():
            module = self.build()
            if backend is None:
                module = module.to(memory_format=torch.channels_last)

            def predict(images_NCHW: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
                writable = images_NCHW if images_NCHW.flags.writeable else images_NCHW.copy()  # torch knows no other
                logits_NK: npt.NDArray[np.float32] = module(torch.from_numpy(writable)).numpy()
                return logits_NK

            yield predict

    def save(self, folder: Path) -> None:
        (folder / _RECIPE).write_text(self.recipe.to_json(), encoding="utf-8")
        (folder / _TENSORS).write_bytes(_serialized(self.tensors))
        if self.int8_tensors is not None:
            (folder / _INT8_TENSORS).write_bytes(_serialized(self.int8_tensors))

    @classmethod
    def load(cls, folder: Path) -> Self:
        int8_tensors = folder / _INT8_TENSORS
        try:
            recipe = Recipe.from_json((folder / _RECIPE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{_RECIPE} can't be read: {error}") from error
        return cls(recipe, folder / _TENSORS, int8_tensors if int8_tensors.exists() else None)

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes}


def _apply(part: FunctionRef, role: str, *module: nn.Module) -> nn.Module:
    function = part.resolve(role)
    try:
        return function(*module, **part.arguments)
    except PtpipeError:
        raise
    except Exception as error:  # it worked when the recipe was written, so recipe or code is another now
        raise IntegrityError(f"{part.address} can't be applied as the recipe says: {error!r}") from error


def _load(module: nn.Module, state: Mapping[str, Any]) -> None:
    # Copies: reporters take a loaded tensor for their own, and would write into the stored one.
    present = OrderedDict((name, value.clone() if hasattr(value, "clone") else value) for name, value in state.items())
    # Some layers refuse a state dict that does not tell the version of their format: it is that of this code.
    present._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]  # where torch looks for it
    try:
        module.load_state_dict(present)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise IntegrityError(f"the tensors don't fit the network: {reason}") from error


def _typed(value: object, type_: type[T]) -> T:
    if type(value) is not type_:
        raise TypeError(f"{value!r} is not {type_.__name__}")
    return value


def _function_ref(content: object) -> FunctionRef:
    fields = _typed(content, dict)
    return FunctionRef(_typed(fields["address"], str), _typed(fields["arguments"], dict))


def _read(tensors: Mapping[str, torch.Tensor] | Path) -> Mapping[str, torch.Tensor]:
    if not isinstance(tensors, Path):
        return tensors
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        content: dict[str, torch.Tensor] = load_file(tensors)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{tensors.name} can't be read: {error}") from error
    return content


def _serialized(tensors: Mapping[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    content: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return content
