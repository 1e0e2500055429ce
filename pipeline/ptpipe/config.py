"""The base class of stage options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class StageConfig(BaseModel):
    """Base of the options of every stage kind: a pydantic model, frozen and strict.

    Unknown options are errors. Give every field a `description`, and bounds where there are any; `ptpipe stages KIND`
    and the JSON Schema show them. Use `Literal` for choices, `tuple[X, ...]` for lists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    renamed_options: ClassVar[Mapping[str, str]] = {}
    """Former option names to present ones: the error for a former name in a manifest suggests the present one."""
