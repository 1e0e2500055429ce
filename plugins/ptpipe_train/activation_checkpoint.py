"""Gradient checkpointing: chosen layers keep their inputs instead of activations, and run again in the backward pass.

T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptpipe import StageError, nearest
from ptpipe_torch import RangeObserver
from ptpipe_train.mix_in import mix_in

_RandomStates: TypeAlias = tuple[Any, Any]


def checkpoint_layers(module: nn.Module, types: Sequence[str]) -> None:
    """Let the layers of these types run again in the backward pass, in place; parameters keep their names.

    Raises StageError for a type that the network doesn't have or that can't run twice.
    """
    layers = [layer for name, layer in module.named_modules() if name]
    for type_ in dict.fromkeys(types):
        chosen = [layer for layer in layers if type(layer).__name__ == type_]
        if not chosen:
            raise StageError(
                f"gradient_checkpointing: the network has no layer of type {type_} ({_hint(type_, layers)})"
            )
        for layer in chosen:
            _refuse(layer, type_)
            mix_in(layer, _Checkpointed)


def _hint(type_: str, layers: Sequence[nn.Module]) -> str:
    names = sorted({type(layer).__name__ for layer in layers})
    close = nearest(type_, names)
    return f"did you mean {close!r}?" if close else f"it has: {', '.join(names)}"


def _refuse(layer: nn.Module, type_: str) -> None:
    if type(layer).forward is nn.Module.forward:
        raise StageError(f"gradient_checkpointing: {type_} has no forward pass of its own, it only holds other layers")
    if any(isinstance(inner, RangeObserver) for inner in layer.modules()):
        raise StageError(
            f"gradient_checkpointing: {type_} contains fake quantization of activations, which would observe each "
            "batch twice; choose layers without, such as QatLayer, or a smaller batch_size and a larger accumulate"
        )


class _Checkpointed:
    """Mixin of a layer whose forward pass runs again in the backward pass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the layer."""
        forward = super().forward  # type: ignore[misc]  # that of the layer's own type
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.buffers()]
        random_states, drawn_from = _random_states(), list[_RandomStates]()

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _state_as_before(buffers, drawn_from)

        outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if not _is_same(random_states, _random_states()):
            drawn_from.append(random_states)
        return outputs


@contextmanager
def _state_as_before(
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]], drawn_from: Sequence[_RandomStates]
) -> Iterator[None]:
    """Run the layer as in the forward pass, and undo what it does to its buffers: running statistics moved then.

    `drawn_from`: the states of the random streams of Python and NumPy, where the forward pass drew from them; torch
    restores its own.
    """
    after = [(buffer, buffer.detach().clone()) for buffer, _ in buffers]
    random_states = [_random_states() for _ in drawn_from]
    _assign(buffers)
    _set_random_states(drawn_from)
    try:
        yield
    finally:  # torch ends the second forward pass by an exception, as soon as it has all activations
        _assign(after)
        _set_random_states(random_states)


def _random_states() -> _RandomStates:
    """Return the states of Python's stream and of NumPy's global one."""
    return random.getstate(), np.random.get_state(legacy=False)


def _set_random_states(states: Iterable[_RandomStates]) -> None:
    for python, numpy in states:
        random.setstate(python)
        np.random.set_state(numpy)


def _is_same(before: _RandomStates, after: _RandomStates) -> bool:
    return before[0] == after[0] and _numbers(before[1]) == _numbers(after[1])


def _numbers(state: Mapping[str, Any]) -> list[object]:
    """Return what a state of NumPy's stream consists of, so that two can be compared."""
    return [
        _numbers(part) if isinstance(part, dict) else part.tobytes() if isinstance(part, np.ndarray) else part
        for part in state.values()
    ]


def _assign(values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            buffer.resize_(value.shape).copy_(value)
