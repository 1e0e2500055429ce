"""einops on proxies of FX: its functions are recorded as the views, permutations and sums that they consist of.

einops chooses by the type of a tensor what computes it, and refuses types that it doesn't know. How it finds another
backend is internal to it (0.8).
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch.fx import Proxy


def accept_proxies() -> None:
    """Let einops take proxies, if it is imported."""
    if backends := sys.modules.get("einops._backends"):
        _backend(backends.TorchBackend)


def folders() -> tuple[str, ...]:
    """Return the folder of einops, whose lines are not the network's; nothing if it isn't imported."""
    module = sys.modules.get("einops")
    return () if module is None else (f"{Path(str(module.__file__)).parent}{os.sep}",)


@cache
def _backend(torch_backend: Any) -> type:
    """Make a backend: einops searches the subclasses of its own one whose framework is imported."""

    class ProxyBackend(torch_backend):  # type: ignore[misc]  # a base class at run time
        framework_name = "torch.fx"

        def is_appropriate_type(self, tensor: Any) -> bool:
            return isinstance(tensor, Proxy)

        def shape(self, x: Any) -> list[Any]:
            return list(x.shape)  # a tuple would be kept, with its proxies, in a cache of einops

    return ProxyBackend
