"""A torch model as an artifact: a recipe that rebuilds the network, and safetensors files of its state."""

from __future__ import annotations

import inspect
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, IntegrityError, PtpipeError, StageError
from ptpipe_torch.files import NotAFileError, open_regular
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.int8_state import unpack_state
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.model.function_ref import FunctionRef
from ptpipe_torch.model.recipe import Recipe
from ptpipe_torch.model.signature import Signature
from ptpipe_torch.runtime import (
    freed_memory_kept,
    large_blocks_mapped,
    released_memory,
    torch_threads,
    warnings_silenced,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import nn

_RECIPE, _TENSORS, _INT8_TENSORS = "recipe.json", "tensors.safetensors", "int8.safetensors"
_SPARE_VALUES = 100_000_000
"""How many values a builder may allocate beyond those stored: a head of the network that it replaces."""
_TENSOR_VALUES = 10_000
"""What a tensor counts beside its values: a million layers of one value take memory too."""


class Model(Deployable):
    """A torch network, float, prepared or int8: recipe and tensors. Immutable.

    `tensors`: the state dict that is loaded between `prepare` and `convert` (float weights, observer and
    fake-quantization state). An int8 model also has `int8_tensors`: the int8 weights and scales alone, which is the
    file one would ship and what `build` loads. Both as a mapping, or as the path of a safetensors file. Where an int8
    model was shipped, there is no file of `tensors`.
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
        self._saved_bytes: int | None = None

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The state dict between `prepare` and `convert`, on the CPU; must not be written to.

        A stored model maps it from its file at each access, so that the model itself holds no memory. Raises StageError
        for an int8 model that was shipped.
        """
        if isinstance(self._tensors, Path) and self._int8_tensors is not None and not self._tensors.exists():
            raise StageError(
                "this needs the float weights that an int8 model was made from; one that was delivered comes without: "
                "name the stage that converted it, in the manifest of its run"
            )
        return _read(self._tensors)

    @property
    def int8_tensors(self) -> Mapping[str, torch.Tensor] | None:
        """The flat int8 state of a converted model (see `int8_state`), None for others."""
        return None if self._int8_tensors is None else _read(self._int8_tensors)

    @classmethod
    def from_module(cls, recipe: Recipe, module: nn.Module) -> Model:
        """Return a model of this network, with a copy of its present state dict.

        `recipe`: one that rebuilds the architecture of `module`.

        Raises StageError where the state dict holds anything but tensors.
        """
        import torch

        state = module.state_dict()
        for name, value in state.items():
            if not hasattr(value, "detach"):
                raise StageError(
                    f"the network keeps {name} ({type(value).__name__}) in its state; only tensors can be stored"
                )
        # In the layout of the file: `save` would have to copy a channels-last weight once more.
        layout = torch.contiguous_format
        return cls(recipe, {name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in state.items()})

    def with_state_dict_of(self, module: nn.Module) -> Model:
        """Return the same recipe with a copy of the module's present state dict: the result of training."""
        return Model.from_module(self.recipe, module)

    def with_recipe(self, **changes: Any) -> Model:
        """Return the same tensors under a recipe whose fields `changes` replaces; an int8 state is dropped."""
        return Model(replace(self.recipe, **changes), self._tensors)

    def with_source_functions(self, functions: Sequence[str]) -> Model:
        builder = replace(self.recipe.builder, source_functions=tuple(functions))
        return Model(replace(self.recipe, builder=builder), self._tensors, self._int8_tensors)

    def build(self) -> nn.Module:
        """Build the network, on the CPU, in eval mode, bit-equal each time. Without `convert`: `build_prepared`.

        An int8 network runs on the engine that it was prepared for: call it inside `quantized_engine(recipe.backend)`.
        Raises StageError where that engine is missing here, IntegrityError where recipe and tensors don't match.
        """
        if not self.recipe.convert:
            return self.build_prepared()
        with released_memory():
            return self._converted(self.build_prepared() if self.int8_tensors is None else self._skeleton())

    def _converted(self, module: nn.Module) -> nn.Module:
        """Return the int8 form of a network before `convert`, which is consumed."""
        int8_tensors = self.int8_tensors
        with quantized_engine(self.recipe.backend), deprecations_silenced():
            module = module.eval()
            for reference in self.recipe.convert:
                module = _apply(reference, "transform", module)
            if int8_tensors is not None:
                _load(module, unpack_state(int8_tensors, module.state_dict()))
        return module.eval()

    def build_prepared(self) -> nn.Module:
        """Build the network before `convert`, in eval mode: the one to train, calibrate or export."""
        with released_memory():
            module = self._skeleton()
            _load(module, self.tensors)
        return module.eval()

    def _skeleton(self) -> nn.Module:
        import torch

        from ptpipe_torch.initial_weights import built_undrawn
        from ptpipe_torch.model.skeletons import skeleton

        max_values = _SPARE_VALUES + 4 * _num_bytes(self._int8_tensors or self._tensors)

        def initial() -> nn.Module:
            # What its code warns of, or logs, was shown when it was built for the first time.
            with _limited_values(max_values), warnings_silenced():
                return _apply(self.recipe.builder, "builder")

        def build() -> nn.Module:
            module = built_undrawn(initial)
            for reference in self.recipe.prepare:
                module = _apply(reference, "transform", module)
            return module

        with torch.random.fork_rng(devices=[]):  # what is drawn is overwritten: it must not advance the caller's stream
            return skeleton(self.recipe.builder, self.recipe.prepare, build)

    @property
    def format(self) -> str:
        if not self.recipe.backend:
            return "torch float32"
        if not self.recipe.convert:
            return f"torch prepared {self.recipe.backend}"
        return f"torch int8{'' if self.recipe.prepare else ' dynamic'} {self.recipe.backend}"

    @property
    def signature(self) -> Signature:
        return self.recipe.signature

    @property
    def size_bytes(self) -> int:
        shipped = self._tensors if self._int8_tensors is None else self._int8_tensors
        if isinstance(shipped, Path):
            return shipped.stat().st_size
        if self._saved_bytes is None:
            with TemporaryDirectory() as folder:
                self.save(Path(folder))
        assert self._saved_bytes is not None
        return self._saved_bytes

    @contextmanager
    def predictor(self, num_threads: int | None = None, built: nn.Module | None = None) -> Iterator[Predictor]:
        """See `Deployable`. `built`: the network of `build`, where the caller has it."""
        import torch

        from ptpipe_torch.memory_format import to_channels_last
        from ptpipe_torch.model.example_inputs import zeros
        from ptpipe_torch.model.outputs import predicted

        backend = self.recipe.backend if self.recipe.convert else None
        has_float_convolutions = not (self.recipe.prepare and self.recipe.convert)  # int8 ones choose for themselves
        with released_memory(), torch_threads(num_threads), quantized_engine(backend), torch.inference_mode():
            with large_blocks_mapped():
                network = [self.build() if built is None else built]
                if has_float_convolutions:
                    to_channels_last(network[0], zeros(self.signature.inputs, 2))

            def predict(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
                return predicted(network[0], inputs, self.signature)

            try:
                with freed_memory_kept():
                    yield predict
            finally:
                network.clear()  # the caller may keep `predict`, which would keep the weights

    def save(self, folder: Path) -> None:
        (folder / _RECIPE).write_text(self.recipe.to_json(), encoding="utf-8")
        int8_tensors = self.int8_tensors  # mapped from its file at each access
        if int8_tensors is None or not isinstance(self._tensors, Path) or self._tensors.exists():
            self._saved_bytes = _write(self.tensors, folder / _TENSORS)
        if int8_tensors is not None:
            self._saved_bytes = _write(int8_tensors, folder / _INT8_TENSORS)

    @classmethod
    def load(cls, folder: Path) -> Self:
        int8_tensors = folder / _INT8_TENSORS
        try:
            with open_regular(folder / _RECIPE) as file:
                recipe = Recipe.from_json(file.read().decode())
        except (FileNotFoundError, NotAFileError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{_RECIPE} can't be read: {error}") from error
        return cls(recipe, folder / _TENSORS, int8_tensors if int8_tensors.exists() else None)

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        recipe = cls.load(folder).recipe
        if recipe.backend and not recipe.convert:  # observers and fake quantization are for training
            return ()
        return (_RECIPE, _INT8_TENSORS if (folder / _INT8_TENSORS).exists() else _TENSORS)

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes}


def _apply(reference: FunctionRef, role: str, *module: nn.Module) -> nn.Module:
    """Call the builder or transform of a recipe.

    Raises IntegrityError for arguments that the function doesn't have, and StageError for what it raises itself: bytes
    that were altered in the store are found by their digest, so that is a limit of the function or of torch.
    """
    function = reference.resolve(role)
    try:
        inspect.signature(function).bind(*module, **reference.arguments)
    except TypeError as error:
        raise IntegrityError(f"{reference.address} can't be applied as the recipe says: {error}") from error
    try:
        return function(*module, **reference.arguments)
    except PtpipeError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        layer = _refused_layer(error, *module)
        if layer:
            reason = f"{reason}; {layer} must stay as it is: leave it float"
        raise StageError(f"{reference.address} can't be applied: {reason}") from error


def _refused_layer(error: Exception, *network: nn.Module) -> str:
    """Return name and type of the layer that the functions in the error's traceback worked on; "" if there is none."""
    from torch import nn

    layers = {id(layer): name for root in network for name, layer in root.named_modules() if name}
    values = (value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values())
    found = [layers[id(value)] for value in values if isinstance(value, nn.Module) and id(value) in layers]
    # The innermost function may have a part of the layer: `conv.0` of the convolution that was fused into `conv`.
    name = next((name for name in found if f"{found[-1]}.".startswith(f"{name}.")), "")
    return f"layer {name} ({type(network[0].get_submodule(name)).__name__})" if name else ""


@contextmanager
def _limited_values(max_values: int) -> Iterator[None]:
    """Refuse to build a network of more values: `width: 1000000` in a recipe would allocate terabytes.

    Raises IntegrityError from inside the builder, where a parameter or buffer is registered and before it is filled.
    """
    from torch.nn.modules import module as hooks
    from torch.nn.parameter import is_lazy

    num_values = 0

    def count(_module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal num_values
        num_values += _TENSOR_VALUES + (0 if tensor is None or is_lazy(tensor) else tensor.numel())
        if num_values > max_values:
            raise IntegrityError(f"the recipe builds a network of over {max_values} values, far more than are stored")

    parameters = hooks.register_module_parameter_registration_hook(count)
    buffers = hooks.register_module_buffer_registration_hook(count)
    try:
        yield
    finally:
        parameters.remove()
        buffers.remove()


def _num_bytes(tensors: Mapping[str, torch.Tensor] | Path) -> int:
    if isinstance(tensors, Path):
        return tensors.stat().st_size if tensors.exists() else 0
    return sum(tensor.nbytes for tensor in tensors.values())


def _load(module: nn.Module, state: Mapping[str, Any]) -> None:
    # torch copies into parameters, but an observer keeps the tensor that it loads, and would write into the stored one.
    parameters = {name for name, _ in module.named_parameters()}
    present = OrderedDict(
        (name, value.clone() if hasattr(value, "clone") and name not in parameters else value)
        for name, value in state.items()
    )
    # Some layers refuse a state dict without the version of their format, which is that of this code.
    # As `state_dict` has it, which would unpack int8 weights.
    versions = {name: {"version": part._version} for name, part in module.named_modules(remove_duplicate=False)}
    present._metadata = versions  # type: ignore[attr-defined]  # where torch looks for it
    _separate_elements(module)
    try:
        module.load_state_dict(present)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise IntegrityError(f"the tensors don't fit the network: {reason}") from error


def _separate_elements(module: nn.Module) -> None:
    """Give elements of expanded buffers, into which torch can't copy, memory of their own."""
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if not buffer.is_sparse and 0 in buffer.stride() and not buffer.is_contiguous():
                layer._buffers[name] = buffer.contiguous()


def _read(tensors: Mapping[str, torch.Tensor] | Path) -> Mapping[str, torch.Tensor]:
    if not isinstance(tensors, Path):
        return tensors
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        open_regular(tensors).close()
        content: dict[str, torch.Tensor] = load_file(tensors)
    except (SafetensorError, FileNotFoundError, NotAFileError) as error:
        raise IntegrityError(f"{tensors.name} can't be read: {error}") from error
    return content


def _write(tensors: Mapping[str, torch.Tensor], path: Path) -> int:
    """Write a safetensors file, from the tensors' own memory; return its size in bytes."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path.stat().st_size
