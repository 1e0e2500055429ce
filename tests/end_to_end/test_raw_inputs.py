"""A file that takes bytes and returns classes, exported, evaluated, timed and checked in one manifest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ptpipe_torch import Data, Predictions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MANIFEST = """\
version: 1
name: raw
seed: 7
stages:
  data:       {uses: data.digits}
  net:        {uses: model.small_cnn}
  observed:   {uses: quant.prepare, needs: {model: net}, with: {backend: fbgemm}}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  int8:       {uses: quant.convert, needs: {model: calibrated}}
  raw:        {uses: export.onnx, needs: {model: int8}, with: {preprocessing: nhwc, postprocessing: true}}
  predicted:  {uses: eval.predict, needs: {model: raw}}
  compare:
    uses: eval.compare
    needs: {models: [int8, raw]}
    with: {baseline: int8, batch_sizes: [1], threads: [one], budget_s: 1}
  accuracy:   {uses: gate.accuracy, needs: {comparison: compare}, with: {candidate: raw, max_drop: 0.02}}
"""


def ptpipe(folder: Path, *arguments: str | Path) -> Any:
    command = [sys.executable, "-m", "ptpipe", *map(str, arguments), "--json"]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_bytes_to_gates(tmp_path: Path) -> None:
    (tmp_path / "raw.yaml").write_text(MANIFEST, encoding="utf-8")
    found = ptpipe(tmp_path, "run", "raw.yaml", "--artifacts", tmp_path / "artifacts")
    stages = {stage["stage_id"]: stage for stage in found["stages"]}

    def folder(stage_id: str) -> Path:
        (output,) = stages[stage_id]["outputs"].values()
        return tmp_path / "artifacts" / "objects" / output["digest"][:2] / output["digest"] / "files"

    predicted = Predictions.load(folder("predicted"))
    assert stages["raw"]["metrics"]["top1_agreement"] == 1
    comparison = json.loads((folder("compare") / "comparison.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in comparison["rows"]}
    assert rows["raw"]["metrics"]["accuracy"] == rows["int8"]["metrics"]["accuracy"]
    assert [cell["batch_size"] for cell in rows["raw"]["latency"]] == [1]
    assert rows["raw"]["costs"]["io_bytes"] == 8 * 8 + 4 * 10  # of bytes in and logits out
    data = Data.load(folder("data"))
    pixels_NHWC = data.splits["test"].inputs["images"].values()
    metadata = {entry.key: entry.value for entry in onnx.load(folder("raw") / "model.onnx").metadata_props}
    assert metadata["export.onnx model"] == stages["int8"]["outputs"]["output"]["digest"]
    assert json.loads(metadata["export.onnx options"])["preprocessing"] == "nhwc"
    session = ort.InferenceSession(str(folder("raw") / "model.onnx"), providers=["CPUExecutionProvider"])
    (classes_N,) = session.run(["classes"], {"images": pixels_NHWC})
    assert (classes_N == predicted.arrays["prediction"]).all()
    checked = ptpipe(tmp_path, "check", folder("raw") / "model.onnx")
    assert checked["outputs"].keys() == {"logits", "probabilities"}
    assert np.allclose([of["max_abs_difference"] for of in checked["outputs"].values()], 0)
