"""Networks as public repositories write them, through every way that a manifest can take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..forks import run_forked

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600), pytest.mark.usefixtures("fork_server")]

MANIFEST = """
version: 1
name: styles
seed: 7
plugins: [{plugin}]
stages:
  data:       {{uses: data.digits, with: {{batch_size: 30}}}}
  net:        {{uses: model.public_style, with: {{name: {network}}}}}
  pretrain:   {{uses: train.supervised, with: {{epochs: 4, lr: 0.002, optimizer: adamw, schedule: {{name: cosine}}}}}}
  dynamic:    {{uses: quant.dynamic, needs: {{model: pretrain}}, with: {{backend: &backend {backend}}}}}
  observed:   {{uses: quant.prepare, needs: {{model: pretrain}}, with: {{backend: *backend}}}}
  calibrated: {{uses: quant.calibrate, needs: {{model: observed}}}}
  static:     {{uses: quant.convert, needs: {{model: calibrated}}}}
  fake_quant: {{uses: quant.prepare_qat, needs: {{model: pretrain}}, with: {{backend: *backend}}}}
  finetune:
    uses: train.supervised
    needs: {{model: fake_quant}}
    with: {{epochs: 1, lr: 0.0002, optimizer: adamw}}
  qat:        {{uses: quant.convert, needs: {{model: finetune}}}}
  onnx_float:   {{uses: export.onnx, needs: {{model: pretrain}}}}
  onnx_dynamic: {{uses: export.onnx, needs: {{model: dynamic}}}}
  onnx_static:  {{uses: export.onnx, needs: {{model: static}}}}
  onnx_qat:     {{uses: export.onnx, needs: {{model: qat}}}}
  compare:
    uses: eval.compare
    needs: {{models: [pretrain, dynamic, static, qat, onnx_float, onnx_dynamic, onnx_static, onnx_qat]}}
    with: {{batch_sizes: [1], threads: [one], budget_s: 1}}
"""
NETWORKS = [("unet", "qnnpack"), *((name, "fbgemm") for name in ("unet", "retina", "effdet", "vit", "text"))]


@pytest.mark.parametrize(("network", "backend"), NETWORKS)
def test_every_form_of_it_is_as_accurate(tmp_path: Path, network: str, backend: str) -> None:
    plugin = Path(__file__).with_name("public_style_nets.py")
    (tmp_path / "m.yaml").write_text(MANIFEST.format(plugin=plugin, network=network, backend=backend), encoding="utf-8")
    ended = run_forked(tmp_path, "run", "m.yaml", "--json")
    assert ended.returncode == 0, ended.stderr
    stages = {stage["stage_id"]: stage for stage in json.loads(ended.stdout)["stages"]}
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    accuracies = {row["name"]: row["accuracy"] for row in table["rows"]}
    assert len(accuracies) == 8
    assert accuracies["pretrain"] > 0.3  # of ten classes; the text encoder reads pixels
    for name, accuracy in accuracies.items():
        assert accuracy > accuracies["pretrain"] - 0.03, name
