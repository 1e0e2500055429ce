"""The stages one after another, their artifacts going through a store."""

from __future__ import annotations

import pytest

from ptpipe import Decision
from ptpipe_eval import eval_compare, eval_predict, gate_accuracy, gate_latency, gate_quality, gate_size

pytest_plugins = ["ptpipe.testing"]


@pytest.mark.usefixtures("forked_servers")
def test_from_models_to_verdicts(bench, digits, pair) -> None:
    good, worse = pair
    predictions = bench.run(eval_predict, {"split": "val"}, model=good, data=digits)
    assert predictions.metrics["num_samples"] == 200
    assert bench.metrics.keys() == {"accuracy", "top5_accuracy", "loss", "primary_metric"}

    options = {"batch_sizes": [2], "threads": ["one"], "budget_s": 0.5}
    table = bench.run(eval_compare, options, models=[good, worse], data=digits)
    baseline, candidate = (row.name for row in table.rows)
    assert len(bench.metrics) == 2

    drop = table.summary()["rows"][1]["drop"]
    assert 0.05 < drop < 0.15
    wide, narrow = (0.2, Decision.PASSED), (0.02, Decision.REFUSED)
    for limit, decision in (wide, (drop, Decision.UNDECIDED), narrow):
        verdict = bench.run(gate_accuracy, {"candidate": candidate, "max_drop": limit}, comparison=table)
        assert verdict.decision is decision
        assert (verdict.facts["candidate"], verdict.facts["baseline"]) == (candidate, baseline)
        verdict = bench.run(gate_quality, {"candidate": candidate, "max_drop": limit}, comparison=table)
        assert (verdict.decision, verdict.facts["metric"]) == (decision, "accuracy")
    assert bench.run(gate_size, {"candidate": candidate, "max_ratio": 1}, comparison=table).decision == "passed"
    timed = {"candidate": candidate, "max_ratio": 100, "batch_size": 2}
    verdict = bench.run(gate_latency, timed, comparison=table)
    assert verdict.decision == ("undecided" if table.rows[1].latencies[0].speed == "unmeasurable" else "passed")
