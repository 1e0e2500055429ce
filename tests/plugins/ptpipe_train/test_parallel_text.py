"""Every parallel mode trains text networks to where one process does, whatever the lengths in its batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptpipe
from ptpipe import ManifestError
from ptpipe.api import RunResult
from ptpipe_torch import Model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

NETS = {
    "transformer": "{uses: model.text_transformer, with: {dim: 16, num_heads: 2, num_layers: 2, dropout: 0}}",
    "causal": "{uses: model.text_transformer, with: {dim: 16, num_heads: 2, num_layers: 1, dropout: 0, causal: true}}",
    "lstm": "{uses: model.text_lstm, with: {dim: 16, hidden_size: 16, dropout: 0}}",
}
TASKS = {
    "transformer": "task: classification, targets: [label]",
    "causal": "task: token_classification, text: words, targets: [tags]",
    "lstm": "task: classification, targets: [label]",
}
MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp", "workers": 2},
    "fsdp": {"mode": "fsdp", "workers": 2},
    "pp": {"mode": "pp", "microbatches": 4},
}
CASES = [("transformer", mode) for mode in MODES] + [("causal", "ddp"), ("lstm", "fsdp"), ("lstm", "pp")]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A manifest for each network; texts of 1 to 12 words, whose train split does not fill its last batch."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(5)
    with (folder / "texts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(61):
            words = [f"w{number}" for number in rng.integers(0, 20, rng.integers(1, 13))]
            row = {
                "text": " ".join(words),
                "label": "w3" in words,
                "words": words,
                "tags": [word[-1] for word in words],
            }
            file.write(json.dumps(row) + "\n")
    paths = {}
    for name, net in NETS.items():
        paths[name] = folder / f"{name}.yaml"
        options = (
            f"path: {folder}/texts.jsonl, {TASKS[name]}, test_size: 5, val_size: 7, batch_size: 16, max_length: 40"
        )
        paths[name].write_text(
            f"version: 1\nname: {name}\nseed: 3\nstages:\n  data: {{uses: data.text, with: {{{options}}}}}\n"
            f"  net: {net}\n"
            "  train: {uses: train.supervised, with: {epochs: 2, lr: 0.02, num_threads: 1}}\n",
            encoding="utf-8",
        )
    return paths


def run(manifest: Path, padding: str, **options: Any) -> RunResult:
    overrides: dict[str, Any] = {f"train.{name}": value for name, value in options.items()}
    return ptpipe.run(manifest, overrides | {"data.padding": padding}, artifacts=manifest.parent / "artifacts")


def trained(manifest: Path, padding: str = "longest", **options: Any) -> tuple[Model, RunResult]:
    result = run(manifest, padding, **options)
    assert result.exit_code == 0, result.stages["train"].message
    model = result.artifact("train")
    assert isinstance(model, Model)
    return model, result


def assert_equal(one: Model, other: Model) -> None:
    for name, tensor in one.tensors.items():
        assert (tensor - other.tensors[name]).abs().max() / tensor.abs().max() < 1e-5, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_it_ends_where_one_process_does(manifests: dict[str, Path], name: str, mode: str) -> None:
    """One process pads each batch to its longest text, a shard to its own, pipeline stages all to one length."""
    single, one = trained(manifests[name])
    padding = "max_length" if mode == "pp" else "longest"
    parallel, other = trained(manifests[name], padding, parallel=MODES[mode])
    assert_equal(single, parallel)
    ours, theirs = (result.stages["train"].metrics for result in (other, one))
    figures = [figure for figure in theirs if figure.startswith("val_")] + ["train_loss"]
    assert len(figures) >= 3
    for figure in figures:
        assert ours[figure] == pytest.approx(theirs[figure], rel=1e-5), figure
    if mode == "pp" and name == "transformer":
        assert ours["split_points"][0].startswith(("layers.", "embedding.", "add"))


@pytest.mark.parametrize("name", ["transformer", "causal"])
def test_accumulated_batches_of_other_lengths_are_one_large_batch(manifests: dict[str, Path], name: str) -> None:
    large, _ = trained(manifests[name])
    accumulated, _ = trained(manifests[name], batch_size=4, accumulate=4)
    assert_equal(large, accumulated)


def test_pipeline_stages_refuse_batches_of_different_lengths(manifests: dict[str, Path]) -> None:
    with pytest.raises(ManifestError) as raised:
        run(manifests["transformer"], "longest", parallel=MODES["pp"])
    (problem,) = raised.value.problems
    assert "pp needs batches of one shape: set `padding: max_length` in data, or use mode ddp" in str(problem)
