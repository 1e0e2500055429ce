"""A run in MLflow, read back by its client."""

from __future__ import annotations

import importlib.util
import multiprocessing
import warnings
from dataclasses import replace

import pytest

if importlib.util.find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed (extra `mlflow`)", allow_module_level=True)

from ptpipe import Outcome, Progress
from ptpipe_report.trackers.mlflow import MlflowTracker

from ..conftest import ScriptedRun

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
OPTIONS = {"pretrain": {"lr": 0.05, "schedule": {"name": "cosine"}, "note": "x" * 900, "odd{}name": None}}
OPTIONS["pretrain"] |= {f"option_{number}": number for number in range(150)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where MLflow's own default store is made, once: that takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def script(tmp_path):
    """A run in an artifacts folder."""
    (tmp_path / "locks").mkdir()
    folder = tmp_path / "runs" / "run-1"
    folder.mkdir(parents=True)
    return ScriptedRun(folder)


@pytest.fixture
def client(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "WARNING")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient
    return MlflowClient()


def only_run(client, experiment):
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def test_a_run_is_there_when_it_has_ended(script, client, folder):
    tracker = MlflowTracker()
    (script.folder / "report.md").write_text("# report")
    model = script.folder / "pretrain" / "model.onnx"
    model.parent.mkdir()
    model.write_bytes(b"onnx")
    model.with_name("model.onnx.intoto.json").write_text("{}")
    stages = script.mnist()
    stages[1] = replace(stages[1], deliverables=(model,))
    tracker.run_started(replace(script.started(stages), options=OPTIONS, overrides=("finetune.lr=0.001",)))
    for stage in stages:
        if stage.stage_id == "pretrain":
            tracker.event(Progress("pretrain", 64, 128, "samples", {"epoch": 1, "step": 1, "loss": 0.5}))
            tracker.event(Progress("pretrain", 128, 128, "samples", {"epoch": 1, "val_accuracy": 0.75}))
        tracker.stage_finished(stage)
    tracker.run_finished(script.ended(stages, exit_code=3))
    assert (folder / "mlflow.db").is_file(), "MLflow's own default: `mlflow ui` in this folder shows it"
    run = only_run(client, "mnist-qat")
    assert (run.info.run_name, run.info.status) == ("run-1", "FINISHED")
    assert run.data.params["pretrain.lr"] == "0.05" and run.data.params["seed"] == "7"
    assert len(run.data.params["pretrain.note"]) == 500 and len(run.data.params) == 155
    assert run.data.params["pretrain.odd__name"] == "null"
    metrics = run.data.metrics
    assert metrics["pretrain/result/val_accuracy"] == 0.9902 and metrics["compare/onnx/size"] == 438_713
    assert metrics["compare/onnx/batch 1_ 1 thread"] == 0.0411
    (point,) = client.get_metric_history(run.info.run_id, "pretrain/epoch/val_accuracy")
    assert (point.step, point.value) == (1, 0.75)
    tags = run.data.tags
    assert (tags["ptpipe.run_id"], tags["ptpipe.overrides"]) == ("run-1", "finetune.lr=0.001")
    assert (tags["ptpipe.verdict"], tags["ptpipe.verdict.gate"]) == ("refused by a gate", "passed")
    files = {
        item.path for path in ("", "deliverables/pretrain") for item in client.list_artifacts(run.info.run_id, path)
    }
    shipped = {"deliverables/pretrain/model.onnx", "deliverables/pretrain/model.onnx.intoto.json"}
    assert {"report.md", "comparison"} | shipped <= files


def test_points_can_be_seen_while_the_run_goes_on(script, client, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setattr("ptpipe_report.trackers.mlflow._FLUSH_S", 0)
    tracker = MlflowTracker()
    tracker.run_started(script.started(script.mnist()))
    tracker.event(Progress("pretrain", 64, 128, "samples", {"epoch": 1, "step": 1, "loss": 0.5}))
    run = only_run(client, "mine")
    assert (run.info.status, run.data.metrics) == ("RUNNING", {"pretrain/loss": 0.5})
    failed = script.stage("pretrain", "train.supervised", Outcome.FAILED, message="the loss became nan")
    tracker.stage_finished(failed)
    tracker.run_finished(script.ended([failed], exit_code=1))
    assert only_run(client, "mine").info.status == "FAILED"


@pytest.mark.usefixtures("client")
def test_runs_that_begin_together_are_all_there(script, tmp_path, monkeypatch):
    """The trials of a sweep: MLflow fails where two processes create its database, or an experiment, at once."""
    monkeypatch.chdir(tmp_path)
    processes = multiprocessing.get_context("fork")
    together = processes.Barrier(3)
    begun = script.started(script.mnist())

    def begin(number):
        together.wait()
        MlflowTracker().run_started(replace(begun, run_id=f"run-{number}"))

    started = [processes.Process(target=begin, args=(number,)) for number in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    from mlflow import MlflowClient

    client = MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'mnist-qat'")
    names = [run.info.run_name for run in client.search_runs([experiment.experiment_id])]
    assert sorted(names) == ["run-0", "run-1", "run-2"]


def test_names_are_those_that_mlflow_takes(script, client, monkeypatch):
    """One that it does not take would cost the tracker."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "names")
    names = {"a//b": 1.0, "../c": 2.0, "/d": 3.0, "e/.": 4.0, "f/..": 5.0, "g/": 6.0, "": 7.0, "x" * 300: 8.0}
    tracker = MlflowTracker()
    tracker.run_started(replace(script.started(script.mnist()), overrides=(f"data.classes={'c' * 9000}",)))
    tracker.stage_finished(script.stage("own", "my.stage", metrics=names))
    run = only_run(client, "names")
    prefix = "own/result/"
    long = prefix + "x" * (250 - len(prefix))
    assert run.data.metrics == {
        f"{prefix}a/b": 1.0, f"{prefix}__/c": 2.0, f"{prefix}d": 3.0, f"{prefix}e/_": 4.0, f"{prefix}f/__": 5.0,
        f"{prefix}g": 6.0, "own/result": 7.0, long: 8.0,
    }  # fmt: skip
    assert run.data.tags["ptpipe.overrides"].endswith("ccc...")


def test_a_server_that_is_down_costs_the_tracker_and_not_the_run(project, client, monkeypatch):
    project.write("one: {uses: toy.make}")
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ("ptpipe_report",))
    monkeypatch.setenv("PTPIPE_TRACKERS", "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = project.run()
    assert result.exit_code == 0
    log = (result.folder / "log.txt").read_text()
    assert log.count("reporter ptpipe_report.trackers.mlflow.MlflowTracker raised") == 1
