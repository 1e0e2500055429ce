"""What a forward pass keeps in the network: tables and sizes for its next call; proxies, while it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from ptpipe_torch.model.example_inputs import copies
from ptpipe_torch.model.outputs import tensors_of


class KeptAttributes:
    """The attributes of a network's layers, and what lies in their dictionaries, lists and sets, at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(vars(layer), dict(vars(layer))) for layer in module.modules()]
        values = [value for _, before in self._attributes for value in before.values()]
        self._containers = [(value, value.copy()) for value in values if isinstance(value, dict | list | set)]

    def restore(self) -> None:
        """Let all be as it was, but for tensors that were changed in place."""
        for now, before in self._attributes:
            now.clear()
            now.update(before)
        for container, content in self._containers:
            _fill(container, content)

    def remove_proxies(self) -> None:
        """Let what holds a proxy be as it was; everything else stays: a tracer adds constants, and a library hooks."""
        for now, before in self._attributes:
            for name in [name for name, value in now.items() if _has_proxy(value)]:
                del now[name]
                now |= {name: before[name]} if name in before else {}
        for container, content in self._containers:
            if any(map(_has_proxy, container.values() if isinstance(container, dict) else container)):
                _fill(container, content)


@torch.no_grad()
def forget_sizes(network: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Let a network forget what it keeps from its last call if that depends on the batch's size; return if it did.

    Heads of detectors compare the sizes of a call with those of the last one, to make a table for others. A tracer
    can't compare the size of a batch with a number. What is forgotten is None, or what the class of the layer has. A
    network that needs it is left as it was. `inputs`: at least two samples.
    """
    kept = KeptAttributes(network)
    try:
        expected = tensors_of(network(*copies(inputs)))
        some = _sizes(network)
        network(*(torch.cat([value, value[:1]]) for value in inputs))
        others = _sizes(network)
        names = [key for key, sizes in some.items() if others.get(key, sizes) != sizes]
        kept.restore()
        _forget(names)
        is_same = bool(names) and all(map(torch.equal, tensors_of(network(*copies(inputs))), expected))
    except Exception:  # noqa: BLE001  # a network may raise anything
        is_same = False
    kept.restore()
    if is_same:
        _forget(names)
    return is_same


def _forget(names: Sequence[tuple[nn.Module, str]]) -> None:
    for layer, name in names:
        setattr(layer, name, None)
        if hasattr(type(layer), name):
            vars(layer).pop(name, None)


def _sizes(network: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return the numbers, and the shapes of tensors, that layers have as attributes."""
    attributes = ((layer, name, value) for layer in network.modules() for name, value in _attributes(layer).items())
    found = {(layer, name): _sizes_of(value) for layer, name, value in attributes}
    return {key: sizes for key, sizes in found.items() if sizes is not None}


def _attributes(layer: nn.Module) -> dict[str, Any]:
    return vars(layer) | dict(layer.named_buffers(recurse=False))


def _sizes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_sizes_of, value))
    return value if isinstance(value, int) else None


def _fill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _has_proxy(value: Any) -> bool:
    """Return whether a value is a proxy, or a tuple with one, as sizes are."""
    return any(map(_has_proxy, value)) if isinstance(value, tuple) else isinstance(value, Proxy)
