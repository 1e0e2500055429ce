"""Validation of a stage's options, with pydantic's errors reworded for a manifest's author."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from ptpipe.artifact import JSON
from ptpipe.config import StageConfig, options_as_json, read_options
from ptpipe.errors import MAX_PROBLEMS, nearest
from ptpipe.manifest.manifest import word_for
from ptpipe.manifest.yaml import scalar
from ptpipe.plan.hints import option_hint
from ptpipe.stages import Stage

Place = tuple[str | int, ...]

_LONGEST_SHOWN = 60
_TO_YAML = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid list": "a list",
    "a valid dictionary": "a mapping",
    "an object": "a mapping",
    ", got a number with a fractional part": "",
}
_LENGTH = re.compile(r"(\w+) should have (at (?:least|most) \d+ items?) after validation, not (\w+)")
_YAML_1_1 = {"no": "false", "off": "false", "n": "false", "yes": "true", "on": "true", "y": "true"}


class OptionProblem(NamedTuple):
    """One mistake in the options."""

    path: Place
    """Its place below `with`."""
    message: str
    suggestion: str | None = None
    at_key: bool = False
    """Whether the option's name is wrong, not its value."""


def config_problems(
    stage: Stage[..., object], options: Mapping[str, JSON], num_reported: int = MAX_PROBLEMS
) -> tuple[StageConfig | None, list[OptionProblem]]:
    """Validate options as a manifest's. Returns the config, or None and every problem.

    `num_reported`: how many problems will be reported; the others have pydantic's message and no suggestion.
    """
    try:
        return read_options(stage.config_type, options), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    by_place: dict[Place, list[Any]] = {}
    for detail in details:
        by_place.setdefault(_written_part(detail["loc"], options, detail["type"]), []).append(detail)
    # A problem of a group is explained by one inside it.
    explained = {place[:length] for place in by_place for length in range(len(place))}
    places = [place for place in by_place if place not in explained]
    reported = [_problem(stage, place, by_place[place]) for place in places[:num_reported]]
    return None, reported + [OptionProblem(place, by_place[place][0]["msg"]) for place in places[num_reported:]]


def changed_option(kind: str, config: StageConfig) -> str:
    """Return why the stage, which reads its options as JSON, would get others than `config` has; "" if it would not."""
    written = options_as_json(config)
    try:
        read = read_options(type(config), written)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        name = ".".join(map(str, detail["loc"]))
        subject = f"option {name!r} of {kind} is" if name else f"the options of {kind} are"
        remedy = "; where its name in manifests is another, give it `alias` only" if name else ""
        return f"{subject} refused when validated again in the stage: {_in_yaml_words(detail['msg'])}{remedy}"
    for name, field in type(config).model_fields.items():
        before, after = getattr(config, name), getattr(read, name)
        if before == after:
            continue
        option = f"option {name!r} of {kind}"
        if (field.serialization_alias or name) not in written:
            return f"{option} has `exclude`, which hides it from the stage and from its key"
        if isinstance(before, SecretStr | SecretBytes):
            return f"{option} is a secret, which no stage and no key gets: take the name of an environment variable"
        return (
            f"{option} is {before!r:.80}, and validated again in the stage it is {after!r:.80}: its validators must "
            "return such a value unchanged, and its type must define =="
        )
    return ""


def _written_part(loc: Sequence[str | int], options: Any, type_: str) -> Place:
    """Return the part of pydantic's location that the manifest has: for `a | b` pydantic adds the branches."""
    place: list[str | int] = []
    for step in loc:
        if isinstance(options, dict) and step in options:
            options = options[str(step)]
        elif isinstance(options, list) and isinstance(step, int) and step < len(options):
            options = options[step]
        else:
            continue
        place.append(step)
    if type_ == "missing":
        place.append(loc[-1])
    return tuple(place)


