"""Zeros of a pruned model stay zero, everything else is trained as with torch's own masks, and zeros become more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F
from torch.nn.utils import prune

import ptpipe
from ptpipe import StageError
from ptpipe.api import RunResult
from ptpipe_prune import MagnitudeConfig, magnitude
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import Data, Model, Recipe, epoch_order
from ptpipe_torch.int8.engine import quantized_engine, supported_engines
from ptpipe_train import TrainConfig
from ptpipe_train.sparsity import PruningSchedule, pruned_weights

from .conftest import Lab, assert_same_bits, max_difference
from .test_parallel import model_of
from .test_resume import EVERY_STEP, Stopped
from .test_resume import make_data as make_stopping_data

EXACT = {"memory_format": "contiguous"}
BACKENDS = [backend for backend in ("fbgemm", "qnnpack") if backend in supported_engines()]


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
    dense = model.with_recipe(pruned=())
    trained = lab.train(dense, lab.make_data(), epochs=1)
    assert "sparsity" not in trained.metrics
    assert (trained.model.tensors["6.weight"] == 0).float().mean() < 0.1


def test_zeros_of_weights_that_were_not_pruned_are_trained(lab: Lab) -> None:
    model = pruned(lab).with_recipe(pruned=("6.weight",))
    trained = lab.train(model, lab.make_data(), epochs=1)
    assert torch.equal(trained.model.tensors["6.weight"] == 0, model.tensors["6.weight"] == 0)
    assert trained.metrics["sparsity"] == pytest.approx(0.5, abs=0.01)
    for name in ("0.weight", "8.weight"):  # as of an identity that a layer begins with
        assert (trained.model.tensors[name] == 0).float().mean() < 0.1
    assert trained.model.recipe.pruned == ("6.weight",)


def test_of_former_models_all_zeros_are_kept(lab: Lab) -> None:
    model = pruned(lab)
    former = json.loads(model.recipe.to_json())
    del former["pruned"]
    model = model.with_recipe(pruned=Recipe.from_json(json.dumps(former)).pruned)
    assert pruned_weights(model).keys() == {"0.weight", "6.weight", "8.weight"}


def test_the_schedule_is_the_cubic_one() -> None:
    schedule = PruningSchedule(frozenset(), 0.8, begin=10, end=50, every=15)
    assert [step for step in range(100) if schedule.is_due(step)] == [10, 25, 40, 50]
    for step in range(10, 51):
        cubic = 0.8 + (0.2 - 0.8) * (1 - (step - 10) / 40) ** 3
        assert schedule.fraction_at(step, 0.2) == pytest.approx(cubic, abs=1e-12)
    assert (schedule.fraction_at(10, 0.2), schedule.fraction_at(50, 0.2)) == (pytest.approx(0.2), 0.8)


def pruned_by_hand(model: Model, data: Data, make_optimizer: Any, amount: float) -> tuple[dict[str, torch.Tensor], Any]:
    """Train 14 steps; before the steps 2, 5, 8 and 10 apply torch's own pruning to each layer, in its forward pass."""
    module = model.build().train()
    layers = [layer for layer in module if hasattr(layer, "weight") and layer.weight.dim() > 1]
    for layer in layers:
        prune.identity(layer, "weight")
    optimizer, step, zeros = make_optimizer(module.parameters()), 0, list[int]()
    for epoch in range(2):
        for batch in data.batches("train", order_N=epoch_order(len(data.splits["train"]), 7, epoch)):
            for layer in layers if step in (2, 5, 8, 10) else ():
                wanted = int((amount - amount * (1 - (step - 2) / 8) ** 3) * layer.weight.numel())
                kept = layer.weight_mask * layer.weight_orig.detach().abs()
                smallest = kept.flatten().argsort(stable=True)[:wanted]
                layer.weight_mask.view(-1)[smallest] = 0
                # Where nothing is read, nothing may be remembered either: see `KeptZeros.prune`.
                layer.weight_orig.data.mul_(layer.weight_mask)
                for value in optimizer.state[layer.weight_orig].values():
                    if value is not None and value.shape == layer.weight_mask.shape:
                        value.mul_(layer.weight_mask)
            zeros.append(sum(int((layer.weight_mask == 0).sum()) for layer in layers))
            optimizer.zero_grad()
            F.cross_entropy(module(*batch.args), batch.targets["labels"]).backward()
            optimizer.step()
            step += 1
    for layer in layers:
        prune.remove(layer, "weight")
    return module.state_dict(), zeros


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_zeros_become_more_as_with_torchs_masks(lab: Lab, name: str) -> None:
    model, data = lab.make_model(norm=True), lab.make_data()
    common: dict[str, Any] = {"weight_decay": 0.01} | ({"lr": 0.05, "momentum": 0.9} if name == "sgd" else {"lr": 1e-3})

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        types: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        return types[name](parameters, **common)

    pruning = {"amount": 0.8, "begin": 2, "end": 10, "every": 3}
    trained = lab.train(model, data, epochs=2, optimizer=name, pruning=pruning, **common, **EXACT)
    expected, zeros = pruned_by_hand(model, data, make_optimizer, 0.8)
    assert zeros[1:3] == [0, 0] and 0 < zeros[5] < zeros[8] < zeros[10] == zeros[-1]
    for key, tensor in trained.model.tensors.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6, msg=key)
        if tensor.dim() > 1:
            assert torch.equal(tensor == 0, expected[key] == 0), key
            assert int((tensor == 0).sum()) == int(0.8 * tensor.numel())
    assert trained.model.recipe.pruned == ("0.weight", "6.weight", "8.weight")
    assert trained.metrics["sparsity"] == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16", "accumulate": 2, "clip_grad_norm": 1.0},
        {"precision": "bf16", "ema": {"decay": 0.9}, "optimizer": "adamw"},
        {"memory_format": "channels_last", "nesterov": True, "ema": {}},
    ],
)
def test_they_become_as_many_with_every_optimizer_and_precision(lab: Lab, options: dict[str, Any]) -> None:
    model = pruned(lab, norm=True)  # half of them are there from the beginning
    pruning = {"amount": 0.9, "skip": ["0"], "every": 1}
    trained = lab.train(model, lab.make_data(), epochs=3, pruning=pruning, **options).model
    for name in ("0.weight", "6.weight", "8.weight"):
        before, after = model.tensors[name] == 0, trained.tensors[name] == 0
        assert bool((after | ~before).all()), name
        assert int(after.sum()) == (int(before.sum()) if name[0] == "0" else int(0.9 * after.numel())), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_kept_through_quantization_aware_training_and_in_int8(lab: Lab, backend: str) -> None:
    sparse = lab.train(lab.make_model(norm=True), lab.make_data(), epochs=2, pruning={"amount": 0.75, "every": 1}).model
    prepared = prepare_qat(PrepareQatConfig(backend=backend), lab.context(), sparse)
    tuned = lab.train(prepared, lab.make_data(), epochs=1, lr=0.005).model
    int8 = convert(ConvertConfig(), lab.context(), tuned)
    assert_sparse_in_int8(int8, {"0": sparse.tensors["0.weight"], "6": sparse.tensors["6.weight"]})


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_of_a_network_with_fake_quantization_become_more(lab: Lab, backend: str) -> None:
    prepared = prepare_qat(PrepareQatConfig(backend=backend), lab.context(), lab.make_model(norm=True))
    tuned = lab.train(prepared, lab.make_data(), epochs=3, lr=0.02, pruning={"amount": 0.75, "skip": ["8"]}).model
    weights = {name: tuned.tensors[f"{name}.weight"] for name in ("0", "6")}
    for weight in weights.values():
        assert int((weight == 0).sum()) == int(0.75 * weight.numel())
    assert tuned.tensors["8.weight"].all()
    assert_sparse_in_int8(convert(ConvertConfig(), lab.context(), tuned), weights)


