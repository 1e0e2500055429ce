"""How to rebuild a network: a registered builder, its arguments, and transforms before and after loading."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from ptpipe import JSON, IntegrityError
from ptpipe_torch.model.function_ref import FunctionRef
from ptpipe_torch.model.signature import Signature

T = TypeVar("T")

ALL = "*"
"""In the place of names of pruned weights, which former versions did not store."""


@dataclass(frozen=True)
class Recipe:
    """How to rebuild a network around its tensors. All of it is JSON."""

    builder: FunctionRef
    signature: Signature
    prepare: tuple[FunctionRef, ...] = ()
    """Transforms applied before the tensors are loaded: they insert observers or fake quantization."""
    convert: tuple[FunctionRef, ...] = ()
    """Transforms applied after: they convert the network to int8."""
    backend: str | None = None
    """Quantized engine that the network was prepared for; None for a float model."""
    pruned: tuple[str, ...] = ()
    """The parameters that were pruned: a training keeps their zeros. `ALL`: those of all weights."""

    @property
    def is_sparse(self) -> bool:
        """Whether weights were pruned."""
        return bool(self.pruned)

    def with_pruned(self, names: Iterable[str]) -> Recipe:
        """Return the recipe of a model of which the parameters `names` were pruned, too."""
        return replace(self, pruned=tuple(dict.fromkeys((*self.pruned, *names))))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Return the recipe whose `to_json` is `text`. Raises IntegrityError for anything else."""
        try:
            content = _typed(json.loads(text), dict)
            return cls(
                builder=_function_ref(content["builder"]),
                signature=Signature.from_json(_typed(content["signature"], dict)),
                prepare=tuple(_function_ref(reference) for reference in _typed(content["prepare"], list)),
                convert=tuple(_function_ref(reference) for reference in _typed(content["convert"], list)),
                backend=None if content["backend"] is None else _typed(content["backend"], str),
                pruned=_pruned(content),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise IntegrityError(f"not a model recipe: {error!r}") from error

    def to_json(self) -> str:
        """One JSON object."""
        references = {
            "builder": _stored(self.builder),
            "prepare": [_stored(reference) for reference in self.prepare],
            "convert": [_stored(reference) for reference in self.convert],
        }
        content = asdict(self) | references | {"signature": self.signature.to_json()}
        if self.is_sparse:
            content["is_sparse"] = True  # which former versions read
        else:
            del content["pruned"]  # as it was before there was pruning
        return json.dumps(content, indent=1)


def _typed(value: object, type_: type[T]) -> T:
    if not isinstance(value, type_):
        raise TypeError(f"{value!r} is not {type_.__name__}")
    return value


def _pruned(content: dict[str, object]) -> tuple[str, ...]:
    former = [ALL] if _typed(content.get("is_sparse", False), bool) else []
    return tuple(_typed(name, str) for name in _typed(content.get("pruned", former), list))


def _stored(reference: FunctionRef) -> dict[str, JSON]:
    content: dict[str, JSON] = {"address": reference.address, "arguments": dict(reference.arguments)}
    return content if reference.source is None else {**content, "source": reference.source}


def _function_ref(content: object) -> FunctionRef:
    fields = _typed(content, dict)
    if unknown := fields.keys() - {"address", "arguments", "source"}:
        raise ValueError(f"a function has no {sorted(unknown)}")
    source = _typed(fields["source"], str) if "source" in fields else None
    return FunctionRef(_typed(fields["address"], str), _typed(fields["arguments"], dict), source)
