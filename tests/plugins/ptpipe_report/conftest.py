"""A scripted run for reporters to report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ptpipe import Location, Outcome, Reporter
from ptpipe.events import Event, Notice, Progress, RunFinished, RunStarted, StageFinished, StageStarted


def output(type_name: str, **summary: Any) -> dict[str, Any]:
    return {"output": {"type": type_name, "digest": "d" * 64, "size_bytes": 1, "summary": summary}}


def delivering(stage: StageFinished, *paths: Path) -> StageFinished:
    """The stage with these deliverables."""
    return dataclasses.replace(stage, deliverables=paths)


def row(name: str, format_: str, size_bytes: int, accuracy: float, latencies_ms: Sequence[float]) -> dict[str, Any]:
    cells = [(1, "one"), (1, "all"), (32, "one")]
    return {
        "name": name,
        "format": format_,
        "size_bytes": size_bytes,
        "size_ratio": size_bytes / 1_692_915,
        "accuracy": accuracy,
        "drop": round(0.9913 - accuracy, 12),
        "metrics": {"accuracy": accuracy, "loss": 0.03},
        "latency": [
            {"batch_size": size, "threads": threads, "num_threads": 1, "p10_ms": 0.0, "median_ms": ms, "p90_ms": 99.0}
            for (size, threads), ms in zip(cells, latencies_ms, strict=False)
        ],
    }


COMPARISON: dict[str, Any] = {
    "data": "mnist",
    "split": "test",
    "num_samples": 10_000,
    "metrics": [
        {"name": "accuracy", "higher_is_better": True, "is_fraction": True},
        {"name": "loss", "higher_is_better": False, "is_fraction": False},
    ],
    "baseline": "pretrain",
    "method": "median of 200",
    "measured_at": "2026-07-01T12:00:00+00:00",
    "rows": [
        row("pretrain", "torch float32", 1_692_915, 0.9913, (0.312, 0.187, 9.98)),
        row("int8", "torch int8 fbgemm", 434_197, 0.9928, (0.139, 0.0834, 4.45)),
        row("onnx", "onnx int8", 438_713, 0.9883, (0.0411, 0.025, 1.32)),
    ],
}


@dataclass
class ScriptedRun:
    """Reports a scripted run."""

    folder: Path
    verbosity: int = 0
    overrides: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    manifest_path: str = "manifests/mnist_qat.yaml"
    name: str = "mnist-qat"
    finished: list[StageFinished] = field(default_factory=list)

    def stage(self, stage_id: str, kind: str, outcome: Outcome = Outcome.DONE, **more: Any) -> StageFinished:
        return StageFinished(stage_id, kind, outcome, more.pop("seconds", 1.0), more.pop("key", "ab" * 32), **more)

    def started(self, stages: Iterable[StageFinished], **changes: Any) -> RunStarted:
        ids, kinds = tuple(stage.stage_id for stage in stages), tuple(stage.kind for stage in stages)
        started = RunStarted(
            "run-1", self.name, self.manifest_path, self.folder, ids, 7, self.overrides, self.verbosity, kinds,
            locations=tuple(Location(self.manifest_path, line, 3) for line, _ in enumerate(ids, 10)),
            started_at="2026-07-01T12:00:00.000+00:00", arguments=self.arguments,
        )  # fmt: skip
        return dataclasses.replace(started, **changes)

    def ended(self, stages: Iterable[StageFinished], exit_code: int = 0, interrupted: bool = False) -> RunFinished:
        return RunFinished("run-1", self.name, self.folder, exit_code, 187.3, tuple(stages), interrupted)

    def play(
        self,
        reporters: Sequence[Reporter],
        stages: Sequence[StageFinished],
        events: Mapping[str, Sequence[Event]] | None = None,
        exit_code: int = 0,
        interrupted: bool = False,
    ) -> None:
        for reporter in reporters:
            reporter.run_started(self.started(stages))
        for position, stage in enumerate(stages, 1):
            for reporter in reporters:
                if stage.outcome is not Outcome.SKIPPED:
                    reporter.stage_started(StageStarted(stage.stage_id, stage.kind, position, len(stages)))
                for event in (events or {}).get(stage.stage_id, ()):
                    reporter.event(event)
                reporter.stage_finished(stage)
        for reporter in reporters:
            reporter.run_finished(self.ended(stages, exit_code, interrupted))

    def mnist(self) -> list[StageFinished]:
        """A run with everything in it."""
        verdict = {"decision": "passed", "reason": "onnx loses 0.30 points (at most 0.30)", "fail_undecided": False}
        return [
            self.stage(
                "data", "data.mnist", Outcome.CACHED, notices=("digits in place of mnist",), outputs=output("Data")
            ),
            self.stage(
                "pretrain",
                "train.supervised",
                seconds=41.32,
                metrics={"epochs": 3, "val_accuracy": 0.9902, "val_loss": 0.0313, "confusion": [[1, 2]]},
                outputs=output("Model", format="torch float32", size_bytes=1_692_915),
            ),
            self.stage(
                "compare", "eval.compare", outputs=output("ptpipe_eval.Comparison", **COMPARISON), machine="0" * 12
            ),
            self.stage("gate", "gate.accuracy", seconds=0.004, outputs=output("Verdict", **verdict)),
        ]

    def training(self, num_steps: int = 10) -> list[Event]:
        facts = {"epoch": "1/1", "loss": 0.0313, "samples_per_s": 6812.4}
        return [
            *(Progress("pretrain", done, num_steps, "step", facts) for done in range(num_steps + 1)),
            Notice("pretrain", "fell back to float32"),
        ]


@pytest.fixture
def script(tmp_path: Path) -> ScriptedRun:
    return ScriptedRun(tmp_path)


@pytest.fixture
def delivered(script: ScriptedRun) -> list[StageFinished]:
    """A run whose second stage left two files to ship."""
    stages = script.mnist()
    stages[1] = delivering(
        stages[1], script.folder.absolute() / "pretrain" / "model.onnx", Path("pretrain/odd*name.data")
    )
    return stages


@pytest.fixture
def comparison() -> dict[str, Any]:
    return COMPARISON


@pytest.fixture
def verdict() -> Callable[[str, str], dict[str, Any]]:
    """The outputs of a gate with that decision and reason."""
    return lambda decision, reason: output("Verdict", decision=decision, reason=reason, fail_undecided=False)
