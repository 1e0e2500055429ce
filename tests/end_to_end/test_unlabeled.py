"""A detector of boxes and scores on pictures that have no labels: quantized, exported, checked and timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ptpipe_torch import Predictions

from ..forks import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("fork_server")]

NETS = """
import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 2, padding=1), nn.ReLU()
        )
        self.boxes, self.scores, self.embedding = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 5, 1), nn.Linear(16, 8)

    def forward(self, x):
        y = self.body(x)
        scores = self.scores(y).flatten(2).sigmoid()
        best = scores.max(1)
        return {
            "detections": torch.cat([300 * self.boxes(y).flatten(2), scores], 1),
            "best": best.values,
            "class_": best.indices,
            "is_sure": best.values > 0.6,
            "embedding": self.embedding(y.mean((2, 3))),
        }
"""
DATA = """
version: 1
name: unlabeled
seed: 1
stages:
  data:
    uses: data.image_folder
    with: {path: photos, unlabeled: true, image_size: 32, mean: [0, 0, 0], std: [1, 1, 1], batch_size: 8, test_size: 20}
  net: {uses: model.python, with: {file: nets.py, function: Detector}}
"""
STAGES = """
  onnx_float: {uses: export.onnx, needs: {model: net}}
  equalized: {uses: quant.equalize, needs: {model: net}}
  observed: {uses: quant.prepare, needs: {model: equalized}}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  corrected: {uses: quant.bias_correct, needs: {model: calibrated}}
  static: {uses: quant.convert, needs: {model: corrected}}
  onnx: {uses: export.onnx, needs: {model: static}, with: {preprocessing: nhwc}}
  dynamic: {uses: quant.dynamic, needs: {model: net}}
  quantizer: {uses: quant.onnx, needs: {model: onnx_float}}
  mended: {uses: quant.onnx, needs: {model: onnx_float}, with: {skip: [node_cat]}}
  float_outputs: {uses: eval.predict, needs: {model: onnx_float}}
  int8_outputs: {uses: eval.predict, needs: {model: onnx}}
  latency:
    uses: eval.latency
    needs: {models: [onnx_float, static, onnx, mended]}
    with: {baseline: onnx_float, batch_sizes: [1], budget_s: 1, threads: [one]}
  size: {uses: gate.size, needs: {comparison: latency}, with: {candidate: static, max_ratio: 0.6}}
"""
TAUGHT = """
  teacher: {uses: data.teacher_outputs, needs: {model: net}}
  observed: {uses: quant.prepare, needs: {model: net}}
  calibrated: {uses: quant.calibrate, needs: {model: observed, data: teacher}}
  static: {uses: quant.convert, needs: {model: calibrated}}
  analysis: {uses: quant.analyze, needs: {model: calibrated, data: teacher}}
  tuned: {uses: quant.tune, needs: {model: net, data: teacher}, with: {max_drop: 0.05}}
  fake_quant: {uses: quant.prepare_qat, needs: {model: net}, with: {batch_norm: fold}}
  finetune:
    uses: train.supervised
    needs: {model: fake_quant, data: teacher}
    with: {epochs: 2, lr: 0.0001, optimizer: adamw, parallel: {mode: ddp, workers: 2}}
  qat: {uses: quant.convert, needs: {model: finetune}}
  onnx_float: {uses: export.onnx, needs: {model: net, data: teacher}}
  onnx: {uses: export.onnx, needs: {model: qat, data: teacher}}
  quantizer: {uses: quant.onnx, needs: {model: onnx_float, data: teacher}}
  outputs: {uses: eval.predict, needs: {model: onnx, data: teacher}}
  compare:
    uses: eval.compare
    needs: {models: [net, static, onnx_float, onnx, quantizer], data: teacher}
    with: {baseline: net, batch_sizes: []}
  good: {uses: gate.quality, needs: {comparison: compare}, with: {candidate: onnx, max_drop: 0.06}}
  bad: {uses: gate.quality, needs: {comparison: compare}, with: {candidate: quantizer, max_drop: 0.06}}
