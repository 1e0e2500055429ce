"""Facts that are stored as JSON beside the address of their class: of columns and of tasks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from ptpipe import JSON, IntegrityError
from ptpipe_torch.model.function_ref import loaded_attribute

_TYPE = "type"
F = TypeVar("F", bound="Facts")


class Facts(BaseModel):
    """Frozen facts with strict types: a stored record may come from anywhere."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def to_json(self) -> dict[str, JSON]:
        """Return the facts, with the address of their class as `type`."""
        own = type(self)
        return {_TYPE: f"{own.__module__}:{own.__qualname__}", **self.model_dump(mode="json")}

    @classmethod
    def from_json(cls: type[F], content: Mapping[str, Any]) -> F:
        """Return the facts whose `to_json` is `content`, for any subclass of this class in a loaded plugin.

        Raises IntegrityError where `type` names anything else, ValueError for facts that the class refuses.
        """
        facts = dict(content)
        address = str(facts.pop(_TYPE, ""))
        found = loaded_attribute(address, cls.__name__)
        if not (inspect.isclass(found) and issubclass(found, cls) and not inspect.isabstract(found)):
            raise IntegrityError(f"{address} is not a {cls.__name__}")
        restored: F = found.model_validate_json(json.dumps(facts))
        return restored
