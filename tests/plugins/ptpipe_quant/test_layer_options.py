"""Options by layer: the layers that they reach, what they recover, and patterns that decide nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from ptpipe import Context, StageError
from ptpipe.events import LogLine
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    TuneConfig,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_quant.calibration import observed_tensors
from ptpipe_torch import BATCH, Data, FunctionRef, Model, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.int8.observers import ACTIVATION_OBSERVERS

from . import planted
from .conftest import BACKENDS, NUM_CLASSES, accuracy, logits_of, make_model, train

TRIED = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]
TOKENS = Signature((TensorSpec("x", "float32", (BATCH, 5, 8)),), (TensorSpec("logits", "float32", (BATCH, 5, 6)),))


class Block(nn.Module):
    """Two convolutions and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + x


@builder
def blocks() -> nn.Module:
    """Two blocks, and layers that options by layer don't reach."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), Block(), Block(), nn.ConvTranspose2d(8, 4, 3), nn.Sigmoid()),
        *(nn.Flatten(), nn.Linear(400, NUM_CLASSES)),
    )


@builder
def encoder() -> nn.Module:
    """A layer of a transformer, and a head."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.Sequential(layer, nn.Linear(8, 6))


def calibrated(model: Model, data: Data, ctx: Context, **options: Any) -> Model:
    prepared = prepare(PrepareConfig(**options), ctx, model)
    return calibrate(CalibrateConfig(), ctx, prepared, data).model


def lost(int8: Model, float_model: Model, data: Data) -> float:
    return accuracy(logits_of(float_model, data), data) - accuracy(logits_of(int8, data), data)


def grids_of(model: Model) -> dict[str, tuple[float, int]]:
    """Return scale and zero point of each tensor."""
    grids = {tensor.name: tensor.observer.calculate_qparams() for tensor in observed_tensors(model.build_prepared())}
    return {name: (scale.item(), zero_point.item()) for name, (scale, zero_point) in grids.items()}


def observers_of(model: Model) -> dict[str, str]:
    """Return the kind of observer of each tensor, by the name of the node that computes it."""
    names = {type_.__name__: name for name, type_ in ACTIVATION_OBSERVERS.items() if name != "histogram"}
    return {tensor.name: names[type(tensor.observer).__name__] for tensor in observed_tensors(model.build_prepared())}


def granularities(int8: Model) -> dict[str, bool]:
    """Return whether each int8 layer has a scale for each channel."""
    layers = {name: layer for name, layer in int8.build().named_modules() if callable(getattr(layer, "weight", None))}
    return {name: layer.weight().qscheme() == torch.per_channel_affine for name, layer in layers.items()}


@pytest.mark.parametrize("backend", TRIED)
def test_scales_per_channel_of_one_layer_recover_the_accuracy(backend, trained, digits, ctx) -> None:
    model, options = planted.with_weight_outlier(trained), {"backend": backend, "weights": "per_tensor"}
    harmed = convert(ConvertConfig(), ctx, calibrated(model, digits, ctx, **options))
    assert lost(harmed, model, digits) > 0.05
    layers = {planted.LAYER: {"weights": "per_channel"}}
    int8 = convert(ConvertConfig(), ctx, calibrated(model, digits, ctx, **options, layers=layers))
    assert lost(int8, model, digits) <= 0.01
    assert granularities(int8) == {"0": False, "4": False, "9": True, "11": False}


@pytest.mark.parametrize("backend", TRIED)
def test_another_observer_of_one_layer_recovers_the_accuracy(backend, trained, digits, ctx) -> None:
    model = planted.with_rare_spike(trained, digits)
    options = {"backend": backend, "weights": "per_channel", "observer": "min_max"}
    harmed = convert(ConvertConfig(), ctx, calibrated(model, digits, ctx, **options))
    assert lost(harmed, model, digits) > 0.05
    layers = {planted.LAYER: {"observer": "percentile", "percentile": 99.9}}
    int8 = convert(ConvertConfig(), ctx, calibrated(model, digits, ctx, **options, layers=layers))
    assert lost(int8, model, digits) <= 0.01