def _problem(stage: Stage[..., object], place: Place, details: Sequence[Any]) -> OptionProblem:
    name = ".".join(map(str, place))
    first = details[0]
    if first["type"] == "extra_forbidden":
        config_type = _type_at(stage.config_type, place[:-1])
        renamed = getattr(config_type, "renamed_options", {})
        if place[-1] in renamed:
            return OptionProblem(place, f"{name}: renamed to {renamed[place[-1]]}", at_key=True)
        message = f"unknown option {name!r} of {stage.kind}"
        return OptionProblem(
            place, message, option_hint(str(place[-1]), config_type) if config_type else None, at_key=True
        )
    if first["type"] == "missing" and isinstance(place[-1], int):
        return OptionProblem(place[:-1], f"{'.'.join(map(str, place[:-1]))}: more values are required")
    if first["type"] == "missing":
        return OptionProblem(place[:-1], f"option {name!r} of {stage.kind} is required")
    demands = list(dict.fromkeys(_in_yaml_words(detail["msg"]) for detail in details))
    demands = [demands[0], *(demand.removeprefix("should be ") for demand in demands[1:])]
    message = f"{name + ': ' if name else ''}{' or '.join(demands)}{_given(first)}"
    message += _hint(details) or _form(stage, place, first["input"])
    return OptionProblem(place, message, nearest(str(first["input"]), _choices(details)))


def _in_yaml_words(message: str) -> str:
    """Return pydantic's message with YAML's terms instead of those of JSON and Python."""
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ").removeprefix("Input ")
    if length := _LENGTH.fullmatch(message):
        collection = "mapping" if length[1] == "Dictionary" else "list"
        return f"should be a {collection} of {length[2]}, not {length[3]}"
    if not message.startswith("should be "):
        return message
    for json_term, yaml_term in _TO_YAML.items():
        message = message.replace(json_term, yaml_term)
    return message


def _given(detail: Any) -> str:
    """Return the value given, as `, not 3`, unless the message has it."""
    value = detail["input"]
    if detail["type"] in ("value_error", "assertion_error", "missing", "too_short", "too_long"):
        return ""
    text = word_for(value) if isinstance(value, list | dict) else json.dumps(value, ensure_ascii=False, default=str)
    return f", not {text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + '...'}"


def _hint(details: Sequence[Any]) -> str:
    """Return the likely cause of text in the wrong place."""
    value = details[0]["input"]
    types = {detail["type"] for detail in details}
    if not isinstance(value, str):
        return ""
    if "bool_type" in types and value.lower() in _YAML_1_1:
        return f" (in YAML 1.2 write {_YAML_1_1[value.lower()]})"
    if types & {"float_type", "int_type"} and not isinstance(scalar(value), str | None):
        return " (without quotes it is a number)"
    if types & {"tuple_type", "list_type"} and re.fullmatch(r"[\w./-]{1,40}", value):
        return f" (a list of one is written [{value}])"
    return ""


def _form(stage: Stage[..., object], place: Place, value: JSON) -> str:
    """Return how a group of options is written whose one option that can take the value was meant."""
    group = _type_at(stage.config_type, place)
    if group is None or isinstance(value, list | dict):
        return ""
    shown = ""
    if value is True:
        shown = "" if _faults(group, {}) else "{}"
    elif value is not None and value is not False:
        fitting = [name for name in group.model_fields if name not in _faults(group, {name: value})]
        shown = f"{{{fitting[0]}: {json.dumps(value, ensure_ascii=False)}}}" if len(fitting) == 1 else ""
        shown = shown.replace('"', "") if isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*", value) else shown
    return f" (write {place[-1]}: {shown})" if shown and len(shown) <= _LONGEST_SHOWN else ""


def _faults(group: type[BaseModel], options: Mapping[str, JSON]) -> set[str | int]:
    """Return which of some options are wrong, or missing."""
    try:
        group.model_validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        return {detail["loc"][0] if detail["loc"] else "" for detail in error.errors(include_url=False)}
    return set()


def _choices(details: Sequence[Any]) -> list[str]:
    expected = [detail.get("ctx", {}).get("expected", "") for detail in details]
    return [choice.strip("'") for text in expected for choice in text.replace(" or ", ", ").split(", ") if choice]


def _type_at(config_type: type[BaseModel], path: Place) -> type[BaseModel] | None:
    """Return the type of the options at a path; None where it is not exactly one type."""
    steps = iter(path)
    for step in steps:
        field = config_type.model_fields.get(str(step))
        types = _types_in(field.annotation) if field else ()
        nested = [t for t in types if isinstance(t, type) and issubclass(t, BaseModel)]
        if field is None or len(nested) != 1:
            return None
        config_type = nested[0]
        if get_origin(field.annotation) is dict:
            next(steps, None)  # its key
    return config_type


def _types_in(annotation: object) -> Iterator[object]:
    arguments = getattr(annotation, "__args__", ())
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _types_in(argument)
