"""Costs of models and peaks of machines, as comparisons keep them. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ptpipe import JSON


@dataclass(frozen=True)
class Costs:
    """Of one model, for one sample."""

    compressed_bytes: int
    """Of the files that one ships, as zlib compresses them at level 6: about what an app store delivers. Of a file over
    16 MiB an estimate from 16 parts of it."""
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of the tensors in the file, by dtype."""
    macs: int | None = None
    """Multiply-accumulates; None where some are not known."""
    macs_by_dtype: Mapping[str, int] = field(default_factory=dict)
    """Those that are known, by the dtype that they are computed in."""
    weights_read_bytes: int | None = None
    """Of the weights that a prediction reads, each once; of embeddings the rows alone."""
    io_bytes: int | None = None
    """Of inputs and outputs."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the axes that may have any size, in the sample that was counted."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """How many of each the graph has; of a torch network, how many are called."""
    float_operators: tuple[str, ...] = ()
    """Of an int8 model: those that compute in floating point all the same."""
    uncounted: tuple[str, ...] = ()
    """Operators whose multiply-accumulates are not known, or why none are."""

    @property
    def flops_per_byte(self) -> float | None:
        """Arithmetic intensity of a batch of one: operations, two for a multiply-accumulate, for each byte read or
        written at least: weights, inputs and outputs, once each. What lies between layers counts as cached.

        Williams, Waterman and Patterson, Roofline (Communications of the ACM 52, 2009): operational intensity.
        """
        if self.macs is None or self.weights_read_bytes is None or self.io_bytes is None:
            return None
        return 2 * self.macs / max(1, self.weights_read_bytes + self.io_bytes)

    def to_json(self) -> dict[str, JSON]:
        """Return all fields, and what follows from them."""
        return {
            "compressed_bytes": self.compressed_bytes,
            "weight_bytes": dict(self.weight_bytes),
            "macs": self.macs,
            "macs_by_dtype": dict(self.macs_by_dtype),
            "weights_read_bytes": self.weights_read_bytes,
            "io_bytes": self.io_bytes,
            "flops_per_byte": self.flops_per_byte,
            "sizes": dict(self.sizes),
            "operators": dict(self.operators),
            "float_operators": list(self.float_operators),
            "uncounted": list(self.uncounted),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        fields = {name: value for name, value in content.items() if name != "flops_per_byte"}
        lists = {name: tuple(content[name]) for name in ("float_operators", "uncounted")}
        return cls(**{**fields, **lists})


@dataclass(frozen=True)
class Peaks:
    """Of this machine with a number of threads."""

    num_threads: int
    macs_per_s: Mapping[str, float]
    """By dtype: `float32`, `int8`."""
    bytes_per_s: Mapping[str, float]
    """Read, by the bytes that are read again and again."""

    def bandwidth(self, num_bytes: int) -> float | None:
        """Return how fast so many bytes can be read at most; None where they fit a cache that was not measured."""
        known = {int(size): rate for size, rate in self.bytes_per_s.items()}
        below = [size for size in known if size <= num_bytes]
        return max(rate for size, rate in known.items() if size >= max(below)) if below else None

    def at_least(self, other: Peaks) -> Peaks:
        """Return these peaks, raised to those of `other` where these are lower."""
        macs, rates = (
            {name: max(value, theirs.get(name, 0.0)) for name, value in own.items()}
            for own, theirs in ((self.macs_per_s, other.macs_per_s), (self.bytes_per_s, other.bytes_per_s))
        )
        return Peaks(self.num_threads, macs, rates)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the peaks whose fields these are."""
        return cls(content["num_threads"], dict(content["macs_per_s"]), dict(content["bytes_per_s"]))
