"""The JSON Schema that editors check manifests by, and the tables of options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from ptpipe import Context, StageConfig, Verdict, stage
from ptpipe.manifest.yaml import read
from ptpipe.plan.schema import manifest_schema, option_rows
from ptpipe.plan.vocabulary import check_options, load_vocabulary

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed; `pip install -e .[dev]` brings it")

MANIFESTS = sorted((Path(__file__).parents[3] / "manifests").glob("*.yaml"))


@pytest.fixture
def validator(project):
    """Says what an editor would underline in a manifest of toy stages."""
    schema = json.loads(json.dumps(manifest_schema(load_vocabulary(["./toy.py"], project.folder))))
    jsonschema.Draft202012Validator.check_schema(schema)
    checker = jsonschema.Draft202012Validator(schema)

    def check(stages, **more):
        document = {"version": 1, "stages": read(stages, "m").value, **more}
        return ["/".join(map(str, error.absolute_path)) for error in checker.iter_errors(document)]

    return check


@pytest.mark.parametrize(
    "stages",
    [
        "{one: {uses: toy.make}}",
        "{one: {uses: toy.make, with: {value: 3, mode: loud}}}",
        "{sum: {uses: toy.add, needs: {a: one, b: pair.low}}}",
        "{all: {uses: toy.total, needs: {numbers: [one, two]}}}",
        "{all: {uses: toy.total, needs: {numbers: one}}}",
        "{gate: {uses: toy.gate, with: {least: 3, unsure_at: null}}}",
        "{other: {uses: acme.unknown, with: {anything: goes}}}",
        "{other: {uses: acme.unknown, with: null, needs: null}}",
        "{one: {uses: toy.make, with: null, needs: null}}",
        "{sum: {uses: toy.add, needs: {a: [one], b: two}}}",
    ],
)
def test_good_stages_pass(validator, stages):
    assert validator(stages) == []


@pytest.mark.parametrize(
    ("stages", "places"),
    [
        ("{one: {}}", ["stages/one"]),
        ("{one: {uses: toy.make, wiht: {}}}", ["stages/one"]),
        ("{one: {uses: toy.make, with: {valeu: 3}}}", ["stages/one/with"]),
        ("{one: {uses: toy.make, with: {value: x}}}", ["stages/one/with/value"]),
        ("{one: {uses: toy.make, with: {value: -1}}}", ["stages/one/with/value"]),
        ("{one: {uses: toy.make, with: {mode: quiet}}}", ["stages/one/with/mode"]),
        ("{sum: {uses: toy.add, needs: {c: one}}}", ["stages/sum/needs"]),
        ("{sum: {uses: toy.add, needs: {a: [one, two]}}}", ["stages/sum/needs/a"]),
        ("{sum: {uses: toy.add, needs: {a: [], b: ''}}}", ["stages/sum/needs/a", "stages/sum/needs/b"]),
        ("{all: {uses: toy.total, needs: {numbers: []}}}", ["stages/all/needs/numbers"]),
        ("{all: {uses: toy.total, needs: {numbers: [one, one]}}}", ["stages/all/needs/numbers"]),
        (
            "{all: {uses: toy.total, needs: {numbers: [3, '']}}}",
            ["stages/all/needs/numbers/0", "stages/all/needs/numbers/1"],
        ),
        ("{gate: {uses: toy.gate}}", ["stages/gate"]),
        ("{gate: {uses: toy.gate, with: null}}", ["stages/gate/with"]),
        ("{gate: {uses: toy.gate, with: {}}}", ["stages/gate/with"]),
        ("{One: {uses: toy.make}}", ["stages"]),
        ("{}", ["stages"]),
    ],
)
def test_wrong_stages_are_underlined(validator, stages, places):
    assert validator(stages) == places


def test_the_top_is_checked(validator):
    good = "{one: {uses: toy.make}}"
    assert validator(good, name="a-b", seed=7, plugins=["./a.py"]) == []
    assert validator(good, name="a/b") == ["name"]
    assert validator(good, plugins=[""]) == ["plugins/0"]
    assert validator(good, seed=-1) == ["seed"]
    assert validator(good, sede=1) == [""]
    assert validator(good, version=2) == ["version"]


@pytest.fixture(scope="module")
def whole_schema():
    """The schema of all built-in stages."""
    vocabulary = load_vocabulary()
    assert not vocabulary.broken
    schema = json.loads(json.dumps(manifest_schema(vocabulary)))
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_our_own_manifests_pass(path, whole_schema):
    document = read(path.read_text(encoding="utf-8"), path.name).value
    jsonschema.Draft202012Validator(whole_schema).validate(document)


def test_every_definition_that_is_referred_to_is_there(whole_schema):
    schema = whole_schema
    text = json.dumps(schema)
    for reference in {part.partition('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        place = schema
        for name in reference.split("/"):
            place = place[name]


class InnerConfig(StageConfig):
    depth: int = Field(2, ge=1, le=9, description="how deep")


class TableConfig(StageConfig):
    needed: float = Field(gt=0, lt=1, description="must be there")
    word: Literal["a", "b"] = Field("a", description="one of two")
    number_like: str = Field("1e3", description="text that looks like a number")
    empty: str = Field("", description="no text")
    maybe: int | None = Field(None, description="or not")
    many: tuple[str, ...] = Field(("x",), description="several")
    weights: dict[str, float] = Field({}, description="by name")
    made: list[int] = Field(default_factory=list, description="worked out")
    group: InnerConfig = Field(InnerConfig(), description="a group")
    no_group: InnerConfig | None = Field(None, description="a group or none")
    groups: dict[str, InnerConfig] = Field({}, description="groups by name")


@stage("a.table")
def table(config: TableConfig, ctx: Context) -> Verdict:
    raise NotImplementedError


def test_a_table_of_options():
    rows = [(row["name"], row["type"], row["default"]) for row in option_rows(table)]
    assert rows == [
        ("needed", "number > 0 and < 1", "(required)"),
        ("word", "a | b", "a"),
        ("number_like", "text", '"1e3"'),
        ("empty", "text", '""'),
        ("maybe", "integer or null", "null"),
        ("many", "list of text", '["x"]'),
        ("weights", "mapping to number", "{}"),
        ("made", "list of integer", ""),
        ("group", "group", ""),
        ("group.depth", "integer >= 1 and <= 9", "2"),
        ("no_group", "group or null", "null"),
        ("no_group.depth", "integer >= 1 and <= 9", "2"),
        ("groups", "mapping to group", "{}"),
        ("groups.*.depth", "integer >= 1 and <= 9", "2"),
    ]
    assert all(row["help"] for row in option_rows(table))


class TreeConfig(StageConfig):
    width: int = 3
    child: TreeConfig | None = None


class ForestConfig(StageConfig):
    tree: TreeConfig = TreeConfig()
    by_name: dict[str, TreeConfig] = Field({})


class OneConfig(StageConfig):
    name: Literal["one"] = "one"
    size: int = 1


class TwoConfig(StageConfig):
    name: Literal["two"]
    depth: int = 2


class UnionConfig(StageConfig):
    part: OneConfig | TwoConfig | None = Field(None, discriminator="name")


@pytest.mark.parametrize(
    ("config_type", "expected"),
    [
        (TreeConfig, {"width": "integer", "child": "group or null (as above)"}),
        (
            ForestConfig,
            {
                "tree": "group",
                "tree.width": "integer",
                "tree.child": "group or null (as above)",
                "by_name": "mapping to group",
                "by_name.*.width": "integer",
                "by_name.*.child": "group or null (as above)",
            },
        ),
        (UnionConfig, {"part": "group or null", "part.name": "two", "part.size": "integer", "part.depth": "integer"}),
    ],
)
def test_groups_inside_themselves_and_groups_to_choose_from(config_type, expected):
    assert {row["name"]: row["type"] for row in option_rows(replace(table, config_type=config_type))} == expected


def test_every_option_of_every_kind_is_explained():
    for stage_ in load_vocabulary().stages.values():
        check_options(stage_.config_type)
        assert stage_.help, stage_.kind
        for row in option_rows(stage_):
            assert row["help"], f"{stage_.kind}: {row['name']} has no description"
            assert "anything" not in row["type"], f"{stage_.kind}: {row['name']}"
