"""From a layer that int8 harms to an ONNX file without the harm, by the command line, killed once on the way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

PLANT = '''
from __future__ import annotations
from ptpipe import Context, StageConfig, stage
from ptpipe_torch import Model

class PlantConfig(StageConfig):
    """No options."""

@stage("toy.plant", packages=("torch",))
def plant(config: PlantConfig, ctx: Context, model: Model) -> Model:
    """Make the weights of one hidden unit 1,000 times as large, and its output 0."""
    import torch

    network = model.build()
    with torch.no_grad():
        network[9].weight[0] *= 1000
        network[9].bias[0] = -1e5
    return model.with_state_dict_of(network)
'''
MANIFEST = """\
version: 1
name: tuned
seed: 7
plugins: [./plant.py]
stages:
  data:     {{uses: data.digits, with: {{val_size: 0.2}}}}
  net:      {{uses: model.small_cnn}}
  pretrain: {{uses: train.supervised, with: {{epochs: 6, batch_size: 32, lr: 0.05}}}}
  float:    {{uses: toy.plant, needs: {{model: pretrain}}}}
  prepared: {{uses: quant.prepare, needs: {{model: float}}, with: {{backend: {backend}, weights: per_tensor}}}}
  ranges:   {{uses: quant.calibrate, needs: {{model: prepared}}}}
  why:      {{uses: quant.analyze, needs: {{model: ranges.model}}}}
  tuned:
    uses: quant.tune
    needs: {{model: float}}
    with: {{backend: {backend}, weights: per_tensor, max_drop: 0.03}}
  int8:     {{uses: quant.convert, needs: {{model: tuned.model}}}}
  onnx:     {{uses: export.onnx, needs: {{model: int8}}}}
  compare:  {{uses: eval.compare, needs: {{models: [float, int8, onnx]}}, with: {{baseline: float, batch_sizes: []}}}}
  quality:  {{uses: gate.quality, needs: {{comparison: compare}}, with: {{candidate: onnx, max_drop: 0.1}}}}
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_the_layer_is_named_and_kept_float_and_the_file_is_as_good_as_the_float_network(
    tmp_path: Path, run_cli, backend: str
) -> None:
    (tmp_path / "plant.py").write_text(PLANT)
    (tmp_path / "tuned.yaml").write_text(MANIFEST.format(backend=backend))
    killed = run_cli.start("run", "tuned.yaml")
    deadline = time.monotonic() + 240
    while killed.poll() is None and not any((tmp_path / "artifacts" / "scratch").rglob("best-*")):
        assert time.monotonic() < deadline, "no trial was made"
        time.sleep(0.02)
    assert killed.poll() is None, "it ended before it could be killed"
    killed.kill()
    killed.communicate(timeout=60)
    ended = run_cli("run", "tuned.yaml", "--json", timeout_s=400)
    assert ended.code == 0, ended.err
    stages = {stage["stage_id"]: stage for stage in ended.json["stages"]}
    assert stages["why"]["metrics"]["worst_layer"] == "9"
    assert stages["tuned"]["metrics"]["kept_float"] == ["9"]
    assert stages["tuned"]["metrics"]["num_trials"] <= 5
    assert stages["compare"]["metrics"]["onnx.accuracy"] >= stages["compare"]["metrics"]["float.accuracy"] - 0.03
    report = next((tmp_path / "artifacts" / "runs").rglob("report.html")).read_text(encoding="utf-8")
    assert "Rounding errors: why" in report and "Tuning: tuned" in report
    assert '"worst_layer": "9"' in run_cli("show", "last", "--json").out
