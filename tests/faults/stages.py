"""A plugin without torch that uses all of a store: checkpoints, attachments, deliverables, a gate that refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ptpipe import Artifact, Context, Decision, Event, StageConfig, Verdict, hookimpl, stage
from ptpipe.launching import Call, Store, execute, load_vocabulary


@dataclass
class Numbers(Artifact):
    values: tuple[int, ...]

    def save(self, folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "numbers.json").write_text(json.dumps(self.values))
        (folder / "count.txt").write_text(str(len(self.values)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(tuple(json.loads((folder / "deep" / "numbers.json").read_text())))

    def summary(self) -> dict[str, object]:
        return {"count": len(self.values)}


class Shipped(Numbers):
    """Numbers whose files are deliverables."""

    @classmethod
    def deliverables(cls, folder: Path) -> Iterable[str]:
        return ("count.txt", "deep/numbers.json")


@stage("faults.make")
def make(config: StageConfig, ctx: Context) -> Numbers:
    """Make numbers from the seed, and report in every way."""
    ctx.progress(1, 1, "numbers")
    ctx.metric(first=ctx.seed, mean=ctx.seed / 3)
    ctx.notice("these are no measurements")
    ctx.log("made them")
    return Numbers((ctx.seed, 2, 3))


@stage("faults.train")
def train(config: StageConfig, ctx: Context, numbers: Numbers) -> Numbers:
    """Work in three steps, each with a checkpoint to resume from."""
    checkpoint = ctx.scratch / "checkpoints" / "step.json"
    checkpoint.parent.mkdir(exist_ok=True)
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else list(numbers.values)
    for step in range(len(state), 6):
        state.append(state[-1] * state[-3] % 97 + step)
        temporary = checkpoint.with_suffix(".new")
        temporary.write_text(json.dumps(state))
        temporary.replace(checkpoint)
        if os.environ.get("FAULTS_KILLED_AT") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
    (ctx.scratch / "curve.txt").write_text("a curve")
    ctx.attach(ctx.scratch / "curve.txt")
    ctx.metric(last=state[-1])
    return Numbers(tuple(state))


@stage("faults.export")
def export(config: StageConfig, ctx: Context, numbers: Numbers) -> Shipped:
    """Turn numbers into files to ship; executed by this plugin's own launcher."""
    return Shipped(numbers.values[::-1])


@stage("faults.gate")
def gate(config: StageConfig, ctx: Context, numbers: Shipped) -> Verdict:
    """Refuse them."""
    return Verdict(Decision.REFUSED, f"{numbers.values[0]} is not enough")


@hookimpl
def ptpipe_stages() -> list[object]:
    return [make, train, export, gate]


@hookimpl
def ptpipe_launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path] | None:
    """Execute `faults.export` as a launcher of other processes does: its output is a folder in the scratch folder."""
    if call.kind != "faults.export":
        return None
    store = Store(Path(call.artifacts))
    folder = store.scratch(call.key)
    for name in ("part", "outputs"):  # of an attempt that was killed
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "part" / "output").mkdir(parents=True)
    execute(call, load_vocabulary(call.plugins, Path(call.folder)), store, tell)["output"].save(
        folder / "part" / "output"
    )
    (folder / "part").rename(folder / "outputs")
    return {"output": folder / "outputs" / "output"}
