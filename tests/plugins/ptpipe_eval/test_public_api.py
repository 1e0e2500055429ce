from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

import ptpipe_eval
from ptpipe_eval.config import CompareConfig, EvalLatencyConfig, PredictConfig

HEAVY = ("torch", "numpy", "scipy", "onnxruntime", "onnx")


def modules_after(code: str) -> set[str]:
    """Names of the heavy libraries that a fresh interpreter has imported after this code."""
    code += f"\nimport sys, json; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    names = ("comparison", "gates", "quality.gates", "latency.gate", "verdicts", "checks", "config")
    assert modules_after("; ".join(f"import ptpipe_eval.{name}" for name in names)) == set()
    assert modules_after("import ptpipe_eval.compare") >= {"numpy"}  # the check can detect an import


def test_gates_judge_without_torch() -> None:
    code = """
from pathlib import Path
from ptpipe import Context
from ptpipe_eval import Comparison, Latency, Row
from ptpipe_eval.config import AccuracyConfig, LatencyConfig, QualityConfig, SizeConfig
from ptpipe_eval import gate_accuracy, gate_latency, gate_quality, gate_size
from ptpipe_torch import Metric
from tempfile import TemporaryDirectory

metrics = (Metric("accuracy", higher_is_better=True, is_fraction=True),)
import numpy as np
from ptpipe_eval.quality.paired import PairedSamples
cell = Latency(1, "one", 1, 1.0, 0.9, 1.1, 1.0, 1.0, 1.0, "baseline", 0.01, 5, 100, 1.0, 0.0, 0)
rows = tuple(Row(name, "f", 100, {"accuracy": 0.9}, (cell,)) for name in "ab")
samples = PairedSamples(tuple("0123456789"), 0, {"accuracy": np.ones((2, 10), bool)}, None, {})
with TemporaryDirectory() as folder:
    Comparison("d", "test", 10, metrics, "a", rows, "m", "t", samples).save(Path(folder))
    comparison = Comparison.load(Path(folder))
ctx = Context("g", "gate.size", 7, Path())
assert gate_accuracy(AccuracyConfig(candidate="b", max_drop=0.3), ctx, comparison).decision == "passed"
assert gate_quality(QualityConfig(candidate="b", max_drop=0.3), ctx, comparison).decision == "passed"
assert gate_size(SizeConfig(candidate="b", max_bytes=99), ctx, comparison).decision == "refused"
assert gate_latency(LatencyConfig(candidate="b", max_ms=2), ctx, comparison).decision == "passed"
"""
    assert modules_after(code) == {"numpy"}


def test_the_commands_need_no_torch() -> None:
    assert modules_after("import ptpipe_eval.baseline.command") == set()
    code = "from ptpipe_eval.baseline import accept, file, judge, past_run"
    assert modules_after(code) == {"numpy"}


def test_kinds_and_ports() -> None:
    ports = {
        stage.kind: (
            [(port.name, port.type.__name__, port.several) for port in stage.inputs],
            [port.type.__name__ for port in stage.outputs],
        )
        for stage in ptpipe_eval.ptpipe_stages()
    }
    comparison = [("comparison", "Comparison", False)]
    assert ports == {
        "eval.predict": ([("model", "Deployable", False), ("data", "Data", False)], ["Predictions"]),
        "eval.compare": ([("models", "Deployable", True), ("data", "Data", False)], ["Comparison"]),
        "eval.latency": ([("models", "Deployable", True), ("data", "Data", False)], ["Comparison"]),
        "gate.accuracy": (comparison, ["Verdict"]),
        "gate.quality": (comparison, ["Verdict"]),
        "gate.size": (comparison, ["Verdict"]),
        "gate.latency": (comparison, ["Verdict"]),
        "select.best": ([*comparison, ("models", "Deployable", True)], ["Selected", "Verdict"]),
        "select.model": ([("selected", "Selected", False)], ["Model"]),
    }


def test_every_option_and_kind_is_explained() -> None:
    for stage in ptpipe_eval.ptpipe_stages():
        assert len(stage.help) > 60
        for name, field in stage.config_type.model_fields.items():
            assert field.description, f"{stage.kind}.{name}"


def test_defaults() -> None:
    assert PredictConfig().model_dump() == {"split": "test", "batch_size": None, "num_threads": None}
    assert CompareConfig().model_dump(mode="json") == {
        "baseline": None,
        "split": "test",
        "batch_size": None,
        "batch_sizes": [1, 32],
        "lengths": [],
        "threads": ["one", "all"],
        "budget_s": 60.0,
        "precision": 0.01,
    }


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PredictConfig, {"split": "train"}),
        (PredictConfig, {"batch_size": 0}),
        (PredictConfig, {"num_threads": 0}),
        (PredictConfig, {"splitt": "test"}),
        (CompareConfig, {"batch_sizes": [1, 1]}),
        (CompareConfig, {"batch_sizes": [0]}),
        (CompareConfig, {"batch_sizes": 32}),
        (CompareConfig, {"lengths": [8, 8]}),
        (CompareConfig, {"lengths": [0]}),
        (CompareConfig, {"threads": []}),
        (CompareConfig, {"threads": ["one", "one"]}),
        (CompareConfig, {"threads": ["two"]}),
        (CompareConfig, {"budget_s": 0}),
        (CompareConfig, {"precision": 0}),
        (EvalLatencyConfig, {"batch_sizes": []}),
        (CompareConfig, {"baseline": 3}),
    ],
)
def test_bad_options_are_refused(config: type[PredictConfig], options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        config.model_validate_json(json.dumps(options), strict=True)


def test_lists_are_taken_as_json_gives_them() -> None:
    text = '{"batch_sizes": [4], "threads": ["all"], "budget_s": 1, "baseline": "pretrain"}'
    config = CompareConfig.model_validate_json(text, strict=True)
    assert (config.batch_sizes, config.threads, config.budget_s) == ((4,), ("all",), 1.0)
