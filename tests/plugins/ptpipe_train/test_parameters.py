"""Freezing parameters and multiplying their learning rate, by patterns of their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import FunctionRef, Model, builder, epoch_order
from ptpipe_train import TrainConfig
from ptpipe_train.parameters import freeze_parameters, resolve_lr_factors, undecayed_parameters

from .conftest import Lab, assert_same_bits, max_difference


@builder
def two_norms() -> nn.Module:
    """Convolution and batch norm, twice, and a linear layer."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    features = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    net = nn.Sequential()
    net.add_module("features", features)
    net.add_module("head", nn.Linear(32, 4))
    return net


@builder
def frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).requires_grad_(False)


@builder
def one_value_norm() -> nn.Module:
    """Batch norm of a single value per sample and channel."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def make_model(lab: Lab) -> Model:
    return lab.make_model(FunctionRef.to(two_norms))


def changed(before: Model, after: Model) -> set[str]:
    return {name for name, tensor in before.tensors.items() if not torch.equal(tensor, after.tensors[name])}


def test_frozen_layers_keep_weights_and_statistics(lab: Lab) -> None:
    model, data = make_model(lab), lab.make_data(100, 30)
    options = {"weight_decay": 0.01, "nesterov": True, "accumulate": 2, "epochs": 2}
    trained = lab.train(model, data, freeze=["features.*"], **options)
    assert changed(model, trained.model) == {"head.weight", "head.bias"}
    every = lab.train_afresh(model, data, **options)
    assert changed(model, every.model) == set(model.tensors)


@builder
def norms_without_weights() -> nn.Module:
    """A batch norm without weights and an instance norm with statistics in `features`; a batch norm beside the head."""
    norm, instance = nn.BatchNorm2d(4, affine=False), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    features = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Sequential(instance), nn.ReLU(), nn.AvgPool2d(3))
    head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 4))
    net = nn.Sequential()
    net.add_module("features", features)
    net.add_module("head", head)
    return net


def test_norms_without_weights_are_frozen_with_the_module_around_them(lab: Lab) -> None:
    model, data = lab.make_model(FunctionRef.to(norms_without_weights)), lab.make_data(64, 16)
    head = {f"head.{name}" for name in ("2.weight", "2.bias")}
    head |= {f"head.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    trained = lab.train(model, data, freeze=["features.*"], epochs=2).model
    assert changed(model, trained) == head
    some = lab.train_afresh(model, data, freeze=["features.0.*"], epochs=1).model
    assert {"features.1.running_mean", "features.2.0.running_mean"} < changed(model, some)
    instance = lab.train_afresh(model, data, freeze=["features.2.*"], epochs=1).model
    assert {name for name in changed(model, instance) if name.startswith("features.2.")} == set()


def test_the_rest_is_trained_as_by_a_loop_without_them(lab: Lab) -> None:
    model, data = make_model(lab), lab.make_data(64)
    trained = lab.train(model, data, freeze=["features.[01].*"], epochs=1, memory_format="contiguous").model
    module = model.build_prepared().train()
    features: Any = module.get_submodule("features")
    features[0].requires_grad_(False)
    features[1].requires_grad_(False).eval()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.05, momentum=0.9)
    batches = data.batches("train", order_N=epoch_order(64, 7, 0), batch_size=16)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(*batch.args), batch.targets["labels"]).backward()
        optimizer.step()
    assert max_difference(trained, model.with_state_dict_of(module)) < 1e-5


def test_a_norm_with_a_trained_bias_keeps_observing(lab: Lab) -> None:
    model = make_model(lab)
    trained = lab.train(model, lab.make_data(64), freeze=["features.*.weight"], epochs=1).model
    assert {name for name in changed(model, trained) if name.startswith("features.1.")} == {
        "features.1.bias",
        "features.1.running_mean",
        "features.1.running_var",
        "features.1.num_batches_tracked",
    }


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("freeze_at", [0.0, 0.5, 1.0])
def test_frozen_norms_of_fake_quantized_layers_keep_their_statistics(lab: Lab, backend: str, freeze_at: float) -> None:
    config = PrepareQatConfig(backend=backend, batch_norm="train", freeze_at=freeze_at)
    model = prepare_qat(config, lab.context(), make_model(lab))
    trained = lab.train(model, lab.make_data(64, 16), freeze=["features.*"], epochs=2, lr=0.01).model
    floats = {name for name in changed(model, trained) if name.rpartition(".")[2] in NAMES_OF_STATE}
    assert floats == {"head.weight", "head.bias"}
    moving = lab.train_afresh(model, lab.make_data(64, 16), freeze=["head.*"], epochs=2, lr=0.01).model
    statistics = {name for name in changed(model, moving) if name.endswith("running_mean")}
    assert len(statistics) == (2 if freeze_at else 0)


NAMES_OF_STATE = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def test_one_pattern_of_a_fused_norm_freezes_it_alone(lab: Lab) -> None:
    model = prepare_qat(PrepareQatConfig(backend="fbgemm", batch_norm="train"), lab.context(), make_model(lab))
    trained = lab.train(model, lab.make_data(64), freeze=["*.bn.*"], epochs=1, lr=0.01).model
    floats = {name for name in changed(model, trained) if name.rpartition(".")[2] in NAMES_OF_STATE}
    assert floats == {f"{name}.{part}" for name in ("features.0", "features.3", "head") for part in ("weight", "bias")}


def test_learned_ranges_are_trained_and_never_decay(lab: Lab) -> None:
    config = PrepareQatConfig(backend="qnnpack", learned_step_size=True)
    model = prepare_qat(config, lab.context(), make_model(lab))
    names = {name for name in model.tensors if name.endswith("log_part")}
    assert undecayed_parameters(model.build_prepared()) == names != set()
    options = {"epochs": 1, "lr": 0.01, "optimizer": "adamw", "freeze": ["*.weight", "*.bias"]}
    without, with_decay = (
        lab.train_afresh(model, lab.make_data(64), weight_decay=decay, **options).model for decay in (0.0, 0.5)
    )
    assert names & changed(model, without)
    assert_same_bits(without, with_decay)
    frozen = lab.train_afresh(model, lab.make_data(64), epochs=1, lr=1e-3, freeze=["*.log_part"]).model
    assert changed(model, frozen).isdisjoint(names)


def test_a_network_without_gradients_is_refused(lab: Lab) -> None:
    with pytest.raises(StageError, match=r"^nothing to train: none of the network's 2 parameters requires a gradient"):
        lab.train(lab.make_model(FunctionRef.to(frozen)), lab.make_data(32), epochs=1)


def test_single_samples_are_taken_where_every_norm_is_frozen(lab: Lab) -> None:
    model, data = lab.make_model(FunctionRef.to(one_value_norm)), lab.make_data(33)
    with pytest.raises(StageError, match="can't normalize a single sample"):
        lab.train(model, data, epochs=1)
    assert lab.train(model, data, epochs=1, freeze=["2.*"]).metrics["num_steps"] == 3


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["featurs.*"], r"^freeze: no parameter's name matches 'featurs.\*' \(did you mean 'features.\*'\?\)$"),
        (["xyz"], r"\(there are features.0.weight, features.0.bias, .* and others\)$"),
        (["head.*", "features.*"], r"^freeze: no parameter is left to train \(head.\*, features.\* freeze all 10\)$"),
        (["head"], r"matches 'head' \(did you mean 'head.\*'\?\)"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(lab: Lab, freeze: list[str], message: str) -> None:
    with pytest.raises(StageError, match=message):
        lab.train(make_model(lab), lab.make_data(20), freeze=freeze)


def test_the_first_pattern_counts(lab: Lab) -> None:
    module = make_model(lab).build()
    factors = resolve_lr_factors(module, {"*.bias": 2.0, "features.*": 0.1})
    assert factors == {
        "features.0.weight": 0.1,
        "features.0.bias": 2.0,
        "features.1.weight": 0.1,
        "features.1.bias": 2.0,
        "features.3.weight": 0.1,
        "features.3.bias": 2.0,
        "features.4.weight": 0.1,
        "features.4.bias": 2.0,
        "head.bias": 2.0,
    }


def test_the_order_of_patterns_is_in_the_key() -> None:
    one, other = (TrainConfig(lr_factors=dict(pairs)) for pairs in ([("a*", 1), ("*b", 2)], [("*b", 2), ("a*", 1)]))
    assert one.keyed_options() != other.keyed_options()


def test_patterns_without_effect_are_refused(lab: Lab) -> None:
    module = make_model(lab).build()
    with pytest.raises(StageError, match=r"^lr_factors: no parameter's name matches 'hed.\*' \(did you mean 'head.\*'"):
        resolve_lr_factors(module, {"hed.*": 0.1})
    with pytest.raises(StageError, match=r"patterns before 'head.bias' match every parameter that it matches.*put it"):
        resolve_lr_factors(module, {"head.*": 0.1, "head.bias": 0.5})
    freeze_parameters(module, ["features.*"])
    with pytest.raises(StageError, match=r"every parameter that 'features.0.\*' matches is frozen"):
        resolve_lr_factors(module, {"features.0.*": 0.1})


def test_a_tied_parameter_is_found_under_both_names() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False), "c": nn.Linear(3, 3)})
    module["b"].weight = module["a"].weight
    assert resolve_lr_factors(module, {"b.*": 0.5}) == {"a.weight": 0.5}
    freeze_parameters(module, ["b.weight"])
    assert not module["a"].weight.requires_grad


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw", "lr": 0.01, "decay_norm_and_bias": False}])
def test_a_factor_of_one_changes_no_bit_and_another_scales_the_step(lab: Lab, options: dict[str, Any]) -> None:
    model, data = make_model(lab), lab.make_data(16)
    options = {"epochs": 1, "weight_decay": 0.0} | options
    plain = lab.train_afresh(model, data, **options)
    assert_same_bits(lab.train_afresh(model, data, lr_factors={"features.*": 1.0}, **options).model, plain.model)
    scaled = lab.train(model, data, lr_factors={"features.*": 0.25}, **options)
    for name in ("features.0.weight", "head.weight"):
        before = model.tensors[name]
        steps = [(trained.model.tensors[name] - before) for trained in (scaled, plain)]
        factor = 0.25 if name.startswith("features") else 1.0
        torch.testing.assert_close(steps[0], factor * steps[1], rtol=1e-4, atol=1e-6)
    assert scaled.progress[-1].facts["lr"] == plain.progress[-1].facts["lr"]
