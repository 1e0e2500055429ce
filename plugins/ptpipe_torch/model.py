"""A model is a recipe and a tensor file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, IntegrityError
from ptpipe_torch.deployable import Deployable, Predictor
from ptpipe_torch.packing import pack_state, unpack_state
from ptpipe_torch.registry import Part
from ptpipe_torch.runtime import quantized_engine, torch_threads

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import nn

_RECIPE, _TENSORS, _PACKED = "recipe.json", "tensors.safetensors", "int8.safetensors"


@dataclass(frozen=True)
class Recipe:
    """How to rebuild a network around its tensors. All of it is JSON."""

    builder: Part
    input_shape_CHW: tuple[int, int, int]
    num_classes: int
    prepare: tuple[Part, ...] = ()
    """Transforms before the tensors are loaded: they add observers or fake quantization."""
    convert: tuple[Part, ...] = ()
    """Transforms after: they make it int8."""
    backend: str | None = None
    """The quantized engine that it was prepared for; None for a float model."""

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Inverse of `to_json`. Raises IntegrityError for anything else."""
        try:
            content: dict[str, Any] = json.loads(text)
            return cls(
                builder=Part(**content["builder"]),
                input_shape_CHW=tuple(content["input_shape_CHW"]),
                num_classes=content["num_classes"],
                prepare=tuple(Part(**part) for part in content["prepare"]),
                convert=tuple(Part(**part) for part in content["convert"]),
                backend=content["backend"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"not a model recipe: {error!r}") from error

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=1)


class Model(Deployable):
    """A torch classifier, float, prepared or int8: recipe and tensors. Immutable.

    `tensors` is the state dict that goes in between `prepare` and `convert`: float weights, observer and
    fake-quantization state. An int8 model also has `packed`: the int8 weights and scales alone, which is the
    file one would ship and what `build` loads.
    """

    def __init__(
        self,
        recipe: Recipe,
        tensors: Mapping[str, torch.Tensor] | Path,
        packed: Mapping[str, torch.Tensor] | Path | None = None,
    ) -> None:
        self.recipe = recipe
        self._tensors = tensors
        self._packed = packed

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """State dict between `prepare` and `convert`; on the CPU; not to be written to."""
        return _read(self._tensors)

    @cached_property
    def packed(self) -> Mapping[str, torch.Tensor] | None:
        """Flat int8 state of a converted model, None for others."""
        return None if self._packed is None else _read(self._packed)

    @classmethod
    def capture(cls, recipe: Recipe, module: nn.Module) -> Model:
        """The model that this module is, a copy of its state dict taken now."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
        return cls(recipe, state)

    def with_state_of(self, module: nn.Module) -> Model:
        """The same recipe with the module's present state: what training returns."""
        return Model.capture(self.recipe, module)

    def with_recipe(self, **changes: Any) -> Model:
        """The same tensors under a changed recipe."""
        return Model(replace(self.recipe, **changes), self._tensors)

    def build(self) -> nn.Module:
        """The network, on the CPU, in eval mode, bit-equal each time. Without `convert`: `build_prepared`."""
        if not self.recipe.convert:
            return self.build_prepared()
        module = self._skeleton().eval()
        if self.packed is None:
            module.load_state_dict(self.tensors)
        for part in self.recipe.convert:
            module = part.resolve("transform")(module, **part.arguments)
        if self.packed is not None:
            module.load_state_dict(unpack_state(self.packed))
        return module.eval()

    def build_prepared(self) -> nn.Module:
        """The network before `convert`, in eval mode: what is trained, calibrated and exported."""
        module = self._skeleton()
        module.load_state_dict(self.tensors)
        return module.eval()

    def _skeleton(self) -> nn.Module:
        import torch

        with torch.random.fork_rng(devices=[]):  # initial weights are overwritten: draw them from nobody's stream
            module = self.recipe.builder.resolve("builder")(**self.recipe.builder.arguments)
            for part in self.recipe.prepare:
                module = part.resolve("transform")(module, **part.arguments)
        return module

    def packed_by_converting(self) -> Model:
        """The same model with `packed` filled in: converted once from `tensors`, its int8 state taken."""
        module = Model(self.recipe, self._tensors).build()
        return Model(self.recipe, self._tensors, pack_state(module.state_dict()))

    @property
    def format(self) -> str:
        if not self.recipe.backend:
            return "torch float32"
        return f"torch {'int8' if self.recipe.convert else 'prepared'} {self.recipe.backend}"

    @property
    def input_shape_CHW(self) -> tuple[int, int, int]:  # noqa: N802
        return self.recipe.input_shape_CHW

    @property
    def num_classes(self) -> int:
        return self.recipe.num_classes

    @property
    def size_bytes(self) -> int:
        shipped = self._tensors if self._packed is None else self._packed
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
                logits_NK: npt.NDArray[np.float32] = module(torch.from_numpy(images_NCHW)).numpy()
                return logits_NK

            yield predict

    def save(self, folder: Path) -> None:
        (folder / _RECIPE).write_text(self.recipe.to_json(), encoding="utf-8")
        (folder / _TENSORS).write_bytes(_serialized(self.tensors))
        if self.packed is not None:
            (folder / _PACKED).write_bytes(_serialized(self.packed))

    @classmethod
    def load(cls, folder: Path) -> Self:
        packed = folder / _PACKED
        recipe = Recipe.from_json((folder / _RECIPE).read_text(encoding="utf-8"))
        return cls(recipe, folder / _TENSORS, packed if packed.exists() else None)

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes}


def _read(tensors: Mapping[str, torch.Tensor] | Path) -> Mapping[str, torch.Tensor]:
    if not isinstance(tensors, Path):
        return tensors
    from safetensors.torch import load_file

    return load_file(tensors)


def _serialized(tensors: Mapping[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    content: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return content