def assert_sparse_in_int8(int8: Model, weights: dict[str, torch.Tensor]) -> None:
    with quantized_engine(int8.recipe.backend):
        network = int8.build()
    for name, weight in weights.items():
        integers = network.get_submodule(name).weight().int_repr()
        assert bool((integers[weight == 0] == 0).all()), name
        assert (integers == 0).float().mean() >= 0.74


def test_early_stopping_counts_from_the_epoch_with_all_zeros(lab: Lab) -> None:
    data = lab.make_data(num_val=40)
    options = {"epochs": 6, "pruning": {"amount": 0.9, "end": 0.5, "every": 1}, "early_stopping": {"patience": 5}}
    trained = lab.train(lab.make_model(), data, **options)
    assert trained.metrics["best_epoch"] >= 4
    assert trained.metrics["sparsity"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pruning": {"amount": 0.5, "end": 14}}, "pruning: end is step 14, counted from 0, but the training has 14 "),
        ({"pruning": {"amount": 0.5, "begin": 0.9}}, "pruning: begin is step 13 of 14, and not before end, .* step 10"),
        ({"pruning": {"amount": 0.5, "skip": ["Liner"]}}, "pruning: skip: .* matches 'Liner' .did you mean 'Linear'"),
        ({"pruning": {"amount": 0.5, "skip": ["*"]}}, "pruning: no convolution or linear layer is left"),
        ({"pruning": {"amount": 0.5}, "freeze": ["*.weight"]}, "pruning: every weight that could be pruned is frozen"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(lab: Lab, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        lab.train(lab.make_model(), lab.make_data(), epochs=2, **options)


@pytest.mark.parametrize("pruning", [{}, {"amount": 1.0}, {"amount": 0.0}, {"amount": 0.5, "every": 0}])
def test_wrong_options_are_refused(pruning: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainConfig.model_validate_json(json.dumps({"pruning": pruning}), strict=True)


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


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODES)
def test_every_parallel_mode_prunes_the_same_weights(manifest: Path, name: str) -> None:
    pruning = {"amount": 0.8, "every": 2}
    one = model_of(run(manifest, pruning=pruning))
    other = model_of(run(manifest, pruning=pruning, parallel=MODES[name]))
    assert max_difference(one, other) < 1e-5
    for name_, tensor in one.tensors.items():
        assert tensor.dim() < 2 or torch.equal(tensor == 0, other.tensors[name_] == 0), name_
        assert tensor.dim() < 2 or int((tensor == 0).sum()) >= int(0.8 * tensor.numel()), name_
