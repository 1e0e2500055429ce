"""`manifests/camvid_segmentation.yaml` through the command line, on made-up streets in CamVid's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from ..conftest import CommandLine
from ..forks import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]

ROOT = Path(__file__).parents[2]
HEIGHT, WIDTH = 48, 64
SHORT = [
    "pretrain.epochs=40",
    "finetune.epochs=1",
    "net.width=8",
    "compare.batch_sizes=[]",
    "quality.max_drop=0.05",
]


def draw_street(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sky, buildings, a road, and a car somewhere on it; a border does not count."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[12:28], mask[28:] = 1, 3
    row, column = rng.integers(28, 40), rng.integers(0, WIDTH - 16)
    mask[row : row + 8, column : column + 16] = 8
    mask[:, :2] = 11
    colours = np.random.default_rng(0).integers(0, 200, (12, 3))
    pixels = np.clip(colours[mask] + rng.integers(0, 40, (HEIGHT, WIDTH, 3)), 0, 255).astype(np.uint8)
    return pixels, mask


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split, num in (("train", 48), ("val", 8), ("test", 12)):
        for number in range(num):
            for kind, pixels in zip(("images", "masks"), draw_street(1000 * num + number), strict=True):
                (folder / "camvid" / split / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(folder / "camvid" / split / kind / f"{number:03}.png")
    return folder


def command(artifacts: Path, *options: str) -> tuple[str | Path, ...]:
    settings = [word for option in (*SHORT, *options) for word in ("-s", option)]
    return "run", "manifests/camvid_segmentation.yaml", "--json", *settings, "--artifacts", artifacts


def run(streets: Path, artifacts: Path, *options: str) -> tuple[int, dict[str, Any]]:
    finished = run_forked(ROOT, *command(artifacts, *options), environment={"PTPIPE_DATA": str(streets)})
    assert finished.stdout, finished.stderr
    return finished.returncode, {stage["stage_id"]: stage for stage in json.loads(finished.stdout)["stages"]}


def test_a_class_for_each_pixel_down_to_int8_onnx(streets: Path, tmp_path: Path) -> None:
    code, stages = run(streets, tmp_path)
    assert code == 0, stages
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    rows = {row["name"]: row for row in table["rows"]}
    assert table["metrics"][0] == {"name": "mean_iou", "higher_is_better": True, "is_fraction": True}
    assert rows["pretrain"]["mean_iou"] > 0.7
    for name in ("static", "qat", "onnx"):
        assert rows[name]["drop"] < 0.05
        assert rows[name]["size_ratio"] < 0.4
    assert rows["onnx_float"]["mean_iou"] == pytest.approx(rows["pretrain"]["mean_iou"], abs=1e-3)
    assert stages["quality"]["outcome"] == "done"
    (file,) = tmp_path.glob("runs/*/onnx/model.onnx")
    session = onnxruntime.InferenceSession(file)
    assert [value.shape for value in (*session.get_inputs(), *session.get_outputs())] == [
        ["batch", 3, "8*height", "8*width"],
        ["batch", 11, "8*height", "8*width"],
    ]
    (logits,) = session.run(None, {"images": np.zeros((1, 3, 72, 40), np.float32)})
    assert logits.shape == (1, 11, 72, 40)

    # Not forked: its strings have hashes of their own.
    ended = CommandLine(ROOT)(*command(tmp_path, "quality.min_value=0.999"), PTPIPE_DATA=str(streets))
    again = {stage["stage_id"]: stage["outcome"] for stage in ended.json["stages"]}
    assert (ended.code, again.pop("quality"), {*again.values()}) == (3, "refused", {"cached"})
