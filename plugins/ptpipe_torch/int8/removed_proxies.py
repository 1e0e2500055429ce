"""What a forward pass keeps in the network: while it is traced these are proxies, which must not stay there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Proxy


@contextmanager
def proxies_removed(module: nn.Module) -> Iterator[None]:
    """Remove the proxies that lie in layers' attributes, dictionaries, lists and sets at the end of the `with`.

    What was there before returns. Everything else stays: a tracer adds constants to the network, and a library hooks.
    """
    attributes = [(vars(layer), dict(vars(layer))) for layer in module.modules()]
    values = [value for _, before in attributes for value in before.values()]
    containers = [(value, value.copy()) for value in values if isinstance(value, dict | list | set)]
    try:
        yield
    finally:
        for now, before in attributes:
            for name in [name for name, value in now.items() if isinstance(value, Proxy)]:
                del now[name]
                now |= {name: before[name]} if name in before else {}
        for container, content in containers:
            if any(isinstance(value, Proxy) for value in _values(container)):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container
