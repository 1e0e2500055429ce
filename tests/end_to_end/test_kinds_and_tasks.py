"""Every kind that quantizes, repairs, explains or judges, on every task, through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ptpipe_onnx.quantization.weight_only import missing_quantizer

from ..forks import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("fork_server")]

NETS = """
from torch import nn


def rows():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def pixels():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*pixels(), nn.ReLU(), nn.Conv2d(3, 2, 1))

    def forward(self, x):
        return self.layers(x) * 10 + 50
"""
STAGES = """
version: 1
name: every-kind
seed: 3
stages:
  data: {{uses: {data}}}
  net: {{uses: {net}}}
  float: {{uses: train.supervised, needs: {{model: net}}, with: {{epochs: 4, lr: 0.003, optimizer: adamw}}}}
  onnx_float: {{uses: export.onnx, needs: {{model: float}}}}
  equalized: {{uses: quant.equalize, needs: {{model: float}}}}
  smoothed: {{uses: quant.smooth, needs: {{model: float}}}}
  prepared: {{uses: quant.prepare, needs: {{model: equalized}}}}
  calibrated: {{uses: quant.calibrate, needs: {{model: prepared}}}}
  rounded: {{uses: quant.adaround, needs: {{model: calibrated}}, with: {{num_iterations: 50}}}}
  corrected: {{uses: quant.bias_correct, needs: {{model: rounded}}}}
  why: {{uses: quant.analyze, needs: {{model: corrected}}}}
  int8: {{uses: quant.convert, needs: {{model: corrected}}}}
  onnx_int8: {{uses: export.onnx, needs: {{model: int8}}}}
  tuned: {{uses: quant.tune, needs: {{model: float}}, with: {{max_drop: 0.3}}}}
  dynamic: {{uses: quant.dynamic, needs: {{model: float}}}}
  pruned: {{uses: prune.magnitude, needs: {{model: float}}, with: {{amount: 0.3}}}}
  fake_quant: {{uses: quant.prepare_qat, needs: {{model: pruned}}}}
  finetune:
    uses: train.supervised
    needs: {{model: fake_quant, teacher: float}}
    with: {{epochs: 1, lr: 0.001, distillation: {{}}}}
  qat: {{uses: quant.convert, needs: {{model: finetune}}}}
  onnx_qat: {{uses: export.onnx, needs: {{model: qat}}}}
  quantizer: {{uses: quant.onnx, needs: {{model: onnx_float}}}}
  four_bits: {{uses: quant.weight_only, needs: {{model: onnx_float}}, with: {{block_size: 16}}}}
  predicted: {{uses: eval.predict, needs: {{model: onnx_int8}}}}
  compare:
    uses: eval.compare
    needs: {{models: [onnx_float, float, int8, onnx_int8, dynamic, qat, onnx_qat, quantizer, four_bits]}}
    with: {{baseline: onnx_float, batch_sizes: []}}
  gate: {{uses: gate.quality, needs: {{comparison: compare}}, with: {{candidate: onnx_int8, max_drop: 0.3}}}}
  best: {{uses: select.best, needs: {{comparison: compare, models: [onnx_int8, onnx_qat]}}, with: {{max_drop: 0.3}}}}
