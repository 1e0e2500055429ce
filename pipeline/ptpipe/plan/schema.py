"""The manifest's JSON Schema, for editors, and option tables for the command line and the docs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ptpipe.artifact import JSON
from ptpipe.manifest.manifest import ID_PATTERN, MAX_SEED, NAME_PATTERN, VERSION
from ptpipe.manifest.yaml import scalar
from ptpipe.plan.vocabulary import Vocabulary
from ptpipe.stages import Stage

_REFERENCE = {"type": "string", "minLength": 1}
_INPUTS = {
    "type": ["string", "array"],
    "description": "a stage above, or one of its outputs: `calibrate.model`; or a list of them",
    "minLength": 1,
    "items": _REFERENCE,
    "minItems": 1,
    "uniqueItems": True,
}
_INPUT = _INPUTS | {"description": "a stage above, or one of its outputs: `calibrate.model`", "maxItems": 1}


def manifest_schema(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of manifests: every kind's options and inputs; unknown kinds pass."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ptpipe manifest",
        "type": "object",
        "required": ["version", "stages"],
        "additionalProperties": False,
        "properties": {
            "version": {"const": VERSION, "description": "format of manifests"},
            "name": {"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$", "description": "prefix of the run ids"},
            "seed": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_SEED,
                "description": "seed of all random numbers",
            },
            "plugins": {
                "type": "array",
                "items": {"type": "string", "minLength": 1},
                "description": "your own plugins: files (./prune.py, relative to this manifest) or module names",
            },
            "stages": {
                "type": "object",
                "description": "run in this order; needs refer to stages above only",
                "minProperties": 1,
                "propertyNames": {"pattern": f"^{ID_PATTERN.pattern}$"},
                "additionalProperties": {"$ref": "#/$defs/stage"},
            },
        },
        "$defs": {
            "stage": _stage_schema(vocabulary),
            "input": _INPUT,
            "inputs": _INPUTS,
            **{kind: _options(stage) for kind, stage in sorted(vocabulary.stages.items())},
        },
    }


def _stage_schema(vocabulary: Vocabulary) -> dict[str, Any]:
    kinds = sorted(vocabulary.stages)
    return {
        "type": "object",
        "required": ["uses"],
        "additionalProperties": False,
        "properties": {
            "uses": {"anyOf": [{"enum": kinds}, {"type": "string"}], "description": "the stage's kind"},
            "needs": {
                "type": ["object", "null"],
                "description": "inputs by name; may be omitted where exactly one output above fits",
            },
            "with": {"type": ["object", "null"], "description": "options"},
        },
        "allOf": [_rule(vocabulary.stages[kind]) for kind in kinds],
    }


def option_rows(stage: Stage[..., object]) -> list[dict[str, str]]:
    """Return a kind's options for a table: name, type, default, help. Nested options have dotted names."""
    schema = stage.config_type.model_json_schema()
    definitions = schema.get("$defs", {})
    return _rows(_resolved(schema, definitions), definitions, "")


def _rule(stage: Stage[..., object]) -> dict[str, Any]:
    ports = {port.name: {"$ref": f"#/$defs/{'inputs' if port.several else 'input'}"} for port in stage.inputs}
    return {
        "if": {"properties": {"uses": {"const": stage.kind}}, "required": ["uses"]},
        "then": {
            "required": ["with"] if _has_required(stage) else [],
            "description": stage.help,
            "properties": {
                "needs": {"properties": ports, "additionalProperties": False},
                "with": {"$ref": f"#/$defs/{stage.kind}"},
            },
        },
    }


def _has_required(stage: Stage[..., object]) -> bool:
    return any(field.is_required() for field in stage.config_type.model_fields.values())


def _options(stage: Stage[..., object]) -> dict[str, Any]:
    """Return the options' schema; its definitions are nested under the kind's name."""
    text = json.dumps(stage.config_type.model_json_schema())
    schema: dict[str, Any] = json.loads(text.replace('"#/$defs/', f'"#/$defs/{stage.kind}/$defs/'))
    schema["description"] = stage.help
    if "type" in schema and not _has_required(stage):
        schema["type"] = ["object", "null"]  # an empty `with:`
    return schema


def _rows(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str, above: tuple[Mapping[str, Any], ...] = ()
) -> list[dict[str, str]]:
    """Return the rows of a group of options; `above`: the groups that it is in, which may be inside it again."""
    rows = []
    required = schema.get("required", [])
    above = (*above, schema)
    for name, option in schema.get("properties", {}).items():
        default = "(required)" if name in required else _yaml(option["default"]) if "default" in option else ""
        nested = _choices(option, definitions)
        groups = [choice for choice in nested if "properties" in choice]
        again = " (as above)" if any(group in above for group in groups) else ""
        rows.append(
            {
                "name": prefix + name,
                "type": _type_words(option, definitions) + again,
                "default": "" if groups and name not in required and option.get("default") is not None else default,
                "help": option.get("description", ""),
            }
        )
        values = [choice["additionalProperties"] for choice in nested if choice.get("additionalProperties")]
        by_name = [_resolved(value, definitions) for value in values if isinstance(value, Mapping)]
        for step, inner in (*((".", group) for group in groups), *((".*.", group) for group in by_name)):
            rows += _rows(inner, definitions, f"{prefix}{name}{step}", above) if inner not in above else []
    return rows


def _choices(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that a value may be of: of a union several."""
    schema = _resolved(schema, definitions)
    parts = schema.get("anyOf") or schema.get("oneOf")
    return [choice for part in parts for choice in _choices(part, definitions)] if parts else [schema]


def _yaml(value: JSON) -> str:
    """Return a value as YAML."""
    return value if isinstance(value, str) and value and scalar(value) == value else json.dumps(value)


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    resolved: Mapping[str, Any] = definitions[reference.rpartition("/")[2]] if reference else schema
    return resolved


def _type_words(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], above: tuple[Mapping[str, Any], ...] = ()
) -> str:
    """Return a JSON schema's type in words: `integer >= 1`, `none | linear`, `list of text`.

    `above`: the types that it is in, which may be inside it again.
    """
    schema = _resolved(schema, definitions)
    if schema in above:
        return "the same"
    above = (*above, schema)
    if len(choices := _choices(schema, definitions)) > 1:
        return " or ".join(dict.fromkeys(_type_words(choice, definitions, above) for choice in choices))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return "any value"
    if kind == "array":
        inner: Mapping[str, Any] = schema.get("items") or next(iter(schema.get("prefixItems", [])), {})
        return f"list of {_type_words(inner, definitions, above)}"
    if kind == "null":
        return "null"
    if kind == "object" and "properties" not in schema and isinstance(schema.get("additionalProperties"), Mapping):
        return f"mapping to {_type_words(schema['additionalProperties'], definitions, above)}"
    if kind == "object":
        return "group"
    limits = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    bounds = " and ".join(f"{sign} {schema[name]}" for name, sign in limits if name in schema)
    return f"{'text' if kind == 'string' else kind}{f' {bounds}' if bounds else ''}"
