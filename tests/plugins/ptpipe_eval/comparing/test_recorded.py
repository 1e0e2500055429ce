"""Rows of records that no run here wrote."""

from __future__ import annotations

from ptpipe_eval.comparing.recorded import recorded_rows, session_note


def record(run_id, measured_at, **stage):
    cell = {"batch_size": 1, "threads": "one", "median_ms": 0.125}
    rows = [{"name": "net", "format": "f", "size_bytes": 2000, "metrics": {"accuracy": 0.5}, "latency": [cell]}]
    summary = {"rows": rows, "metrics": [{"name": "accuracy"}], "measured_at": measured_at}
    outputs = {"output": {"summary": summary}}
    stages = [{"stage_id": "c", "kind": "eval.compare", "outputs": outputs, "parts": {}, "machine": "m", **stage}]
    facts = {"run_id": run_id, "name": "n", "finished": True, "exit_code": 0, "seed": 1, "overrides": {}}
    return {**facts, "stages": stages}


def test_latencies_of_several_sessions_are_not_compared(tmp_path):
    runs = [(record(run_id, run_id), tmp_path) for run_id in ("a", "b")]
    rows = recorded_rows(runs)
    assert [row["ms (batch 1, 1 thread)"].text for row in rows] == ["0.125", "0.125"]
    assert [row["session"].text for row in rows] == ["a", "b"]
    assert "2 sessions: compare them within one session only" in session_note(rows)[0]
    assert session_note(rows[:1]) == []
    same = [(record(run_id, "at noon"), tmp_path) for run_id in ("a", "b")]
    assert session_note(recorded_rows(same)) == []


def test_a_verdict_on_several_models_is_that_of_each(tmp_path):
    made = record("a", "")
    (row,) = made["stages"][0]["outputs"]["output"]["summary"]["rows"]
    made["stages"][0]["outputs"]["output"]["summary"]["rows"] = [row | {"name": name} for name in ("net", "dyn", "qat")]
    rows = [{"candidate": "dyn", "decision": "passed"}, {"candidate": "qat", "decision": "refused"}]
    gates = {
        "all": {"decision": "refused", "reason": "", "candidates": rows},
        "best": {"decision": "passed", "reason": "", "selected": "dyn", "candidates": rows},
        "one": {"decision": "passed", "reason": "", "candidate": "qat"},
        "own": {"decision": "passed", "reason": ""},
    }
    for stage_id, summary in gates.items():
        outputs = {"output": {"type": "ptpipe.Verdict", "summary": summary}}
        made["stages"].append({**made["stages"][0], "stage_id": stage_id, "kind": "gate.x", "outputs": outputs})
    found = {row["model"].text: {name: row[f"{name} verdict"].text for name in gates if f"{name} verdict" in row}
             for row in recorded_rows([(made, tmp_path)])}  # fmt: skip
    assert found == {
        "net": {"own": "passed"},
        "dyn": {"all": "passed", "best": "passed", "own": "passed"},
        "qat": {"all": "refused", "best": "refused", "one": "passed", "own": "passed"},
    }


def test_a_run_that_compared_nothing_has_what_training_and_evaluation_reported(tmp_path):
    train = {"kind": "train.supervised", "outputs": {}, "metrics": {"loss": 0.25, "name": "x", "ok": True}}
    (row,) = recorded_rows([(record("a", "", **train), tmp_path)])
    assert {name: cell.value for name, cell in row.items() if name.startswith("c.")} == {"c.loss": 0.25}


def test_results_come_before_options(tmp_path):
    runs = [(record(name, "", parts={"config": {"classes": [name]}}) | {"overrides": {"c.classes": [name]}}, tmp_path)
            for name in ("größe", "b")]  # fmt: skip
    rows = recorded_rows(runs)
    assert list(rows[0])[:6] == ["run", "model", "accuracy", "size (bytes)", "ms (batch 1, 1 thread)", "c.classes"]
    assert rows[0]["c.classes"].text == '["größe"]'
