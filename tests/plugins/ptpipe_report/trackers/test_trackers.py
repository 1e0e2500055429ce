"""Which trackers a run gets: those that the user named, and no other."""

from __future__ import annotations

import pytest

import ptpipe_report
from ptpipe import ManifestError, Reporter
from ptpipe_report import trackers


def test_nothing_is_switched_on_by_itself(monkeypatch):
    monkeypatch.delenv("PTPIPE_TRACKERS", raising=False)
    assert list(trackers.new_trackers()) == []
    assert list(ptpipe_report.ptpipe_check()) == []


def test_the_variable_names_trackers(monkeypatch):
    monkeypatch.setenv("PTPIPE_TRACKERS", " tensorboard, mlflow,,tensorboard")
    found = list(trackers.new_trackers())
    assert [type(tracker).__name__ for tracker in found] == ["TensorBoardTracker", "MlflowTracker"]
    assert all(isinstance(tracker, Reporter) for tracker in found)
    assert list(ptpipe_report.ptpipe_reporters())[-1].__class__.__name__ == "MlflowTracker"


def test_a_wrong_name_ends_a_run_before_it_begins(monkeypatch, project):
    project.write("one: {uses: toy.make}")
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ("ptpipe_report",))
    monkeypatch.setenv("PTPIPE_TRACKERS", "mlfow")
    with pytest.raises(ManifestError) as raised:
        project.run()
    assert str(raised.value) == (
        "PTPIPE_TRACKERS: there is no tracker 'mlfow', but tensorboard and mlflow (did you mean 'mlflow'?)"
    )
    assert not project.artifacts.exists()


def test_a_tracker_that_is_not_installed_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PTPIPE_TRACKERS", "mlflow")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = trackers.tracker_problems()
    assert str(problem) == "PTPIPE_TRACKERS: mlflow is not installed: pip install 'ptpipe[mlflow]'"
