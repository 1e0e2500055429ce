"""`manifests/smoke.yaml` through the command line, as a user runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ptpipe import load_plan
from ptpipe_torch import Model, OnnxFile

from ..forks import run_forked
from ..signatures import classifier

MANIFESTS = Path(__file__).parents[2] / "manifests"
SMOKE = MANIFESTS / "smoke.yaml"
QUICKLY = ("-s", "compare.budget_s=1")
"""No test here needs precise latencies."""


def ptpipe(*arguments: str | Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ptpipe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, object]], Path, float]:
    """Stages of a first run by id, the artifacts folder, wall time in seconds."""
    artifacts = tmp_path_factory.mktemp("artifacts")
    start = time.perf_counter()
    finished = ptpipe("run", SMOKE, *QUICKLY, "--artifacts", artifacts, "--json")
    taken_s = time.perf_counter() - start
    assert finished.returncode == 0, finished.stderr
    return {stage["stage_id"]: stage for stage in json.loads(finished.stdout)["stages"]}, artifacts, taken_s


def test_does_every_stage(smoke):
    stages, _, _ = smoke
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    assert {stage["kind"].partition(".")[0] for stage in stages.values()} == {
        "data", "model", "train", "quant", "export", "eval", "gate",
    }  # fmt: skip


def test_compares_what_was_made(smoke):
    stages, _, _ = smoke
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows) == ["pretrain", "dynamic", "static", "qat", "onnx"]
    assert rows["pretrain"]["accuracy"] > 0.9
    assert {row["macs"] for row in table["rows"]} == {1_385_728}  # of torch networks and of the file, float and int8
    assert {name for name, row in rows.items() if row["costs"]["float_operators"]} == {"dynamic"}
    for name in ("static", "qat", "onnx"):
        assert rows[name]["accuracy"] > rows["pretrain"]["accuracy"] - 0.05
        assert rows[name]["size_bytes"] < rows["pretrain"]["size_bytes"] * 0.4


def test_the_models_to_ship_lie_in_the_runs_folder(smoke, tmp_path):
    stages, artifacts, _ = smoke
    assert stages["onnx"]["deliverables"] == ["onnx/model.onnx", "onnx/model.vectors.npz"]
    assert stages["pretrain"]["deliverables"] == ["pretrain/recipe.json", "pretrain/tensors.safetensors"]
    assert stages["qat"]["deliverables"] == ["qat/recipe.json", "qat/int8.safetensors"]
    assert stages["data"]["deliverables"] == stages["compare"]["deliverables"] == []
    assert stages["fake_quant"]["deliverables"] == [], "a prepared model is not shipped"
    for stage in ("onnx", "qat"):
        assert ptpipe("get", "last", stage, tmp_path / stage, "--artifacts", artifacts).returncode == 0
    shipped = OnnxFile(tmp_path / "onnx" / "model.onnx", classifier((1, 16, 16), 10))
    assert shipped.size_bytes == stages["onnx"]["outputs"]["output"]["summary"]["size_bytes"]
    load_plan(SMOKE)  # loads the plugin of the network
    assert Model.load(tmp_path / "qat").build() is not None, "recipe and int8 tensors are all that it takes"


def test_the_report_has_what_every_plugin_adds(smoke):
    _, artifacts, _ = smoke
    (folder,) = (artifacts / "runs").glob("*-smoke-00001")
    html = (folder / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", html)
    assert headings[0] == "Ship onnx: its gate passed"
    for heading in ("Models", "Training: pretrain", "Where onnx differs from pretrain", "Latency by round", "Stages"):
        assert heading in headings
    assert "Calibration ranges: calibrated" in headings
    assert 'href="onnx/model.onnx"' in html


def test_second_run_is_cached_and_imports_no_torch(smoke):
    _, artifacts, _ = smoke
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "ptpipe",
        "run",
        str(SMOKE),
        *QUICKLY,
        "--artifacts",
        str(artifacts),
        "--json",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    assert {stage["outcome"] for stage in json.loads(finished.stdout)["stages"]} == {"cached"}
    imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines() if "import time" in line}
    assert "ptpipe" in imported
    assert not {"torch", "onnx", "onnxruntime", "scipy", "matplotlib"} & imported, "nor does its report"


def test_an_option_of_one_stage_redoes_only_what_depends_on_it(smoke):
    _, artifacts, _ = smoke
    finished = ptpipe("plan", SMOKE, *QUICKLY, "--artifacts", artifacts, "-s", "finetune.lr=0.001", "--json")
    stages = {stage["id"]: stage for stage in json.loads(finished.stdout)["stages"]}
    again = {name for name, stage in stages.items() if not stage["cached"]}
    assert again == {"finetune", "qat", "onnx", "examined", "compare", "accuracy"}
    assert stages["finetune"]["reasons"] == ["config.lr: 0.005 -> 0.001"]


def test_a_gate_that_refuses_ends_with_3(smoke):
    stages, artifacts, _ = smoke
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    accuracy = table["rows"][0]["accuracy"]
    settings = ("-s", "accuracy.candidate=pretrain", "-s", f"accuracy.min_accuracy={accuracy + 0.001}")
    finished = ptpipe("run", SMOKE, *QUICKLY, "--artifacts", artifacts, *settings)
    assert finished.returncode == 3
    assert "refused" in finished.stderr


def test_an_altered_artifact_is_found_and_made_again(smoke, tmp_path, fork_server):
    stages, artifacts, _ = smoke
    copy = tmp_path / "artifacts"
    shutil.copytree(artifacts, copy)
    digest = stages["pretrain"]["outputs"]["output"]["digest"]
    tensors = copy / "objects" / digest[:2] / digest / "files" / "tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    finished = run_forked(tmp_path, "run", SMOKE, *QUICKLY, "--artifacts", copy, "--fresh", "dynamic", "--json")
    assert finished.returncode == 0, finished.stderr
    assert "was altered" in finished.stderr
    again = {stage["stage_id"]: stage for stage in json.loads(finished.stdout)["stages"]}
    assert again["dynamic"]["outcome"] == "done"
    assert again["dynamic"]["outputs"] == stages["dynamic"]["outputs"]  # made from the same weights, to the bit


def test_every_manifest_is_valid():
    code = "import sys, ptpipe\nfor manifest in sys.argv[1:]: ptpipe.load_plan(manifest)"
    manifests = sorted(map(str, MANIFESTS.glob("*.yaml")))
    finished = subprocess.run([sys.executable, "-c", code, *manifests], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_the_schema_for_editors_is_fresh():
    finished = ptpipe("schema")
    assert json.loads(finished.stdout) == json.loads((MANIFESTS / "schema.json").read_text()), "run `make schema`"
