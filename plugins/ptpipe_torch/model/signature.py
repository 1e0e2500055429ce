"""What a model takes and returns: named tensors with their dtypes and shapes. Imports neither torch nor numpy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ptpipe import JSON
from ptpipe_torch.model.axis_sizes import is_symbol, numbers_of, sized

BATCH = "batch"
"""The symbol of the first axis of every tensor."""
Meanings: TypeAlias = Mapping[str, tuple[str, ...]]
"""What the numbers of tensors stand for, in words, by the tensor's name: names of classes, the tokenizer of ids."""
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_MAX_WORDS, _MAX_SHOWN = 10, 300
_SIDES = ("inputs", "outputs")
_KEYS = {*_SIDES, "meanings"}
DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool")


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of an input or an output."""

    name: str
    """The name of the data set's column, and of the tensor in ONNX files."""
    dtype: str
    """As NumPy calls it: one of `DTYPES`."""
    shape: tuple[int | str, ...]
    """A size, or a symbol where the axis may have any: `batch`, which the first one is, `length`, `32*height`."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"{self.name!r} is no name of a tensor: use letters, digits and _")
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name} has the dtype {self.dtype!r}: it must be one of {', '.join(DTYPES)}")
        if self.shape[:1] != (BATCH,):
            raise ValueError(f"{self.name} has the shape {self.shape}, whose first axis must be {BATCH!r}")

    def __str__(self) -> str:
        """`images (batch, 3, 32, 32) float32`."""
        return f"{self.name} ({', '.join(map(str, self.shape))}) {self.dtype}"

    @property
    def sample_shape(self) -> tuple[int | str, ...]:
        """The shape without its batch axis."""
        return self.shape[1:]

    @property
    def symbols(self) -> tuple[str, ...]:
        """The axes of a sample that may have any size."""
        return tuple(size for size in self.sample_shape if isinstance(size, str))

    @property
    def is_float(self) -> bool:
        """Whether it has floating-point numbers: those of two models can be compared up to rounding."""
        return self.dtype.startswith("float")

    def fits(self, shape: Sequence[int | str]) -> bool:
        """Return whether a tensor of `shape`, whose symbols have sizes that are not known, is one of these."""
        return len(shape) == len(self.shape) and all(
            isinstance(size, str) or size == found for size, found in zip(self.shape, shape, strict=True)
        )

    def to_json(self) -> dict[str, JSON]:
        """Return the fields: the argument of a stored transform."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TensorSpec:
        """Return the spec whose `to_json` is `content`. Raises ValueError, KeyError or TypeError for anything else."""
        name, dtype, shape = content["name"], content["dtype"], content["shape"]
        is_shape = isinstance(shape, list) and shape[:1] == [BATCH] and all(map(_is_size, shape))
        if not (isinstance(name, str) and name.isidentifier() and dtype in DTYPES and is_shape and len(content) == 3):
            raise ValueError(f"{content!r} is no tensor's name, dtype and shape")
        return cls(name, dtype, tuple(shape))


@dataclass(frozen=True)
class Signature:
    """The inputs of a model, in the order of its network's arguments, and its outputs, in the order it returns them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """Empty in what an unlabeled data set needs: any."""
    meanings: Meanings = field(default_factory=dict, compare=False)
    """Of those tensors whose numbers stand for something, where it is known."""

    def __post_init__(self) -> None:
        assert self.inputs, self
        names = Counter(self.names)
        assert max(names.values()) == 1, names
        assert self.meanings.keys() <= names.keys(), self.meanings.keys()

    def __str__(self) -> str:
        """`images (batch, 3, 32, 32) float32 -> logits (batch, 10) float32`."""
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs)) or 'anything'}"

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(spec.name for spec in (*self.inputs, *self.outputs))

    def with_sizes_of(self, inputs: Sequence[TensorSpec]) -> Signature:
        """Return the signature of a model whose inputs have the sizes of others, and its outputs those that follow.

        `inputs`: such as this model takes; an axis of any size stays one.
        """
        numbers = numbers_of((spec.shape, other.shape) for spec, other in zip(self.inputs, inputs, strict=True))
        assert numbers is not None, (self, inputs)
        own, outputs = (
            tuple(replace(spec, shape=sized(spec.shape, numbers)) for spec in side)
            for side in (self.inputs, self.outputs)
        )
        return Signature(own, outputs, self.meanings)

    def to_json(self) -> dict[str, JSON]:
        """Return the fields of all tensors, and what is known of their meanings."""
        sides: dict[str, JSON] = {side: [spec.to_json() for spec in getattr(self, side)] for side in _SIDES}
        return {**sides, "meanings": {name: list(words) for name, words in self.meanings.items()}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Signature:
        """Return the signature whose `to_json` is `content`. Raises ValueError, KeyError or TypeError for others."""
        inputs, outputs = (tuple(map(TensorSpec.from_json, content[side])) for side in _SIDES)
        names = {spec.name for spec in (*inputs, *outputs)}
        if not inputs or not outputs or len(names) < len(inputs) + len(outputs) or content.keys() - _KEYS:
            raise ValueError("a signature has inputs and outputs, and each has a name of its own")
        meanings = meanings_from_json(content.get("meanings", {}))  # former ones have none
        if not meanings.keys() <= names:
            raise ValueError("a signature has meanings of its own tensors")
        return cls(inputs, outputs, meanings)


def meanings_from_json(content: object) -> Meanings:
    """Return the meanings of a stored signature. Raises ValueError for anything else."""
    if isinstance(content, dict) and all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in content.values()
    ):
        return {name: tuple(words) for name, words in content.items()}
    raise ValueError("meanings are words for each tensor")


def describe_meanings(found: Sequence[str], needed: Sequence[str]) -> tuple[str, str]:
    """Return two different meanings in words, what differs first where they are long."""
    is_long = len(found) > _MAX_WORDS or max(len(", ".join(words)) for words in (found, needed)) > _MAX_SHOWN
    if len(found) == len(needed) and is_long:
        number = next(number for number, pair in enumerate(zip(found, needed, strict=True)) if pair[0] != pair[1])
        found, needed = (f"{words[number]} as number {number}" for words in (found, needed))
        return _shown([found]), _shown([needed])
    return _shown(found), _shown(needed)


def _shown(words: Sequence[str]) -> str:
    more = [f"and {len(words) - _MAX_WORDS} more"] if len(words) > _MAX_WORDS else []
    text = ", ".join((*words[:_MAX_WORDS], *more))
    return f"[{_DIGEST.sub(lambda digest: digest[0][:12], text)[:_MAX_SHOWN]}]"


def _is_size(size: object) -> bool:
    return is_symbol(size) or (type(size) is int and size > 0)
