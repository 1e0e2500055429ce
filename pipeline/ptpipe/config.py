"""The base class of stage options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Set
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, RootModel

from ptpipe.artifact import JSON


class StageConfig(BaseModel):
    """Base of the options of every stage kind: a pydantic model, frozen and strict.

    Unknown options are errors. Give every field a `description`, and bounds where there are any; `ptpipe stages KIND`
    and the JSON Schema show them. Use `Literal` for choices, `tuple[X, ...]` for lists, a StageConfig for a group.

    The stage, which may be in another process, reads its options as JSON and validates them again. Validators must
    return unchanged what they returned before, and no option may be hidden from JSON: a manifest whose options would
    be others in the stage is refused.
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
        return options_as_json(self, is_keyed=True) | self.resolved_options()

    def resolved_options(self) -> dict[str, JSON]:
        """Return what the key has in place of options that depend on the machine: `{"device": "cuda"}` for `auto`.

        Called for every plan: must be fast and not import torch.
        """
        return {}

    def unkeyed_values(self) -> dict[str, JSON]:
        """Return the options of this class that stay out of the key, as JSON."""
        return self.model_dump(mode="json", include=set(self.unkeyed_options))


def options_as_json(config: StageConfig, is_keyed: bool = False) -> dict[str, JSON]:
    """Return options as JSON that `read_options` reads, the same in every process; `is_keyed`: without unkeyed ones."""
    # So that validating them again gives the same config: computed fields left out, aliases as written.
    written: dict[str, JSON] = config.model_dump(mode="json", round_trip=True, by_alias=True)
    return _settled(config, written, is_keyed)  # type: ignore[return-value]  # a model's JSON stays a mapping


def read_options(config_type: type[StageConfig], options: Mapping[str, JSON]) -> StageConfig:
    """Return the config that options describe. Raises pydantic's ValidationError.

    Strict on JSON's types: "3" is not a number; but 1 may be 1.0, and a list may be a tuple.
    """
    return config_type.model_validate_json(json.dumps(options), strict=True)


def _settled(value: object, written: JSON, is_keyed: bool) -> JSON:
    """Return what pydantic has written for `value`, with sets sorted: theirs is another order in every process."""
    if isinstance(value, RootModel):
        return _settled(value.root, written, is_keyed)
    match written:
        case dict() if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return _settled(fields, written, is_keyed)  # by position: what is written may have aliases
        case dict() if isinstance(value, BaseModel):
            left_out = getattr(value, "unkeyed_options", ()) if is_keyed else ()
            fields = {field.serialization_alias or name: name for name, field in type(value).model_fields.items()}
            return {
                alias: _settled(getattr(value, fields[alias]), part, is_keyed) if alias in fields else part
                for alias, part in written.items()
                if fields.get(alias) not in left_out
            }
        case dict() if isinstance(value, Mapping) and len(value) == len(written):
            parts = zip(value.values(), written.items(), strict=True)
            return {key: _settled(item, part, is_keyed) for item, (key, part) in parts}
        case list() if isinstance(value, Collection) and len(value) == len(written):
            settled = [_settled(item, part, is_keyed) for item, part in zip(value, written, strict=True)]
            is_set = isinstance(value, Set)
            return sorted(settled, key=lambda part: json.dumps(part, sort_keys=True)) if is_set else settled
    return written
