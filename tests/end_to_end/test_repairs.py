"""All repairs in one manifest, from data to the ONNX file, on both kinds of backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ptpipe import ExitCode, run
from ptpipe_torch.int8.engine import supported_engines

MANIFEST = """\
version: 1
name: repairs
stages:
  data: {{uses: data.digits, with: {{batch_size: 64}}}}
  net: {{uses: model.small_cnn}}
  trained: {{uses: train.supervised, with: {{epochs: 1}}}}
  even: {{uses: quant.equalize, needs: {{model: trained}}}}
  prepared: {{uses: quant.prepare, needs: {{model: even}}, with: {{backend: {backend}, weights: per_tensor}}}}
  calibrated: {{uses: quant.calibrate, needs: {{model: prepared}}, with: {{num_samples: 128}}}}
  rounded: {{uses: quant.adaround, needs: {{model: calibrated.model}}, with: {{num_samples: 64, num_iterations: 3}}}}
  biases: {{uses: quant.bias_correct, needs: {{model: rounded}}, with: {{num_samples: 64}}}}
  int8: {{uses: quant.convert, needs: {{model: biases}}}}
  file: {{uses: export.onnx, needs: {{model: int8}}}}
"""


@pytest.mark.parametrize("backend", [name for name in ("fbgemm", "qnnpack") if name in supported_engines()])
@pytest.mark.sampled(2)
def test_all_repairs_in_a_manifest(tmp_path: Path, backend: str) -> None:
    manifest = tmp_path / "repairs.yaml"
    manifest.write_text(MANIFEST.format(backend=backend), encoding="utf-8")
    ended = run(manifest, artifacts=tmp_path / "artifacts")
    assert ended.exit_code is ExitCode.DONE, ended.stages
    metrics: dict[str, dict[str, Any]] = {name: dict(stage.metrics) for name, stage in ended.stages.items()}
    assert metrics["even"]["equalized_pairs"] >= 2
    assert metrics["rounded"]["rounded_layers"] == 4
    assert metrics["biases"]["corrected_layers"] == 4
    assert metrics["file"]["top1_agreement"] >= 0.99
