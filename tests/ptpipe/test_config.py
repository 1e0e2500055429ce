"""Options that stay out of the key, and those that enter it resolved."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from pydantic import ConfigDict, Field, RootModel
from pydantic import dataclasses as pydantic_dataclasses

from ptpipe import StageConfig
from ptpipe.config import options_as_json, read_options


class Inner(StageConfig):
    unkeyed_options: ClassVar[frozenset[str]] = frozenset({"pause_s"})

    pause_s: float = 1.0
    depth: int = 2


class Outer(StageConfig):
    unkeyed_options: ClassVar[frozenset[str]] = frozenset({"every"})

    every: int = Field(1, alias="every-s")
    device: str = "auto"
    inner: Inner = Inner()
    several: tuple[Inner, ...] = (Inner(), Inner(depth=3))
    by_name: dict[str, Inner] = Field({"a": Inner()})

    def resolved_options(self):
        return {"device": "cpu"}


def test_what_enters_the_key():
    assert Outer().keyed_options() == {
        "device": "cpu",
        "inner": {"depth": 2},
        "several": [{"depth": 2}, {"depth": 3}],
        "by_name": {"a": {"depth": 2}},
    }
    assert Outer().unkeyed_values() == {"every": 1}


class SetsConfig(StageConfig):
    layers: frozenset[str] = frozenset()
    pairs: tuple[set[tuple[int, str]], ...] = ()


def test_sets_are_written_in_one_order_in_every_process():
    names = [f"layer{number:02}" for number in range(30)]
    pairs = [(number, name) for number, name in enumerate(names[:10])]
    config = SetsConfig(layers=frozenset(reversed(names)), pairs=(set(pairs),))
    written = {"layers": names, "pairs": [[list(pair) for pair in pairs]]}
    assert options_as_json(config) == config.keyed_options() == written
    assert read_options(SetsConfig, written) == config


@dataclass
class Plain:
    count: int
    names: Annotated[frozenset[str], Field(alias="the-names")]


@pydantic_dataclasses.dataclass(config=ConfigDict(extra="forbid"))
class Checked:
    names: frozenset[str] = Field(alias="the-names")
    inner: Inner = Inner()


class SetsInsideConfig(StageConfig):
    plain: Plain
    checked: Checked
    root: RootModel[frozenset[str]]
    by_name: RootModel[dict[str, frozenset[str]]]
    several: deque[frozenset[str]]


def test_sets_inside_anything_are_written_in_one_order_in_every_process():
    names = [f"layer{number:02}" for number in range(30)]
    written = {
        "plain": {"count": 1, "the-names": names},
        "checked": {"the-names": names, "inner": {"pause_s": 1.0, "depth": 2}},
        "root": names,
        "by_name": {"root": names},
        "several": [names],
    }
    config = read_options(SetsInsideConfig, written)
    assert options_as_json(config) == written
    assert config.keyed_options() == written | {"checked": {"the-names": names, "inner": {"depth": 2}}}


def test_an_option_that_does_not_exist_is_the_authors_mistake():
    with pytest.raises(TypeError, match=r"Wrong.unkeyed_options names no option: evry"):

        class Wrong(StageConfig):
            unkeyed_options: ClassVar[frozenset[str]] = frozenset({"evry"})


PLUGIN = """
from __future__ import annotations
import json
from dataclasses import dataclass, field
from typing import ClassVar
from ptpipe import Artifact, Context, StageConfig, StageError, stage


@dataclass
class Set(Artifact):
    num_workers: int = 0

    def save(self, folder):
        (folder / "set").write_text("content")

    @classmethod
    def load(cls, folder):
        return cls()

    def with_options(self, options):
        return Set(options.get("num_workers", 0))


class LoadConfig(StageConfig):
    unkeyed_options: ClassVar[frozenset[str]] = frozenset({"num_workers"})
    num_workers: int = 1


@stage("my.load")
def load(config: LoadConfig, ctx: Context) -> Set:
    return Set(config.num_workers)


@stage("my.filter")
def filter(config: StageConfig, ctx: Context, data: Set) -> Set:
    return data


class UseConfig(StageConfig):
    broken: bool = False
    value: int = 0

    def resolved_options(self):
        if self.broken:
            raise ValueError("no such thing")
        return {}


@stage("my.use")
def use(config: UseConfig, ctx: Context, data: Set) -> Set:
    ctx.metric(num_workers=data.num_workers)
    return data
"""


@pytest.fixture
def own(project):
    project.plugin.write_text(PLUGIN)
    project.write(
        "load: {uses: my.load}\nkept: {uses: my.filter, needs: {data: load}}\nuse: {uses: my.use, needs: {data: kept}}"
    )
    return project


def test_a_cached_value_follows_the_present_options(own):
    assert own.run().stages["use"].metrics == {"num_workers": 1}
    assert own.outcomes(own.run({"load.num_workers": 5})) == dict.fromkeys(["load", "kept", "use"], "cached")
    result = own.run({"load.num_workers": 5, "use.value": 1})
    assert own.outcomes(result) == {"load": "cached", "kept": "cached", "use": "done"}
    assert result.stages["use"].metrics == {"num_workers": 5}, "through a stage that doesn't know the option"


def test_resolving_that_breaks_is_the_plugins_fault(own):
    with pytest.raises(
        Exception, match=r"resolved_options\(\) of my.use \(plugin ./toy.py\) failed: ValueError: no such"
    ):
        own.run({"use.broken": True})
