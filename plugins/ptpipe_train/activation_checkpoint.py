"""Gradient checkpointing: chosen layers keep their inputs instead of activations, and run again in the backward pass.

T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptpipe import StageError, nearest
from ptpipe_torch import RangeObserver
from ptpipe_train.mix_in import mix_in


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

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _buffers_as_before(buffers)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _buffers_as_before(before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Run the layer as in the forward pass, and undo what it does to its buffers: running statistics moved then."""
    after = [(buffer, buffer.detach().clone()) for buffer, _ in before]
    _assign(before)
    try:
        yield
    finally:  # torch ends the second forward pass by an exception, as soon as it has all activations
        _assign(after)


def _assign(values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            buffer.resize_(value.shape).copy_(value)
