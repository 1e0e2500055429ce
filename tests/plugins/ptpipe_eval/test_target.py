"""What is said of a model that this processor computes in another way than those that it was made for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ptpipe.events import Notice
from ptpipe_eval import target
from ptpipe_torch import Classification


@pytest.mark.parametrize(("here", "has_remedy"), [(0.5, False), (0.25, True)])
def test_a_remedy_is_named_only_where_saturation_changes_the_metric(
    here, has_remedy, context, events, monkeypatch
) -> None:
    evaluation = SimpleNamespace(figures=lambda name: {"accuracy": here})
    monkeypatch.setattr(target, "Evaluation", lambda split: evaluation)
    monkeypatch.setattr(target, "evaluate_split", lambda *args: None)
    info = SimpleNamespace(task=Classification(class_names=("a", "b")))
    split = SimpleNamespace(data=SimpleNamespace(info=info), samples=range(8), of=lambda model: None)
    model = SimpleNamespace(predictor=lambda: nullcontext(None))
    target.report_exact_sums(context(), "onnx", model, split, {"accuracy": 0.5})
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert f"saturate: accuracy {100 * here:.2f} %" in notice
    assert ("reduce_range" in notice) == has_remedy