def test_each_layer_has_the_grid_of_its_own_observer(trained, digits, ctx) -> None:
    layers = {"4": {"observer": "min_max"}, "Linear": {"observer": "percentile", "percentile": 99.0}}
    mixed = calibrated(trained, digits, ctx, layers=layers)
    alone = {
        "mse": calibrated(trained, digits, ctx),
        "min_max": calibrated(trained, digits, ctx, observer="min_max"),
        "percentile": calibrated(trained, digits, ctx, observer="percentile", percentile=99.0, layers=layers),
    }
    kinds = observers_of(mixed)
    assert sorted(kinds.values()) == ["min_max", "mse", "mse", "percentile", "percentile"]
    expected = {name: grids_of(alone[kind])[name] for name, kind in kinds.items()}
    assert grids_of(mixed) == expected
    assert len(set(expected.values()) - set(grids_of(alone["mse"]).values())) == 3


@pytest.mark.parametrize("batch_norm", ["fold", "train"])
def test_qat_trains_with_the_granularity_of_each_layer(batch_norm, trained, digits, ctx) -> None:
    backend, layers = TRIED[-1], {"[04]": {"weights": "per_channel"}, "*": {"weights": "per_tensor"}}
    config = PrepareQatConfig(backend=backend, weights="per_channel", batch_norm=batch_norm, layers=layers)
    prepared = prepare_qat(config, ctx, trained)
    tuned = train(prepared, digits, lr=0.005)
    int8 = convert(ConvertConfig(), ctx, tuned)
    assert granularities(int8) == {"0": True, "4": True, "9": False, "11": False}
    assert lost(int8, trained, digits) <= 0.02


def test_a_pattern_reaches_what_is_inside_a_module_and_the_first_one_counts(digits, ctx, events) -> None:
    layers = {
        "1.first": {"weights": "per_tensor"},
        "1": {"observer": "min_max"},
        "Block": {"observer": "percentile", "weights": "per_tensor"},
    }
    model = calibrated(make_model(blocks), digits, ctx, layers=layers)
    kinds = observers_of(model)
    assert {name: kinds[name] for name in ("0", "1.first", "1.second", "2.first", "2.second")} == {
        "0": "mse", "1.first": "mse", "1.second": "min_max", "2.first": "percentile", "2.second": "percentile",
    }  # fmt: skip
    additions = [kind for name, kind in kinds.items() if "add" in name]
    assert additions == ["min_max", "percentile"]
    found = granularities(convert(ConvertConfig(), ctx, model))
    assert {name: found[name] for name in ("1.first", "1.second", "2.first", "2.second")} == {
        "1.first": False, "1.second": True, "2.first": False, "2.second": False,
    }  # fmt: skip
    logged = [event.text for event in events if isinstance(event, LogLine)]
    assert "layers: 'Block' decides 2.first, 2.second" in logged
    assert not any("ptpipe." in name for name in kinds)  # which messages would show


def test_layers_that_torch_export_has_traced_have_options_too(trained, digits, ctx) -> None:
    model = calibrated(trained, digits, ctx, route="export", layers={"4": {"weights": "per_tensor"}})
    assert sorted(granularities(convert(ConvertConfig(), ctx, model)).values()) == [False, True, True, True]


def test_layers_that_attention_is_written_out_as_have_options_too(ctx) -> None:
    layers = {
        "0.self_attn.[qk]_proj": {"weights": "per_tensor"},
        "TransformerEncoderLayer": {"observer": "min_max"},
        "1": {"observer": "percentile"},
    }
    model = Model.from_module(Recipe(FunctionRef.to(encoder), TOKENS), encoder())
    prepared = prepare(PrepareConfig(layers=layers), ctx, model)
    module = prepared.build_prepared()
    with torch.no_grad():
        module(torch.randn(4, 5, 8))
    kinds = set(observers_of(prepared).values())
    assert {"mse", "min_max", "percentile"} == kinds
    found = granularities(convert(ConvertConfig(), ctx, prepared.with_state_dict_of(module)))
    per_tensor = {name for name, is_per_channel in found.items() if not is_per_channel}
    assert per_tensor == {"0.self_attn.q_proj", "0.self_attn.k_proj"} and len(found) == 7


