"""Tables through the command line: the regression that ships with the project, and a classification."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.preprocessing import OneHotEncoder

from ptpipe import load_plan
from ptpipe_data.table_columns import CategoriesInfo, NumbersInfo
from ptpipe_torch import Data, Model

from ..conftest import CommandLine
from ..datasets import class_names_of, labels_of
from ..forks import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("fork_server")]

ROOT = Path(__file__).parents[2]
DIABETES = Path("manifests/diabetes_regression.yaml")
QUICK = ("-s", "compare.budget_s=1", "-s", "compare.threads=[one]")


class Stored:
    """The stages of a run by id, and what they left in the store."""

    def __init__(self, finished: subprocess.CompletedProcess[str], artifacts: Path) -> None:
        self.stages: Mapping[str, Any] = {stage["stage_id"]: stage for stage in json.loads(finished.stdout)["stages"]}
        self._artifacts = artifacts

    def folder(self, stage_id: str) -> Path:
        digest = self.stages[stage_id]["outputs"]["output"]["digest"]
        return self._artifacts / "objects" / digest[:2] / digest / "files"

    @property
    def comparison(self) -> Mapping[str, Any]:
        return json.loads((self.folder("compare") / "comparison.json").read_text(encoding="utf-8"))

    @property
    def rows(self) -> Mapping[str, Mapping[str, Any]]:
        return {row["name"]: row for row in self.comparison["rows"]}


def features(data: Data, split: str) -> npt.NDArray[np.float64]:
    """The standardized numbers, and a column for each category."""
    (batch,) = data.batches(split, batch_size=10_000)
    categories = data.info.inputs["categories"]
    assert isinstance(data.info.inputs["numbers"], NumbersInfo) and isinstance(categories, CategoriesInfo)
    one_hot = OneHotEncoder(categories=[range(size) for size in categories.vocabulary_sizes], sparse_output=False)
    return np.hstack([batch.inputs["numbers"].numpy(), one_hot.fit_transform(batch.inputs["categories"].numpy())])


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stored, Path]:
    artifacts = tmp_path_factory.mktemp("diabetes")
    finished = run_forked(ROOT, "run", DIABETES, "--artifacts", artifacts, *QUICK, "--json")
    assert finished.returncode == 0, finished.stderr
    load_plan(ROOT / DIABETES)  # loads the plugin of the columns
    return Stored(finished, artifacts), artifacts


@pytest.mark.thorough
def test_a_regression_is_as_good_as_ridge(diabetes) -> None:
    stored, _ = diabetes
    assert {stage["outcome"] for stage in stored.stages.values()} == {"done"}
    data = Data.load(stored.folder("data"))
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 336, "val": 18, "test": 88, "calibration": 336,
    }  # fmt: skip
    assert data.info.inputs["numbers"].names == ("age", "bmi", "bp", *(f"s{number}" for number in range(1, 7)))
    assert data.info.inputs["categories"].categories == (("1", "2"),)
    train, test = (
        (features(data, name), data.splits[name].targets["targets"].values()[:, 0]) for name in ("train", "test")
    )
    ridge = RidgeCV(alphas=np.logspace(-2, 3, 30)).fit(*train)
    assert stored.rows["pretrain"]["r2"] == pytest.approx(ridge.score(*test), abs=0.02)


@pytest.mark.thorough
def test_its_int8_models_are_as_good_as_float(diabetes) -> None:
    stored, _ = diabetes
    assert list(stored.rows) == ["pretrain", "dynamic", "static", "qat", "onnx"]
    (summary,) = (output["summary"] for output in stored.stages["compare"]["outputs"].values())
    assert summary == stored.comparison
    assert [metric["name"] for metric in stored.comparison["metrics"]] == ["r2", "rmse", "mae", "loss"]
    baseline = stored.rows["pretrain"]
    for name, row in stored.rows.items():
        assert row["r2"] == row["metrics"]["r2"] > baseline["r2"] - 0.01, name
        assert row["worse_by"] == pytest.approx(baseline["r2"] - row["r2"], abs=1e-9) and "drop" not in row
        assert row["metrics"]["rmse"] == pytest.approx(baseline["metrics"]["rmse"], rel=0.03), name
    assert stored.stages["onnx"]["metrics"]["num_float_nodes"] == 0
    verdict = json.loads((stored.folder("quality") / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["decision"] == "passed"


@pytest.mark.thorough
def test_a_limit_that_nothing_reaches_refuses_it(diabetes) -> None:
    _, artifacts = diabetes
    finished = run_forked(
        ROOT, "run", DIABETES, "--artifacts", artifacts, *QUICK, "-s", "quality.min_value=0.99", "--json"
    )
    assert finished.returncode == 3, finished.stderr
    stages = {stage["stage_id"]: stage for stage in json.loads(finished.stdout)["stages"]}
    assert stages.pop("quality")["outcome"] == "refused"
    assert {stage["outcome"] for stage in stages.values()} == {"cached"}
    assert "minimum 0.99" in finished.stderr


def test_nothing_is_done_twice_until_the_file_changes(diabetes, tmp_path: Path) -> None:
    _, artifacts = diabetes
    table = tmp_path / "diabetes.csv"
    planned = CommandLine(ROOT)("plan", DIABETES, "--artifacts", artifacts, *QUICK, "--json")  # with other hashes
    assert all(stage["cached"] for stage in planned.json["stages"])
    table.write_text((ROOT / "examples/diabetes/diabetes.csv").read_text(encoding="utf-8"), encoding="utf-8")
    setting = ("-s", f"data.path={table}")
    planned = run_forked(ROOT, "plan", DIABETES, "--artifacts", artifacts, *QUICK, *setting, "--json")
    assert not any(stage["cached"] for stage in json.loads(planned.stdout)["stages"])


CANCER = """
version: 1
name: cancer
seed: 7
stages:
  data:
    uses: data.table
    with: {path: cancer.csv, task: classification, targets: [diagnosis], test_size: 0.3, val_size: 30, batch_size: 32}
  net:        {uses: model.mlp, with: {hidden: [32, 16]}}
  pretrain:   {uses: train.supervised, needs: {model: net}, with: {epochs: 8, lr: 0.05, num_threads: 1}}
  ddp:
    uses: train.supervised
    needs: {model: net}
    with: {epochs: 8, lr: 0.05, num_threads: 1, parallel: {mode: ddp, workers: 2}}
  observed:   {uses: quant.prepare, needs: {model: pretrain}, with: {backend: fbgemm}}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  static:     {uses: quant.convert, needs: {model: calibrated}}
  fake_quant: {uses: quant.prepare_qat, needs: {model: pretrain}, with: {backend: fbgemm}}
  finetune:   {uses: train.supervised, needs: {model: fake_quant}, with: {epochs: 2, lr: 0.001}}
  qat:        {uses: quant.convert, needs: {model: finetune}}
  onnx_float: {uses: export.onnx, needs: {model: pretrain}}
  onnx_static: {uses: export.onnx, needs: {model: static}}
  onnx_qat:   {uses: export.onnx, needs: {model: qat}}
  compare:
    uses: eval.compare
    needs: {models: [pretrain, ddp, static, qat, onnx_float, onnx_static, onnx_qat]}
    with: {baseline: pretrain, batch_sizes: []}
  accuracy:   {uses: gate.accuracy, needs: {comparison: compare}, with: {candidate: onnx_static, max_drop: 0.03}}
