"""A plugin without torch that the core's tests run: numbers, and every way for a stage to end."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from ptpipe import Artifact, Context, Decision, StageConfig, StageError, Verdict, hookimpl, stage


@dataclass
class Number(Artifact):
    value: float

    def save(self, folder: Path) -> None:
        (folder / "number.json").write_text(json.dumps(self.value))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(json.loads((folder / "number.json").read_text()))

    def summary(self) -> dict[str, object]:
        return {"value": self.value}


class Text(Artifact):
    """Another type, so that something can be of the wrong one."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save(self, folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "text.txt").write_text(self.text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls((folder / "deep" / "text.txt").read_text(encoding="utf-8"))


class MakeConfig(StageConfig):
    value: float = Field(1.0, ge=0, description="the number")
    note: str = Field("", description="a notice to give")
    mode: Literal["plain", "loud"] = Field("plain", description="whether to say it in the log")


@stage("toy.make")
def make(config: MakeConfig, ctx: Context) -> Number:
    """Make a number."""
    ctx.progress(1, 2, "digits")
    ctx.metric(value=config.value, seed=ctx.seed)
    if config.note:
        ctx.notice(config.note)
    ctx.log("made it")
    return Number(config.value)


@stage("toy.add")
def add(config: StageConfig, ctx: Context, a: Number, b: Number) -> Number:
    """Add two numbers."""
    return Number(a.value + b.value)


class Pair(NamedTuple):
    low: Number
    high: Number


@stage("toy.split")
def split(config: StageConfig, ctx: Context, a: Number, bias: Number | None = None) -> Pair:
    """Halve a number twice."""
    return Pair(Number(a.value / 4), Number(a.value / 2 + (bias.value if bias else 0)))


@stage("toy.total")
def total(config: StageConfig, ctx: Context, numbers: Sequence[Number]) -> Text:
    """Add up several numbers and say what they are called."""
    ctx.metric(digests={port: list(digests) for port, digests in ctx.input_digests.items()})
    return Text(f"{'+'.join(ctx.input_names['numbers'])}={sum(number.value for number in numbers)}")


class GateConfig(StageConfig):
    least: float = Field(description="the least that will do")
    unsure_at: float | None = Field(None, description="a number that nobody can judge")
    fail_undecided: bool = Field(False, description="whether such a number ends the run with exit code 4")


class Strict(Verdict):
    """A verdict of another name is a verdict too."""


@stage("toy.gate")
def gate(config: GateConfig, ctx: Context, a: Number) -> Strict:
    """Refuse small numbers."""
    decision = Decision.PASSED if a.value >= config.least else Decision.REFUSED
    if a.value == config.unsure_at:
        decision = Decision.UNDECIDED
    return Strict(decision, f"{a.value} against {config.least}", fail_undecided=config.fail_undecided)


@stage("toy.dice")
def dice(config: StageConfig, ctx: Context) -> Number:
    """Give another number each time: a stage that is not reproducible."""
    return Number(int.from_bytes(os.urandom(4), "big"))


@stage("toy.clock", per_machine=True)
def clock(config: StageConfig, ctx: Context, a: Number) -> Number:
    """Measure something."""
    return Number(time.time_ns())


class FailConfig(StageConfig):
    how: str = Field("error", description="what goes wrong")


class Bad(Number):
    """An artifact that can't be stored."""

    def save(self, folder: Path) -> None:
        if self.value == 1:
            (folder / "link").symlink_to("/etc/hostname")
        else:
            raise OSError(errno.ENOSPC, "No space left on device")


class MuteError(Exception):
    """Can't even be asked what is wrong."""

    def __str__(self) -> str:
        raise ValueError("no words")


def _bug(amount: int) -> float:
    return 1 / amount


@stage("toy.fail")
def fail(config: FailConfig, ctx: Context, a: Number | None = None) -> Number:
    """Fail in a way of your choice."""
    ctx.metric(before=1)
    match config.how:
        case "error":
            raise StageError("told to fail\nand a second line")
        case "bug":
            _bug(0)
        case "mute":
            raise MuteError
        case "exit":
            sys.exit(0)
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "terminate":
            signal.raise_signal(signal.SIGTERM)
    return Number(1.0)


@stage("toy.odd")
def odd(config: FailConfig, ctx: Context) -> Number:
    """Do what a stage must not."""
    match config.how:
        case "link":
            return Bad(1)
        case "full disk":
            return Bad(2)
        case "wrong type":
            return Text("no number")  # type: ignore[return-value]
        case "metric":
            ctx.metric(path=Path())  # type: ignore[arg-type]
        case "print":
            print("on stdout")
        case "say rank":
            return Number(10 * ctx.rank + ctx.num_workers)
    return Number(float("nan"))


class SlowConfig(StageConfig):
    unkeyed_options: ClassVar[frozenset[str]] = frozenset({"pause_s"})

    steps: int = Field(5, description="how many")
    pause_s: float = Field(0.05, description="how long each takes")


@stage("toy.slow")
def slow(config: SlowConfig, ctx: Context) -> Text:
    """Work in steps, and go on after a kill from the step that was reached."""
    path = ctx.scratch / "step"
    start = int(path.read_text()) if path.exists() else 0
    ctx.metric(started_at=start)
    for step in range(start, config.steps):
        time.sleep(config.pause_s)
        temporary = path.with_suffix(".new")
        temporary.write_text(str(step + 1))
        temporary.replace(path)
        ctx.progress(step + 1, config.steps, "steps")
    return Text(chr(ord("a") + config.steps % 26) * 100_000)


@hookimpl
def ptpipe_stages() -> list[object]:
    return [make, add, split, total, gate, dice, clock, fail, odd, slow]