def test_a_stored_model_keeps_them(trained, digits, ctx, tmp_path) -> None:
    model = calibrated(trained, digits, ctx, layers={"4": {"observer": "min_max", "weights": "per_tensor"}})
    int8 = convert(ConvertConfig(), ctx, model)
    (tmp_path / "model").mkdir()
    int8.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model")
    assert granularities(loaded) == {"0": True, "4": False, "9": True, "11": True}
    assert (logits_of(loaded, digits, 50) == logits_of(int8, digits, 50)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": {"Liner": {"weights": "per_tensor"}}}, "layers: no layer .* 'Liner'; did you mean 'Linear'"),
        ({"layers": {"6": {"observer": "min_max"}}, "skip": ("6",)}, "layers: '6' decides nothing: all that it"),
        (
            {"layers": {"Block": {"observer": "min_max"}, "1.first": {"weights": "per_tensor"}}},
            r"layers: '1\.first' decides nothing: .* matched by a pattern above",
        ),
        ({"layers": {"4": {"observer": "min_max"}}}, "layers: '4' decides nothing"),
        (
            {"layers": {"3": {"weights": "per_channel"}}, "backend": "qnnpack"},
            "layers: weights of '3' has no effect: int8 kernels of transposed convolutions take one scale",
        ),
        (
            {"layers": {"5": {"weights": "per_tensor"}}},
            "layers: weights of '5' has no effect: no layer with int8 weights matches",
        ),
    ],
)
def test_patterns_that_decide_nothing_are_refused(options, message, ctx) -> None:
    with pytest.raises(StageError, match=message):
        prepare(PrepareConfig(**{"backend": TRIED[0], **options}), ctx, make_model(blocks))


def test_an_observer_whose_tensor_has_the_grid_of_another_layer_is_refused(trained_mixed, ctx) -> None:
    prepare(PrepareConfig(layers={"left": {"observer": "min_max"}}), ctx, trained_mixed)
    with pytest.raises(StageError, match=r"layers: observer of 'right' has no effect: .* \(concatenation\)"):
        prepare(PrepareConfig(layers={"right": {"observer": "min_max"}}), ctx, trained_mixed)


def test_the_order_of_patterns_enters_the_key() -> None:
    one, other = {"a": {"weights": "per_tensor"}}, {"b": {"weights": "per_channel"}}
    for config_type, options in ((PrepareConfig, {}), (PrepareQatConfig, {}), (TuneConfig, {"max_drop": 0.0})):
        first, second = (config_type(**options, layers=layers) for layers in (one | other, other | one))
        assert json.dumps(first.keyed_options()) != json.dumps(second.keyed_options())
        assert first.keyed_options()["layers"] == [["a", {"weights": "per_tensor"}], ["b", {"weights": "per_channel"}]]


@pytest.mark.parametrize(
    ("config_type", "options", "message"),
    [
        (PrepareConfig, {"a": {}}, "give weights or observer or percentile"),
        (PrepareConfig, {"a": {"percentile": 99.9}}, "percentile of 'a' has an effect with observer: percentile alone"),
        (PrepareConfig, {"a": {"observer": "histogram"}}, "histogram was renamed to mse"),
        (PrepareConfig, {"a": {"weights": "auto"}}, "per_channel"),
        (PrepareQatConfig, {"a": {"observer": "mse"}}, "observer"),
        (PrepareQatConfig, {"a": {}}, "give weights"),
    ],
)
def test_wrong_options_are_refused(config_type, options, message) -> None:
    with pytest.raises(ValidationError, match=message):
        config_type.model_validate_json(json.dumps({"layers": options}), strict=True)
