"""Zeros of a pruned model stay zero, and everything else is trained as with torch's own masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import prune

import ptpipe
from ptpipe.api import RunResult
from ptpipe_prune import MagnitudeConfig, magnitude
from ptpipe_torch import Data, Model, epoch_order

from .conftest import Lab, assert_same_bits, max_difference
from .test_parallel import model_of
from .test_resume import EVERY_STEP, Stopped
from .test_resume import make_data as make_stopping_data

EXACT = {"memory_format": "contiguous"}


def pruned(lab: Lab, **arguments: Any) -> Model:
    return magnitude(MagnitudeConfig(amount=0.5), lab.context(), lab.make_model(**arguments))


def trained_with_torchs_masks(model: Model, data: Data, clip: float) -> dict[str, torch.Tensor]:
    module = model.build().train()
    masked = [layer for layer in module if hasattr(layer, "weight") and layer.weight.dim() > 1]
    for layer in masked:
        prune.custom_from_mask(layer, "weight", layer.weight != 0)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    for epoch in range(2):
        for batch in data.batches("train", order_N=epoch_order(len(data.splits["train"]), 7, epoch)):
            optimizer.zero_grad()
            F.cross_entropy(module(*batch.args), batch.targets["labels"]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    for layer in masked:
        prune.remove(layer, "weight")
    return module.state_dict()


def test_it_is_a_training_with_torchs_masks(lab: Lab) -> None:
    model, data = pruned(lab, norm=True), lab.make_data()
    options = {"epochs": 2, "weight_decay": 0.01, "nesterov": True, "clip_grad_norm": 0.5} | EXACT
    trained = lab.train(model, data, **options)
    expected = trained_with_torchs_masks(model, data, 0.5)
    for name, tensor in trained.model.tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        if tensor.dim() > 1:
            assert torch.equal(tensor == 0, model.tensors[name] == 0), name
    assert trained.metrics["sparsity"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"precision": "bf16", "ema": {"decay": 0.9}},
        {"precision": "fp16", "accumulate": 2, "clip_grad_norm": 1.0},
    ],
)
def test_they_stay_with_every_optimizer_and_precision_and_through_a_restart(lab: Lab, options: dict[str, Any]) -> None:
    model, options = pruned(lab, norm=True, dropout=0.5), {"epochs": 3} | options
    want = lab.train_afresh(model, make_stopping_data(lab), **options)
    for name, tensor in want.model.tensors.items():
        assert tensor.dim() < 2 or torch.equal(tensor == 0, model.tensors[name] == 0), name
    with pytest.raises(Stopped):
        lab.train(model, make_stopping_data(lab, stop_train=9), checkpoint_every_s=EVERY_STEP, **options)
    got = lab.train(model, make_stopping_data(lab), checkpoint_every_s=EVERY_STEP, **options)
    assert got.log
    assert_same_bits(got.model, want.model)


def test_zeros_of_a_model_that_was_not_pruned_are_trained(lab: Lab) -> None:
    model = pruned(lab)
    dense = model.with_recipe(is_sparse=False)
    trained = lab.train(dense, lab.make_data(), epochs=1)
    assert "sparsity" not in trained.metrics
    assert (trained.model.tensors["6.weight"] == 0).float().mean() < 0.1


MANIFEST = """
version: 1
name: sparse
seed: 7
plugins: [{plugins}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 290, val_size: 50, num_test: 16, image_size: 12}}}}
  net: {{uses: model.plain}}
  pruned: {{uses: prune.magnitude, needs: {{model: net}}, with: {{amount: 0.6, scope: global}}}}
  train:
    uses: train.supervised
    needs: {{model: pruned}}
    with: {{epochs: 2, batch_size: 92, lr: 0.05, clip_grad_norm: 0.3, memory_format: contiguous, num_threads: 1}}
"""
MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp", "workers": 2},
    "fsdp": {"mode": "fsdp", "workers": 2, "wrap": ["Linear"]},
    "pp": {"mode": "pp", "microbatches": 4},
    "ddp+pp": {"mode": "ddp+pp", "workers": 4, "microbatches": 2},
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "sparse.yaml"
    path.write_text(MANIFEST.format(plugins=Path(__file__).with_name("parallel_nets.py")), encoding="utf-8")
    return path


def run(manifest: Path, **options: Any) -> RunResult:
    overrides = {f"train.{name}": value for name, value in options.items()}
    return ptpipe.run(manifest, overrides, artifacts=manifest.parent / "artifacts")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODES)
def test_every_parallel_mode_keeps_them(manifest: Path, name: str) -> None:
    single, parallel = run(manifest), run(manifest, parallel=MODES[name])
    one, other = model_of(single), model_of(parallel)
    assert max_difference(one, other) < 1e-5
    for name_, tensor in one.tensors.items():
        assert tensor.dim() < 2 or torch.equal(tensor == 0, other.tensors[name_] == 0)
    assert single.stages["train"].metrics["sparsity"] == pytest.approx(0.6, abs=0.001)
    assert parallel.stages["train"].metrics["sparsity"] == single.stages["train"].metrics["sparsity"]
