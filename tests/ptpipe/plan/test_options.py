"""Options as a manifest gives them, against a config type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import pytest
from pydantic import AfterValidator, Field, SecretStr, computed_field, field_validator, model_validator

from ptpipe import Context, StageConfig, Verdict, stage
from ptpipe.plan.options import changed_option, config_problems


class InnerConfig(StageConfig):
    renamed_options: ClassVar[Mapping[str, str]] = {"breadth": "width"}

    width: int = 3
    deep: float


class PlanConfig(StageConfig):
    name: Literal["cosine", "step"] = "cosine"
    share: float | None = Field(None, gt=0, lt=1)
    first: int | None = Field(None, ge=3)


class OptionsConfig(StageConfig):
    plan: PlanConfig | None = None
    either: int | Literal["auto"] = "auto"
    flag_or_word: Literal["auto"] | bool = "auto"
    maybe: float | None = None
    many: tuple[int, ...] = ()
    some: tuple[int, ...] = Field((1,), min_length=1, max_length=3)
    group_or_word: InnerConfig | Literal["none"] = "none"
    group: InnerConfig | None = None
    by_name: dict[str, float] = Field({}, description="weights")
    groups: dict[str, InnerConfig] = Field({}, description="groups by name")
    flag: bool = False
    word: Literal["fbgemm", "qnnpack"] = "fbgemm"
    two: tuple[int, int] = (1, 2)
    rate: float = Field(1.0, gt=0, lt=10)
    text: str = ""
    odd: int = 1

    @field_validator("odd")
    @classmethod
    def _is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("an odd number is needed")
        return value

    @model_validator(mode="after")
    def _rate_fits(self) -> OptionsConfig:
        if self.rate > 5 and self.flag:
            raise ValueError("rate above 5 and flag do not go together")
        return self


@stage("a.b")
def some(config: OptionsConfig, ctx: Context) -> Verdict:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "place", "message", "suggestion"),
    [
        ({"group": {"deep": 1, "breadth": 2}}, ("group", "breadth"), "group.breadth: renamed to width", None),
        ({"either": "foo"}, ("either",), "either: should be a whole number or 'auto', not \"foo\"", None),
        ({"either": 1.5}, ("either",), "either: should be a whole number or 'auto', not 1.5", None),
        ({"either": "aut"}, ("either",), "either: should be a whole number or 'auto', not \"aut\"", "auto"),
        (
            {"flag_or_word": "no"},
            ("flag_or_word",),
            "flag_or_word: should be 'auto' or true or false, not \"no\" (in YAML 1.2 write false)",
            None,
        ),
        ({"maybe": "x"}, ("maybe",), 'maybe: should be a number, not "x"', None),
        ({"many": [1, "a"]}, ("many", 1), 'many.1: should be a whole number, not "a"', None),
        ({"plan": "cosine"}, ("plan",), 'plan: should be a mapping, not "cosine" (write plan: {name: cosine})', None),
        ({"plan": "a: b"}, ("plan",), 'plan: should be a mapping, not "a: b"', None),
        ({"plan": 2}, ("plan",), "plan: should be a mapping, not 2", None),
        ({"plan": 0.5}, ("plan",), "plan: should be a mapping, not 0.5 (write plan: {share: 0.5})", None),
        ({"plan": True}, ("plan",), "plan: should be a mapping, not true (write plan: {})", None),
        ({"plan": False}, ("plan",), "plan: should be a mapping, not false", None),
        ({"group": True}, ("group",), "group: should be a mapping, not true", None),
        ({"group": "x"}, ("group",), 'group: should be a mapping, not "x"', None),
        ({"many": 3}, ("many",), "many: should be a list, not 3", None),
        ({"some": []}, ("some",), "some: should be a list of at least 1 item, not 0", None),
        ({"some": [1, 2, 3, 4]}, ("some",), "some: should be a list of at most 3 items, not 4", None),
        ({"many": "x"}, ("many",), 'many: should be a list, not "x" (a list of one is written [x])', None),
        ({"many": "x y: [z]"}, ("many",), 'many: should be a list, not "x y: [z]"', None),
        ({"two": [1]}, ("two",), "two: more values are required", None),
        ({"group_or_word": 3}, ("group_or_word",), "group_or_word: should be a mapping or 'none', not 3", None),
        (
            {"group_or_word": {"width": "x", "deep": 1}},
            ("group_or_word", "width"),
            'group_or_word.width: should be a whole number, not "x"',
            None,
        ),
        ({"group": {"wdth": 2, "deep": 1}}, ("group", "wdth"), "unknown option 'group.wdth' of a.b", "width"),
        ({"group": {}}, ("group",), "option 'group.deep' of a.b is required", None),
        ({"by_name": {"x": "z"}}, ("by_name", "x"), 'by_name.x: should be a number, not "z"', None),
        (
            {"groups": {"x": {"deep": 1, "wdth": 2}}},
            ("groups", "x", "wdth"),
            "unknown option 'groups.x.wdth' of a.b",
            "width",
        ),
        (
            {"groups": {"x": {"deep": 1, "breadth": 2}}},
            ("groups", "x", "breadth"),
            "groups.x.breadth: renamed to width",
            None,
        ),
        ({"groups": {"x": {}}}, ("groups", "x"), "option 'groups.x.deep' of a.b is required", None),
        ({"flag": "yes"}, ("flag",), 'flag: should be true or false, not "yes" (in YAML 1.2 write true)', None),
        ({"flag": 1}, ("flag",), "flag: should be true or false, not 1", None),
        ({"word": "fbgem"}, ("word",), "word: should be 'fbgemm' or 'qnnpack', not \"fbgem\"", "fbgemm"),
        ({"rate": "0.5"}, ("rate",), 'rate: should be a number, not "0.5" (without quotes it is a number)', None),
        ({"rate": 0}, ("rate",), "rate: should be greater than 0, not 0", None),
        ({"rate": 10}, ("rate",), "rate: should be less than 10, not 10", None),
        ({"rate": float("nan")}, ("rate",), "rate: should be a finite number, not NaN", None),
        ({"rate": float("inf")}, ("rate",), "rate: should be a finite number, not Infinity", None),
        ({"rate": [1]}, ("rate",), "rate: should be a number, not a list", None),
        ({"rate": {}}, ("rate",), "rate: should be a number, not a mapping", None),
        ({"text": 3}, ("text",), "text: should be text, not 3", None),
        ({"text": None}, ("text",), "text: should be text, not null", None),
        ({"odd": 2}, ("odd",), "odd: an odd number is needed", None),
        ({"rate": 6, "flag": True}, (), "rate above 5 and flag do not go together", None),
        ({"rat": 1}, ("rat",), "unknown option 'rat' of a.b", "rate"),
        ({"zebra": 1}, ("zebra",), "unknown option 'zebra' of a.b", None),
    ],
)
def test_one_mistake_gives_one_message(options, place, message, suggestion):
    config, problems = config_problems(some, options)
    assert config is None
    assert [problem[:3] for problem in problems] == [(place, message, suggestion)]


def test_several_mistakes_give_several_messages():
    _, problems = config_problems(some, {"rat": 1, "text": 3, "many": ["a", "b"], "group": {"width": 1.5}})
    assert sorted(problem.path for problem in problems) == [
        ("group",),
        ("group", "width"),
        ("many", 0),
        ("many", 1),
        ("rat",),
        ("text",),
    ]
    assert [problem.path for problem in problems if problem.at_key] == [("rat",)]


def test_long_values_are_cut_short():
    _, (problem,) = config_problems(some, {"rate": "a" * 500})
    assert len(problem.message) < 120


def test_json_is_taken_at_its_word():
    options = {"rate": 1, "many": [1, 2], "either": 3, "group": {"deep": 2}, "by_name": {"a": 1}}
    config, problems = config_problems(some, options)
    assert not problems
    assert (config.rate, config.many, config.either, config.group.deep) == (1.0, (1, 2), 3, 2.0)
    assert isinstance(config.rate, float)


class AliasConfig(StageConfig):
    start: int = Field(1, alias="from")

    @computed_field
    @property
    def twice(self) -> int:
        return 2 * self.start


def test_options_of_a_plan_can_be_validated_again():
    @stage("a.alias")
    def aliased(config: AliasConfig, ctx: Context) -> Verdict:
        raise NotImplementedError

    from ptpipe.plan.bind import PlannedStage

    config, _ = config_problems(aliased, {"from": 5})
    planned = PlannedStage("x", aliased, config, {})
    assert planned.options == {"from": 5}
    assert config_problems(aliased, planned.options) == (config, [])


class PassedConfig(StageConfig):
    """Options that their stage gets as they were validated, whatever their types."""

    lam: float = Field(0.5, alias="lambda")
    names: frozenset[str] = frozenset({"b", "a"})
    path: Path | None = None
    pause: timedelta = timedelta(seconds=3)
    group: PlanConfig | None = None
    number: int | float = 2
    token: SecretStr | None = None

    @computed_field
    def twice(self) -> float:
        return 2 * self.lam


@pytest.mark.parametrize(
    "options", [{}, {"lambda": 2, "group": {"name": "step"}, "number": 2.0, "names": ["c"], "path": "x"}]
)
def test_options_that_their_stage_gets(options):
    config, problems = config_problems(replace(some, config_type=PassedConfig), options)
    assert (problems, changed_option("a.b", config)) == ([], "")


class ChangedConfig(StageConfig):
    percent: Annotated[float, AfterValidator(lambda value: value / 100)] = 0
    token: SecretStr | None = None
    hidden: int = Field(5, exclude=True)


class WrittenConfig(StageConfig):
    size: int = Field(1, validation_alias="num")


class RuleConfig(StageConfig):
    low: int = 0
    high: int = 9

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if len(self.model_fields_set) > 1:
            raise ValueError("low and high do not go together")
        return self


@pytest.mark.parametrize(
    ("config_type", "options", "message"),
    [
        (
            ChangedConfig,
            {"percent": 30},
            "option 'percent' of a.b is 0.3, and validated again in the stage it is 0.003",
        ),
        (ChangedConfig, {"token": "abc"}, "option 'token' of a.b is a secret, which no stage and no key gets"),
        (ChangedConfig, {"hidden": 7}, "option 'hidden' of a.b has `exclude`, which hides it from the stage"),
        (WrittenConfig, {}, "option 'size' of a.b is refused when validated again in the stage: Extra inputs"),
        (RuleConfig, {}, "the options of a.b are refused when validated again in the stage: low and high do not go"),
    ],
)
def test_options_that_would_be_others_in_their_stage(config_type, options, message):
    config, problems = config_problems(replace(some, config_type=config_type), options)
    assert problems == []
    changed = changed_option("a.b", config)
    assert changed.startswith(message)
    assert "abc" not in changed
