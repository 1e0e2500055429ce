"""Which weights become zero, that they stay zero through training and int8, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import ptpipe
from ptpipe import ManifestError, StageError
from ptpipe.events import Metric, Notice
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_prune import MagnitudeConfig, NMConfig, magnitude, n_m
from ptpipe_quant import ConvertConfig, DynamicConfig, PrepareQatConfig, convert, dynamic, prepare_qat
from ptpipe_torch import Model, builder
from ptpipe_torch.model.function_ref import FunctionRef

from ..ptpipe_train.conftest import Lab, lab, make_data, make_split

__all__ = ["lab"]


class Mixed(nn.Module):
    """A table that a linear layer shares, a convolution of groups, a transposed one, one whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 6, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 4, 1))
        self.table, self.shared = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.shared.weight = self.table.weight
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.up(self.depthwise(self.stem(x)))).mean((2, 3))
        return self.head(self.shared(x))


@builder
def mixed() -> nn.Module:
    return Mixed()


PRUNED = ["stem.0.weight", "depthwise.weight", "up.weight", "head.weight"]


def fraction(tensor: torch.Tensor) -> float:
    return (tensor == 0).float().mean().item()


def metrics_of(lab: Lab) -> dict[str, Any]:
    return {event.name: event.value for event in lab.events if isinstance(event, Metric)}


def test_the_smallest_weights_of_each_layer_become_zero(lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(mixed))
    pruned = magnitude(MagnitudeConfig(amount=0.6), lab.context(), model)
    assert set(pruned.recipe.pruned) == set(PRUNED)
    assert not model.recipe.is_sparse
    for name, tensor in pruned.tensors.items():
        before = model.tensors[name]
        if name not in PRUNED:
            assert torch.equal(tensor, before), name
            continue
        smallest = np.sort(before.abs().numpy().ravel())[: int(0.6 * before.numel())]
        assert torch.equal(tensor, torch.where(before.abs() <= smallest[-1], 0, before)), name
    metrics = metrics_of(lab)
    assert metrics["num_zeros"] == sum(int((pruned.tensors[name] == 0).sum()) for name in PRUNED)
    assert list(metrics["sparsity_of_layers"]) == [name.removesuffix(".weight") for name in PRUNED]


def test_of_all_layers_together(lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(mixed))
    pruned = magnitude(MagnitudeConfig(amount=0.5, scope="global"), lab.context(), model)
    before, after = (torch.cat([of.tensors[name].flatten() for name in PRUNED]) for of in (model, pruned))
    assert (after == 0).sum() == len(before) // 2
    assert before[after == 0].abs().max() <= after[after != 0].abs().min()
    assert len({round(fraction(pruned.tensors[name]), 2) for name in PRUNED}) > 1


def test_of_equal_weights_exactly_that_many_become_zero(lab: Lab) -> None:
    model = lab.make_model()
    equal = Model(model.recipe, {name: torch.ones_like(tensor) for name, tensor in model.tensors.items()})
    pruned = magnitude(MagnitudeConfig(amount=0.5), lab.context(), equal)
    assert all(fraction(tensor) == (0.5 if tensor.dim() > 1 else 0) for tensor in pruned.tensors.values())


def test_pruning_again_adds_zeros(lab: Lab) -> None:
    once = magnitude(MagnitudeConfig(amount=0.3), lab.context(), lab.make_model())
    twice = magnitude(MagnitudeConfig(amount=0.6), lab.context(), once)
    for name, tensor in twice.tensors.items():
        assert (tensor[once.tensors[name] == 0] == 0).all(), name
    assert fraction(twice.tensors["0.weight"]) == pytest.approx(0.6, abs=0.02)


def test_two_of_four_are_kept_along_the_inputs(lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(mixed))
    pruned = n_m(NMConfig(), lab.context(), model)
    assert metrics_of(lab)["dense_layers"] == ["stem.0", "depthwise"]  # one input channel each
    for name, axis in (("up.weight", 0), ("head.weight", 1)):
        before, after = (of.tensors[name].movedim(axis, -1).reshape(-1, 4) for of in (model, pruned))
        assert ((after != 0).sum(1) == 2).all()
        order = before.abs().argsort(1)
        assert (after.gather(1, order[:, :2]) == 0).all()
        assert torch.equal(after.gather(1, order[:, 2:]), before.gather(1, order[:, 2:]))
    assert torch.equal(pruned.tensors["stem.0.weight"], model.tensors["stem.0.weight"])


