"""Signatures that make a kind, and those that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import pytest
from pydantic import ValidationError

from ptpipe import Artifact, Context, StageConfig, Verdict, stage
from ptpipe.stages import Port


@dataclass
class Number(Artifact):
    value: int

    def save(self, folder: Path) -> None:
        (folder / "value").write_text(str(self.value))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(int((folder / "value").read_text()))


class Other(Number):
    pass


class Pair(NamedTuple):
    low: Number
    high: Other


class Strict(Verdict):
    pass


class Alone(NamedTuple):
    only: Number


class WidthConfig(StageConfig):
    width: int = 3


def test_ports_are_read_from_the_signature():
    @stage("a.b", version=4, per_machine=True, packages=["torch"])
    def some(
        config: WidthConfig, ctx: Context, x: Number, many: Sequence[Other], *, maybe: Number | None = None
    ) -> Pair:
        """Do a thing.

        More of it.
        """
        return Pair(x, many[0])

    assert some.inputs == (Port("x", Number), Port("many", Other, several=True), Port("maybe", Number, optional=True))
    assert some.outputs == (Port("low", Number), Port("high", Other))
    assert (some.kind, some.version, some.per_machine, some.packages) == ("a.b", 4, True, ("torch",))
    assert some.config_type is WidthConfig
    assert some.help == "Do a thing.\n\nMore of it."
    assert not some.is_gate


def test_a_stage_stays_callable(tmp_path):
    @stage("a.double")
    def double(config: WidthConfig, ctx: Context, x: Number) -> Number:
        return Number(config.width * x.value)

    ctx = Context("t", "a.double", 0, tmp_path)
    assert double(WidthConfig(width=2), ctx, Number(21)) == Number(42)
    assert double(WidthConfig(width=2), ctx, x=Number(21)) == Number(42)


def test_a_stage_with_a_verdict_is_a_gate():
    @stage("gate.strict")
    def strict(config: StageConfig, ctx: Context) -> Strict:
        raise NotImplementedError

    assert strict.is_gate


def test_outputs_are_named_and_checked():
    @stage("a.one")
    def one(config: StageConfig, ctx: Context) -> Number:
        raise NotImplementedError

    @stage("a.two")
    def two(config: StageConfig, ctx: Context) -> Pair:
        raise NotImplementedError

    @stage("a.alone")
    def alone(config: StageConfig, ctx: Context) -> Alone:
        raise NotImplementedError

    assert one.named(Number(1)) == {"output": Number(1)}
    assert two.named(Pair(Number(1), Other(2))) == {"low": Number(1), "high": Other(2)}
    assert two.named((Number(1), Other(2))) == {"low": Number(1), "high": Other(2)}
    assert alone.named(Alone(Number(1))) == {"only": Number(1)}
    with pytest.raises(TypeError, match=r"a\.one promised output: Number, returned float"):
        one.named(1.0)
    with pytest.raises(TypeError, match=r"a\.one promised output: Number, returned NoneType"):
        one.named(None)
    with pytest.raises(TypeError, match=r"a\.two promised high: Other, returned Number"):
        two.named((Number(1), Number(2)))
    with pytest.raises(TypeError, match=r"a\.two promised 2 outputs and returned Number"):
        two.named(Number(1))


@pytest.mark.parametrize("kind", ["train", "Train.it", "train.it.now", "train.", ".it", "1train.it", "train it.x", ""])
def test_a_kind_is_family_dot_thing(kind):
    with pytest.raises(TypeError, match=r"family\.thing"):
        stage(kind)


def first_parameter(ctx: Context, config: StageConfig) -> Number: ...
def no_parameters() -> Number: ...
def wrong_context(config: StageConfig, ctx: int) -> Number: ...
def wrong_config(config: dict[str, int], ctx: Context) -> Number: ...
def bare_port(config: StageConfig, ctx: Context, x) -> Number: ...
def wrong_port(config: StageConfig, ctx: Context, x: int) -> Number: ...
def two_types(config: StageConfig, ctx: Context, x: Number | Verdict) -> Number: ...
def star_port(config: StageConfig, ctx: Context, *x: Number) -> Number: ...
def keywords(config: StageConfig, ctx: Context, **x: Number) -> Number: ...
def by_position(config: StageConfig, ctx: Context, x: Number, /) -> Number: ...
def no_return(config: StageConfig, ctx: Context): ...
def wrong_return(config: StageConfig, ctx: Context) -> tuple[Number, Number]: ...
def unknown_name(config: StageConfig, ctx: Context, x: Unknown) -> Number: ...  # noqa: F821  # that is the mistake


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (first_parameter, "the first two parameters must be config and ctx"),
        (no_parameters, "the first two parameters must be config and ctx"),
        (wrong_context, "the first two parameters must be config and ctx"),
        (wrong_config, "must be annotated with a StageConfig subclass"),
        (bare_port, "port x must be an Artifact"),
        (wrong_port, "port x must be an Artifact"),
        (two_types, "port x must be an Artifact"),
        (star_port, "can't be an input"),
        (keywords, "can't be an input"),
        (by_position, "first two parameters|can't be an input"),
        (no_return, "the return annotation must be"),
        (wrong_return, "the return annotation must be"),
        (unknown_name, "'Unknown' is not known when the plugin is loaded; import it at the top"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_signature_that_breaks_the_rules_is_found_at_import(function, message):
    with pytest.raises(TypeError, match=message) as raised:
        stage("a.b")(function)
    assert str(raised.value).startswith("a.b: ")


def test_options_are_frozen_known_and_finite():
    class RateConfig(StageConfig):
        lr: float = 0.1

    with pytest.raises(ValidationError, match="frozen"):
        RateConfig().lr = 1.0
    with pytest.raises(ValidationError, match="not permitted"):
        RateConfig(learning_rate=1.0)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="finite"):
            RateConfig(lr=value)
