"""The base class of stage options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from ptpipe.artifact import JSON


class StageConfig(BaseModel):
    """Base of the options of every stage kind: a pydantic model, frozen and strict.

    Unknown options are errors. Give every field a `description`, and bounds where there are any; `ptpipe stages KIND`
    and the JSON Schema show them. Use `Literal` for choices, `tuple[X, ...]` for lists.
    """

    # Built on first use, because a manifest uses few of all kinds.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)

    renamed_options: ClassVar[Mapping[str, str]] = {}
    """Former option names to present ones: the error for a former name in a manifest suggests the present one."""
    unkeyed_options: ClassVar[frozenset[str]] = frozenset()
    """Options that stay out of the key, because they change no bit of the result, only how it is computed: how often a
    checkpoint is written, how many processes load data. Changing one runs nothing again. A class of nested options has
    its own; a subclass that sets it replaces its base's."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if unknown := cls.unkeyed_options - cls.model_fields.keys():
            raise TypeError(f"{cls.__name__}.unkeyed_options names no option: {', '.join(sorted(unknown))}")

    def keyed_options(self) -> dict[str, JSON]:
        """Return what enters the key, as JSON: all but `unkeyed_options`, nested ones too, and `resolved_options`."""
        options: dict[str, JSON] = self.model_dump(mode="json", round_trip=True, by_alias=True, exclude=_unkeyed(self))
        return options | self.resolved_options()

    def resolved_options(self) -> dict[str, JSON]:
        """Return what the key has in place of options that depend on the machine: `{"device": "cuda"}` for `auto`.

        Called for every plan: must be fast and not import torch.
        """
        return {}

    def unkeyed_values(self) -> dict[str, JSON]:
        """Return the options of this class that stay out of the key, as JSON."""
        return self.model_dump(mode="json", include=set(self.unkeyed_options))


def _unkeyed(value: object) -> dict[Any, Any]:
    """Return what pydantic is to exclude from a config, or from a sequence of them."""
    if isinstance(value, StageConfig):
        inner = {name: found for name, item in value if (found := _unkeyed(item))}
        return inner | dict.fromkeys(value.unkeyed_options, True)
    if isinstance(value, list | tuple):
        return {number: found for number, item in enumerate(value) if (found := _unkeyed(item))}
    return {}
