"""What this build of torch offers for int8 on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def offered_backends() -> tuple[str, ...]:
    """Names of the int8 engines that can be set here."""
    return tuple(sorted(set(torch.backends.quantized.supported_engines) - {"none"}))


def missing_backend(backend: str) -> Iterator[str]:
    """A line that says so where this machine lacks the backend."""
    offered = offered_backends()
    if backend not in offered:
        there = f"this machine has: {', '.join(offered)}" if offered else "this machine has none"
        yield f"torch offers no int8 backend {backend} here ({there})"