"""
REFUSED = {
    "train.supervised": "there is no target to learn",
    "quant.analyze": "there is no metric that a model could be judged by",
    "quant.tune": "there is no metric that a model could be judged by",
    "eval.compare": "there is no metric that a model could be judged by",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(60):
        pixels = rng.integers(0, 256, (4, 4, 3), np.uint8).repeat(9, 0).repeat(9, 1)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def run(folder: Path, text: str, *options: str) -> tuple[int, Any, str]:
    (folder / "m.yaml").write_text(text)
    ended = run_forked(folder, "run", "m.yaml", "--json", *options)
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def test_all_but_what_needs_targets(folder: Path) -> None:
    code, record, errors = run(folder, DATA + STAGES)
    assert code == 0, errors
    assert "Warning" not in errors  # torch's, of the sigmoid's grid beside that of the boxes
    metrics = {stage["stage_id"]: stage["metrics"] for stage in record["stages"]}
    assert metrics["onnx"]["detections.num_samples"] == 20
    assert metrics["onnx"]["detections.quantization_channel_sqnr_db"] > 10
    lost, kept = metrics["quantizer"], metrics["mended"]
    assert lost["suggested_skip"] == ["node_cat"] and "suggested_skip" not in kept
    assert lost["detections.sqnr_db"] > 20 > 10 > lost["detections.channel_sqnr_db"]
    assert kept["detections.channel_sqnr_db"] > 20
    outputs = {stage["stage_id"]: stage["outputs"].get("output", {}).get("digest", "") for stage in record["stages"]}
    float_NCP, int8_NCP = (
        Predictions.load(folder / "artifacts" / "objects" / digest[:2] / digest / "files").arrays["detections"]
        for digest in (outputs["float_outputs"], outputs["int8_outputs"])
    )
    assert {"class_.num_samples", "is_sure.num_samples"}.isdisjoint(metrics["onnx"])  # rounding decides those
    assert float_NCP.shape == (20, 9, 64) and np.ptp(float_NCP[:, :4]) > 50
    assert np.abs(int8_NCP - float_NCP)[:, 4:].max() < 0.03  # one grid for boxes and scores made all of them 0
    run_folder = folder / "artifacts" / "runs" / record["run_id"]
    assert run_forked(folder, "check", run_folder / "onnx" / "model.onnx").returncode == 0


def test_what_needs_targets_says_so(folder: Path) -> None:
    prepared, stages = STAGES.partition("  corrected:")[0], ""
    for number, kind in enumerate(REFUSED):
        given = {"eval.compare": "models: [net]", "quant.analyze": "model: calibrated"}.get(kind, "model: net")
        more = ", with: {max_drop: 0.1}" if kind == "quant.tune" else ""
        stages += f"  s{number}: {{uses: {kind}, needs: {{{given}}}{more}}}\n"
    code, record, _ = run(folder, DATA + prepared + stages, "--keep-going")
    assert code == 1
    failed = {stage["kind"]: stage["message"] for stage in record["stages"] if stage["outcome"] == "failed"}
    assert failed.keys() == REFUSED.keys()
    for kind, message in REFUSED.items():
        assert failed[kind].startswith("the data set is unlabeled: ") and message in failed[kind]


def test_a_teacher_makes_a_loss_a_metric_and_gates(folder: Path) -> None:
    code, record, errors = run(folder, DATA + TAUGHT)
    stages = {stage["stage_id"]: stage for stage in record["stages"]}
    assert code == 3, errors
    assert [name for name, stage in stages.items() if stage["outcome"] != "done"] == ["bad"], errors
    assert "points of fidelity" in stages["bad"]["message"]
    metrics = {name: stage["metrics"] for name, stage in stages.items()}
    compared = metrics["compare"]
    assert compared["net.fidelity"] == 1.0 and compared["onnx_float.fidelity"] > 0.99999
    assert 0.94 < compared["static.fidelity"] < 1 and 0.94 < compared["onnx.fidelity"] < 1
    assert compared["quantizer.fidelity"] < 0.85  # its scores are on the grid of its boxes
    assert metrics["outputs"]["fidelity"] == pytest.approx(compared["onnx.fidelity"], abs=1e-6)
    assert metrics["tuned"]["is_met"] and metrics["analysis"]["float_fidelity"] > 0.99999
    assert metrics["finetune"]["val_fidelity"] > 0.94
