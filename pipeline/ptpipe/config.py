"""The options of stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class StageConfig(BaseModel):
    """Base of every stage's options. Frozen; unknown options are errors; every field wants a `description`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    renamed_options: ClassVar[Mapping[str, str]] = {}
    """Former option names to present ones: a manifest that uses a former name is told the present one."""