"""


def write_cancer(path: Path) -> None:
    """569 tumours: 29 numbers, one that became a text, and what they are."""
    content = load_breast_cancer()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["texture", *(name for name in content.feature_names if name != "mean texture"), "diagnosis"])
        texture = list(content.feature_names).index("mean texture")
        sizes = np.digitize(content.data[:, texture], [16, 19, 22])
        numbers_NF = np.delete(content.data, texture, axis=1)
        for size, numbers_F, label in zip(sizes, numbers_NF.tolist(), content.target, strict=True):
            text = ("fine, very", "fine", "coarse", "coarse, very")[size]
            writer.writerow([text, *numbers_F, content.target_names[label]])


@pytest.fixture(scope="module")
def cancer(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("cancer")
    write_cancer(folder / "cancer.csv")
    (folder / "m.yaml").write_text(CANCER, encoding="utf-8")
    finished = run_forked(folder, "run", "m.yaml", "--json")
    assert finished.returncode == 0, finished.stderr
    return Stored(finished, folder / "artifacts")


def test_a_classification_passes_its_gate(cancer: Stored) -> None:
    assert {stage["outcome"] for stage in cancer.stages.values()} == {"done"}
    data = Data.load(cancer.folder("data"))
    assert class_names_of(data.info) == ("benign", "malignant")
    assert data.info.inputs["categories"].categories == (("coarse", "coarse, very", "fine", "fine, very"),)
    assert len(data.info.inputs["numbers"].names) == 29
    train, test = ((features(data, name), labels_of(data.splits[name])) for name in ("train", "test"))
    logistic = LogisticRegression(max_iter=1000).fit(*train)
    baseline = cancer.rows["pretrain"]
    assert baseline["accuracy"] == pytest.approx(logistic.score(*test), abs=0.03)
    assert cancer.comparison["num_samples"] == len(data.splits["test"]) == 171
    for name, row in cancer.rows.items():
        assert row["accuracy"] >= baseline["accuracy"] - 0.03, name
    assert cancer.rows["onnx_float"]["accuracy"] == baseline["accuracy"]
    for name in ("static", "qat"):
        assert cancer.rows[f"onnx_{name}"]["accuracy"] == pytest.approx(cancer.rows[name]["accuracy"], abs=0.01)


def test_its_training_in_two_workers_ends_where_one_process_does(cancer: Stored) -> None:
    single, parallel = (Model.load(cancer.folder(name)).tensors for name in ("pretrain", "ddp"))
    initial = Model.load(cancer.folder("net")).tensors
    assert single.keys() == parallel.keys() == initial.keys()
    assert any(name.startswith("embeddings") for name in single)
    for name, tensor in single.items():
        assert (tensor - parallel[name]).abs().max() <= 1e-5 * tensor.abs().max(), name
        assert not tensor.equal(initial[name]), name
    figures = [cancer.stages[name]["metrics"] for name in ("pretrain", "ddp")]
    assert figures[0]["val_accuracy"] == figures[1]["val_accuracy"]
    assert figures[0]["val_loss"] == pytest.approx(figures[1]["val_loss"], rel=1e-4)