@builder
def grouped() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3), nn.ConvTranspose2d(16, 8, 3, groups=4), nn.ConvTranspose2d(8, 8, 1, groups=4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def test_groups_of_a_transposed_convolution_are_pruned_each_for_itself(lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(grouped))
    pruned = n_m(NMConfig(), lab.context(), model)
    assert metrics_of(lab)["dense_layers"] == ["0", "2"]  # of "2", each group has two input channels
    for group in range(4):
        before, after = (of.tensors["1.weight"][4 * group : 4 * group + 4] for of in (model, pruned))
        assert ((after != 0).sum(0) == 2).all()
        order = before.abs().argsort(0)
        assert (after.gather(0, order[:2]) == 0).all()
    assert torch.equal(pruned.tensors["2.weight"], model.tensors["2.weight"])


@pytest.mark.parametrize(("stage", "config"), [(magnitude, MagnitudeConfig), (n_m, NMConfig)])
def test_a_layer_whose_weight_is_computed_is_named(lab: Lab, stage: Any, config: Any) -> None:
    model = lab.make_model(FunctionRef.to(mixed))
    stage(config(), lab.context(), model)
    stage(config(skip=("normed",)), lab.context(), model)
    (notice,) = (event.text for event in lab.events if isinstance(event, Notice))
    assert notice.startswith("weights of normed stay dense: they are computed")


@pytest.mark.parametrize(("skip", "dense"), [(["stem"], "stem.0"), (["Linear"], "head"), (["s*", "up"], "up")])
def test_skipped_layers_stay_dense(lab: Lab, skip: list[str], dense: str) -> None:
    model = lab.make_model(FunctionRef.to(mixed))
    for pruned in (
        magnitude(MagnitudeConfig(amount=0.5, skip=tuple(skip)), lab.context(), model),
        magnitude(MagnitudeConfig(amount=0.5, skip=tuple(skip), scope="global"), lab.context(), model),
    ):
        assert torch.equal(pruned.tensors[f"{dense}.weight"], model.tensors[f"{dense}.weight"])
        assert fraction(pruned.tensors["depthwise.weight"]) > 0


def test_what_cannot_be_pruned_is_refused_with_the_remedy(lab: Lab) -> None:
    model, context = lab.make_model(norm=True), lab.context()
    with pytest.raises(StageError, match=r"skip: no layer's name or type matches 'Linaer' \(did you mean 'Linear'"):
        magnitude(MagnitudeConfig(skip=("Linaer",)), context, model)
    with pytest.raises(StageError, match="no convolution or linear layer is left"):
        magnitude(MagnitudeConfig(skip=("*",)), context, model)
    with pytest.raises(StageError, match=r"6 would keep no weight: .*\(skip: \[6\]\)"):
        tiny = {name: tensor / (1e6 if name.startswith("6.") else 1) for name, tensor in model.tensors.items()}
        magnitude(MagnitudeConfig(amount=0.95, scope="global"), context, Model(model.recipe, tiny))
    with pytest.raises(StageError, match="no layer has a number of input channels that is a multiple of 7"):
        n_m(NMConfig(n=1, m=7), context, model)
    with pytest.raises(ValueError, match="n must be less than m"):
        NMConfig(n=4, m=4)
    for prepared in (
        prepare_qat(PrepareQatConfig(backend="fbgemm"), context, model),
        dynamic(DynamicConfig(backend="fbgemm"), context, model),
    ):
        with pytest.raises(StageError, match="needs a float model, and got torch"):
            magnitude(MagnitudeConfig(), context, prepared)


def test_pruning_behind_a_quant_stage_is_found_before_the_run(tmp_path: Path) -> None:
    manifest = tmp_path / "late.yaml"
    manifest.write_text(
        "version: 1\nname: late\nstages:\n  data: {uses: data.digits}\n  net: {uses: model.small_cnn}\n"
        "  qat: {uses: quant.prepare_qat}\n  tuned: {uses: train.supervised, needs: {model: qat}}\n"
        "  pruned: {uses: prune.n_m, needs: {model: tuned}}\n",
        encoding="utf-8",
    )
    with pytest.raises(ManifestError, match=r"needs a float model: put it before qat \(quant.prepare_qat\)"):
        ptpipe.load_plan(manifest)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("batch_norm", ["train", "fold"])
def test_the_zeros_are_there_in_the_int8_and_in_the_onnx_file(lab: Lab, backend: str, batch_norm: str) -> None:
    data = make_data(test=make_split("test", 40, 3), calibration=make_split("calibration", 40, 4))
    trained = lab.train_afresh(lab.make_model(norm=True), data, epochs=2).model
    pruned = magnitude(MagnitudeConfig(amount=0.7), lab.context(), trained)
    retrained = lab.train_afresh(pruned, data, epochs=1, weight_decay=0.01).model
    config = PrepareQatConfig.model_validate({"backend": backend, "batch_norm": batch_norm})
    tuned = lab.train_afresh(prepare_qat(config, lab.context(), retrained), data, epochs=1, lr=0.01)
    int8 = convert(ConvertConfig(), lab.context(), tuned.model)
    assert tuned.metrics["sparsity"] == pytest.approx(0.7, abs=0.01)
    exported = export_onnx(ExportConfig(), lab.context(), int8, data)
    stored = {
        initializer.name: onnx.numpy_helper.to_array(initializer)
        for initializer in onnx.load(exported.path).graph.initializer
    }
    weights = [name for name in pruned.tensors if pruned.tensors[name].dim() > 1]
    assert len(weights) == 3
    for name in weights:
        zeros = (pruned.tensors[name] == 0).numpy()
        assert int8.int8_tensors is not None
        (integers,) = (
            value.numpy() for key, value in int8.int8_tensors.items() if value.dtype == torch.int8 and _is(key, name)
        )
        assert (integers[zeros] == 0).all(), name
        assert (integers[~zeros] != 0).mean() > 0.9
        in_file = [array for array in stored.values() if array.dtype == np.int8]
        # The file appends channels to those of its input.
        own = [array[:, : zeros.shape[1]] if array.ndim == zeros.ndim == 4 else array for array in in_file]
        assert any((array == 0).sum() >= zeros.sum() for array in own if array.size == zeros.size)


def _is(key: str, name: str) -> bool:
    """Return whether a tensor of the int8 state is a layer's weight: `0.weight`, `0._packed_params...weight`."""
    return key.startswith(name.removesuffix("weight"))


def test_a_pruned_model_is_stored_as_pruned(lab: Lab, tmp_path: Path) -> None:
    pruned = magnitude(MagnitudeConfig(), lab.context(), lab.make_model())
    pruned.save(tmp_path)
    assert Model.load(tmp_path).recipe == pruned.recipe
    assert '"is_sparse": true' in (tmp_path / "recipe.json").read_text()
    assert "is_sparse" not in lab.make_model().recipe.to_json()
