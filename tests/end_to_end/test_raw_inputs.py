"""A file from images of any size to classes, exported, evaluated, timed and checked in one manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ptpipe_torch import Data, Predictions

from ..forks import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("fork_server")]

MANIFEST = """\
version: 1
name: raw
seed: 7
stages:
  data:
    uses: data.image_folder
    with: {path: images, image_size: 16, resize: 18, channels: 1, normalize: measured, num_workers: 0, test_size: 0.4}
  net:        {uses: model.small_cnn}
  observed:   {uses: quant.prepare, needs: {model: net}, with: {backend: fbgemm}}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  int8:       {uses: quant.convert, needs: {model: calibrated}}
  raw:
    uses: export.onnx
    needs: {model: int8}
    with: {preprocessing: nhwc, resize: true, postprocessing: true}
  predicted:  {uses: eval.predict, needs: {model: raw}}
  compare:
    uses: eval.compare
    needs: {models: [int8, raw]}
    with: {baseline: int8, batch_sizes: [1], threads: [one], budget_s: 1}
  accuracy:   {uses: gate.accuracy, needs: {comparison: compare}, with: {candidate: raw, max_drop: 0.02}}
"""


def ptpipe(folder: Path, *arguments: str | Path) -> Any:
    finished = run_forked(folder, *arguments, "--json")
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def write_images(folder: Path, num_images: int) -> None:
    """Write digits in frames of various sizes."""
    digits, random = load_digits(), np.random.default_rng(0)
    for number, (pixels_HW, digit) in enumerate(zip(digits.images[:num_images], digits.target, strict=False)):
        width, height = (int(side) for side in random.integers(12, 60, 2))
        image = Image.fromarray((pixels_HW * 15.9375).astype(np.uint8)).resize((width, height))
        (folder / str(digit)).mkdir(parents=True, exist_ok=True)
        image.save(folder / str(digit) / f"{number:04d}.png")


def test_images_to_gates(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 400)
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
    assert rows["raw"]["costs"]["io_bytes"] == 16 * 16 + 4 * 10  # of bytes in and logits out
    metadata = {entry.key: entry.value for entry in onnx.load(folder("raw") / "model.onnx").metadata_props}
    assert metadata["export.onnx model"] == stages["int8"]["outputs"]["output"]["digest"]
    assert json.loads(metadata["export.onnx options"])["preprocessing"] == "nhwc"
    session = ort.InferenceSession(str(folder("raw") / "model.onnx"), providers=["CPUExecutionProvider"])
    classes_N = []
    for sample in Data.load(folder("data")).splits["test"].ids:  # the files themselves, decoded and no more
        pixels_HW = np.asarray(Image.open(tmp_path / "images" / str(sample)))
        classes_N.append(session.run(["classes"], {"images": pixels_HW[np.newaxis, ..., np.newaxis]})[0][0])
    assert len(classes_N) == 160
    assert (classes_N == predicted.arrays["prediction"]).mean() >= 0.99  # a level more or less in some pixels
    checked = ptpipe(tmp_path, "check", folder("raw") / "model.onnx")
    assert checked["outputs"].keys() == {"logits", "probabilities"}
    assert np.allclose([of["max_abs_difference"] for of in checked["outputs"].values()], 0)
