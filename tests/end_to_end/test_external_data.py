"""What `torch.onnx.export` writes by default, a file and its weights beside it, from `model.onnx` to int8."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import RunResult, run
from ptpipe_torch import OnnxFile

from .conftest import ForkedCommandLine

pytestmark = pytest.mark.slow

MANIFEST = """\
version: 1
name: foreign
seed: 1
stages:
  data:    {uses: data.digits}
  float:   {uses: model.onnx, with: {file: FOLDER/net.onnx}}
  int8:    {uses: quant.onnx, needs: {model: float}, with: {num_samples: 64, compare_samples: 64}}
  compare: {uses: eval.compare, needs: {models: [float, int8]}, with: {batch_sizes: []}}
"""


def make_net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10))
    return nn.Sequential(*layers).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings(action="ignore"):  # of torch's own, about torch
        torch.onnx.export(
            make_net(), (torch.zeros(2, 1, 8, 8),), tmp_path / "net.onnx", dynamo=True, verbose=False,
            dynamic_shapes=({0: batch},),
        )  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}, "its default"
    (tmp_path / "m.yaml").write_text(MANIFEST.replace("FOLDER", str(tmp_path)), encoding="utf-8")
    return tmp_path


def outcomes(result: RunResult) -> dict[str, str]:
    return {name: str(stage.outcome) for name, stage in result.stages.items()}


def test_from_the_default_export_to_int8(folder: Path) -> None:
    result = run(folder / "m.yaml", artifacts=folder / "artifacts")
    assert set(outcomes(result).values()) == {"done"}
    file = result.artifact("float")
    assert isinstance(file, OnnxFile)
    images_NCHW = np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32)
    with file.predictor(1) as predict, torch.no_grad():
        expected = make_net()(torch.from_numpy(images_NCHW)).numpy()
        np.testing.assert_allclose(predict({"images": images_NCHW})["logits"], expected, rtol=1e-4, atol=1e-5)
    assert result.stages["int8"].metrics["top1_agreement"] > 0.95

    assert "cached" in outcomes(run(folder / "m.yaml", artifacts=folder / "artifacts"))["float"]
    content = bytearray((folder / "net.onnx.data").read_bytes())
    content[-3] ^= 0x80
    (folder / "net.onnx.data").write_bytes(content)
    changed = run(folder / "m.yaml", artifacts=folder / "artifacts")
    assert outcomes(changed) == {"data": "cached", **dict.fromkeys(("float", "int8", "compare"), "done")}
    assert changed.stages["float"].outputs != result.stages["float"].outputs


def test_it_is_compared_from_the_command_line(folder: Path, forked_cli: ForkedCommandLine) -> None:
    compare = ("compare", "net.onnx", "--data", "m.yaml", "--no-latency")
    done = forked_cli(*compare)
    assert done.code == 0 and "onnx float32" in done.err
    (folder / "net.onnx.data").rename(folder / "elsewhere")
    (folder / "net.onnx.data").symlink_to("elsewhere")
    refused = forked_cli(*compare)
    assert refused.code == 2 and "'net.onnx.data', which is not read: a symbolic link is on its path" in refused.err
