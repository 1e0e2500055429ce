"""Attributes that a forward pass assigns: while it is traced they are proxies, which must not stay in the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.fx import Proxy


@contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Give layers back the attributes and the content of dictionaries, lists and sets that they had before the `with`.

    New attributes stay unless they are proxies: a tracer adds constants to the network.
    """
    attributes = [(vars(layer), dict(vars(layer))) for layer in module.modules()]
    values = (value for _, before in attributes for value in before.values())
    containers = [(value, value.copy()) for value in values if isinstance(value, dict | list | set)]
    try:
        yield
    finally:
        for now, before in attributes:
            now |= before
            for name in [name for name, value in now.items() if isinstance(value, Proxy)]:
                del now[name]
        for container, content in containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
