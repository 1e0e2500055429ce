"""How to rebuild a network: a registered builder, its arguments, and transforms before and after loading."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

from ptpipe import JSON, IntegrityError
from ptpipe_torch.model.function_ref import FunctionRef
from ptpipe_torch.model.signature import Signature

T = TypeVar("T")


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
    is_sparse: bool = False
    """Whether weights were pruned: a training keeps their zeros."""

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
                is_sparse=_typed(content.get("is_sparse", False), bool),
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
        if not self.is_sparse:  # as it was before there was pruning
            del content["is_sparse"]
        return json.dumps(content, indent=1)


def _typed(value: object, type_: type[T]) -> T:
    if not isinstance(value, type_):
        raise TypeError(f"{value!r} is not {type_.__name__}")
    return value


def _stored(reference: FunctionRef) -> dict[str, JSON]:
    content: dict[str, JSON] = {"address": reference.address, "arguments": dict(reference.arguments)}
    return content if reference.source is None else {**content, "source": reference.source}


def _function_ref(content: object) -> FunctionRef:
    fields = _typed(content, dict)
    if unknown := fields.keys() - {"address", "arguments", "source"}:
        raise ValueError(f"a function has no {sorted(unknown)}")
    source = _typed(fields["source"], str) if "source" in fields else None
    return FunctionRef(_typed(fields["address"], str), _typed(fields["arguments"], dict), source)
