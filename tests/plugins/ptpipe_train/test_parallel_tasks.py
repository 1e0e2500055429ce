"""Every parallel mode trains every task to where one process does: regression of a table, segmentation of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score

import ptpipe
from ptpipe.api import RunResult
from ptpipe_torch import Data, Model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

PLUGIN = Path(__file__).with_name("task_nets.py")
TRAIN = "{epochs: 3, lr: 0.02, num_threads: 1, memory_format: contiguous}"
MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp", "workers": 2},
    "fsdp": {"mode": "fsdp", "workers": 2},
    "pp": {"mode": "pp", "microbatches": 4},
}


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A manifest for each task, whose train split does not fill its last batch."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(5)
    rows = rng.normal(50, 10, (61, 4))
    lines = ["a,b,c,target", *(",".join(f"{value:.3f}" for value in row) for row in rows)]
    (folder / "table.csv").write_text("\n".join(lines), encoding="utf-8")
    found = ["class" if row[0] + row[1] > 108 else "other" for row in rows]
    lines = [
        "a,b,c,kind",
        *(f"{row[0]:.3f},{row[1]:.3f},{row[2]:.3f},{kind}" for row, kind in zip(rows, found, strict=True)),
    ]
    (folder / "classes.csv").write_text("\n".join(lines), encoding="utf-8")
    for number in range(15):
        mask = rng.integers(0, 3, (8, 8), dtype=np.uint8)
        pixels = np.repeat(mask[..., None] * 80, 3, axis=2) + rng.integers(0, 40, (8, 8, 3), dtype=np.uint8)
        mask[: number % 4] = 255  # other numbers of pixels that count
        for kind, image in (("images", pixels), ("masks", mask)):
            (folder / "streets" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / "streets" / kind / f"{number:02}.png")
    data = {
        "regression": f"{{uses: data.table, with: {{path: {folder}/table.csv, task: regression, targets: [target], "
        "test_size: 5, val_size: 7, batch_size: 16}}",
        "classification": f"{{uses: data.table, with: {{path: {folder}/classes.csv, task: classification, "
        "targets: [kind], classes: {positive: class}, test_size: 5, val_size: 21, batch_size: 16}}",
        "segmentation": f"{{uses: data.segmentation_folder, with: {{path: {folder}/streets, class_names: [a, b, c], "
        "test_size: 2, val_size: 2, batch_size: 4, augment: [flip]}}",
    }
    nets = dict.fromkeys(("regression", "classification"), "{uses: model.mlp, with: {hidden: [16, 16]}}")
    nets["segmentation"] = "{uses: net.segmenter}"
    paths = {}
    for task, source in data.items():
        paths[task] = folder / f"{task}.yaml"
        text = (
            f"plugins: [{PLUGIN}]\nversion: 1\nname: {task}\nseed: 3\nstages:\n  data: {source}\n  net: {nets[task]}\n"
        )
        paths[task].write_text(text + f"  train: {{uses: train.supervised, with: {TRAIN}}}\n", encoding="utf-8")
    return paths


def trained(manifest: Path, **options: Any) -> tuple[Model, RunResult]:
    overrides = {f"train.{name}": value for name, value in options.items()}
    result = ptpipe.run(manifest, overrides, artifacts=manifest.parent / "artifacts")
    assert result.exit_code == 0, result.stages["train"].message
    model = result.artifact("train")
    assert isinstance(model, Model)
    return model, result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", ["regression", "classification", "segmentation"])
def test_it_ends_where_one_process_does(manifests: dict[str, Path], task: str, mode: str) -> None:
    single, one = trained(manifests[task])
    parallel, other = trained(manifests[task], parallel=MODES[mode])
    for name, tensor in single.tensors.items():
        difference = (tensor - parallel.tensors[name]).abs().max() / tensor.abs().max()
        assert difference < 1e-5, name
    ours, theirs = (result.stages["train"].metrics for result in (other, one))
    figures = [name for name in theirs if name.startswith("val_")] + ["train_loss"]
    assert len(figures) >= 4
    for name in figures:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


def test_a_ranking_is_of_the_samples_of_all_workers(manifests: dict[str, Path]) -> None:
    """21 of val: 11 for one worker and 10 for the other. The best epoch is that of the area."""
    options = {"parallel": MODES["ddp"], "early_stopping": {"metric": "val_roc_auc"}}
    model, result = trained(manifests["classification"], **options)
    data, metrics = result.artifact("data"), result.stages["train"].metrics
    assert isinstance(data, Data)
    (batch,) = data.batches("val", batch_size=21)
    with model.predictor() as predict:
        logits_NK = predict(batch.input_arrays())["logits"].astype(float)
    has_N, odds_N = batch.targets["labels"].numpy() == 0, logits_NK[:, 0] - logits_NK[:, 1]
    assert metrics["val_roc_auc"] == pytest.approx(roc_auc_score(has_N, odds_N), abs=1e-12)
    assert metrics["val_average_precision"] == pytest.approx(average_precision_score(has_N, odds_N), abs=1e-12)
    best = max(row["val_roc_auc"] for row in metrics["history"])
    assert metrics["val_roc_auc"] == best and 0.5 < best < 1


@pytest.mark.parametrize("task", ["regression", "segmentation"])
def test_accumulated_batches_are_one_large_batch(manifests: dict[str, Path], task: str) -> None:
    large, _ = trained(manifests[task], batch_size=8)
    accumulated, _ = trained(manifests[task], batch_size=4, accumulate=2)
    for name, tensor in large.tensors.items():
        assert (tensor - accumulated.tensors[name]).abs().max() / tensor.abs().max() < 1e-5, name


@pytest.mark.parametrize("mode", ["ddp", pytest.param("pp", marks=pytest.mark.thorough)])
def test_images_mixed_with_their_masks_end_alike(manifests: dict[str, Path], mode: str) -> None:
    mixed = {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}
    single, _ = trained(manifests["segmentation"], **mixed)
    parallel, _ = trained(manifests["segmentation"], **mixed, parallel=MODES[mode])
    for name, tensor in single.tensors.items():
        assert (tensor - parallel.tensors[name]).abs().max() / tensor.abs().max() < 1e-5, name