"""
ONLY_LINEAR = ("smoothed", "dynamic", "four_bits")
"""Stages that refuse a network without linear layers."""
CONVOLUTIONAL = ("segmentation", "maps")


def write_rows(path: Path, targets_of: Callable[[Any], Any]) -> None:
    x = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
    np.savez(path, x=x, y=targets_of(x))


def write_regression(path: Path) -> None:
    write_rows(path, lambda x: np.stack([2 * x[:, 0], x[:, 1] + x[:, 2]], 1))


def write_labels(path: Path) -> None:
    write_rows(path, lambda x: (x[:, :2] > 0).astype(np.int64))


def write_pixels(path: Path) -> None:
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 3, (80, 4, 4)).repeat(8, 1).repeat(8, 2)
    images = masks[:, None] + rng.normal(0, 0.2, (80, 3, 32, 32))
    np.savez(path, x=images.astype(np.float32), y=masks)


def write_maps(path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3, 16, 16)).astype(np.float32)
    y = np.stack([50 + 10 * x[:, 0], 50 + 5 * (x[:, 1] - x[:, 2])], axis=1)
    np.savez(path, x=x, y=y)


def write_lines(path: Path, line_of: Callable[[list[str], list[str]], Mapping[str, Any]]) -> None:
    random, words = (
        Random(0),
        {"Ann": "B-PER", "Bob": "B-PER", "saw": "O", "met": "O", "Rome": "B-LOC", "Oslo": "B-LOC"},
    )
    lines = []
    for _ in range(300):
        text = random.choices(list(words), k=random.randint(3, 6))
        lines.append(json.dumps(line_of(text, [words[word] for word in text])))
    path.write_text("\n".join(lines) + "\n")


def write_tags(path: Path) -> None:
    write_lines(path, lambda text, tags: {"tokens": text, "tags": tags})


def write_texts(path: Path) -> None:
    write_lines(path, lambda text, tags: {"text": " ".join(text)})


ARRAYS = "data.arrays, with: {{path: data.npz, inputs: [x], target: y, task: {}, batch_size: 32, val_size: 0.15}}"
TEXTS = (
    "data.text, with: {{path: data.jsonl, task: {}, {}batch_size: 16, val_size: 0.2, vocabulary_size: 300, "
    "max_length: 16}}"
)
OWN = "model.python, with: {{file: nets.py, function: {}}}"
TEXT_NET = "model.text_transformer, with: {{num_layers: 1, dim: 32{}}}"
CASES = {
    "regression": (ARRAYS.format("regression"), OWN.format("rows"), "data.npz", write_regression, "r2"),
    "multi_label": (ARRAYS.format("multi_label"), OWN.format("rows"), "data.npz", write_labels, "macro_f1"),
    "segmentation": (ARRAYS.format("segmentation"), OWN.format("pixels"), "data.npz", write_pixels, "mean_iou"),
    "maps": (
        ARRAYS.format("regression").replace("task:", "data_range: 100, task:"),
        OWN.format("Maps"),
        "data.npz",
        write_maps,
        "psnr_db",
    ),
    "token_classification": (
        TEXTS.format("token_classification", "text: tokens, targets: [tags], "),
        TEXT_NET.format(""),
        "data.jsonl",
        write_tags,
        "f1",
    ),
    "language_modeling": (
        TEXTS.format("language_modeling", ""),
        TEXT_NET.format(", causal: true"),
        "data.jsonl",
        write_texts,
        "perplexity",
    ),
}


def manifest_of(task: str) -> str:
    data, net, *_ = CASES[task]
    text = STAGES.format(data=data, net=net)
    if task in CONVOLUTIONAL:
        return without(text, *ONLY_LINEAR)
    return without(text, "four_bits") if missing_quantizer() else text


def without(manifest: str, *stages: str) -> str:
    """Return a manifest without these stages, and without them in the comparison."""
    text = "\n".join(line for line in manifest.splitlines() if not line.strip().startswith(stages))
    for stage in stages:
        text = text.replace(f" {stage},", "").replace(f", {stage}]", "]")
    return text


@pytest.mark.parametrize("task", CASES)
def test_every_kind_takes_every_task(task, tmp_path) -> None:
    *_, name, write, metric = CASES[task]
    write(tmp_path / name)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "all.yaml").write_text(manifest_of(task))
    finished = run_forked(tmp_path, "run", "all.yaml", "--json")
    assert finished.returncode == 0, finished.stderr
    record = json.loads(finished.stdout)
    stages = {stage["stage_id"]: stage for stage in record["stages"]}
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    drop = "drop" if metric in ("macro_f1", "mean_iou", "f1") else "worse_by"
    for stage_id in ("why", "tuned"):
        metrics = stages[stage_id]["metrics"]
        assert metrics[f"{drop}_low"] <= metrics[drop] <= metrics[f"{drop}_high"]
    assert f"float_{metric}" in stages["why"]["metrics"]
