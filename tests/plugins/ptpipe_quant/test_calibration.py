"""Calibration on one process and on several: the same bits. Real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ptpipe
from ptpipe import StageError
from ptpipe.api import RunResult
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, calibration, convert, prepare
from ptpipe_torch import ArrayColumn, Column, Data, ImageInfo, LoaderOptions, Model, Ranges, builder
from ptpipe_torch.int8.engine import supported_engines

from ...signatures import classifier
from .conftest import make_model

FIRST = supported_engines()[0]

MANIFEST = """
version: 1
name: calibration
seed: 7
{plugins}
stages:
  data:
    uses: data.synthetic
    with: {{num_train: 64, val_size: 4, num_test: 4, image_size: 32, channels: 3, batch_size: 16}}
  net: {{uses: {net}}}
  prepared: {{uses: {prepare}, needs: {{model: net}}, with: {{backend: {backend}}}}}
  {before}
  calibrated: {{uses: quant.calibrate, needs: {{model: {last}}}, with: {{split: train, num_samples: 53}}}}
"""
NETS = {"small": "model.small_cnn", "branches": "model.torchvision, with: {name: mobilenet_v3_small}"}


def run(
    folder: Path,
    *,
    net: str = NETS["small"],
    prepare: str = "quant.prepare",
    plugins: str = "",
    before: str = "",
    **options: Any,
) -> RunResult:
    path = folder / "calibration.yaml"
    last = "first.model" if before else "prepared"
    text = MANIFEST.format(net=net, prepare=prepare, plugins=plugins, backend=FIRST, before=before, last=last)
    path.write_text(text, encoding="utf-8")
    return ptpipe.run(path, {name.replace("__", "."): value for name, value in options.items()}, artifacts=folder / "a")


def calibrated(folder: Path, **options: Any) -> tuple[Model, Ranges]:
    result = run(folder, **options)
    assert result.exit_code == 0, [stage.message for stage in result.stages.values()]
    model, ranges = (result.artifact("calibrated", name) for name in ("model", "ranges"))
    assert isinstance(model, Model)
    assert isinstance(ranges, Ranges)
    return model, ranges


@pytest.mark.sampled(3, 1)
@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("options", "num_workers"),
    [
        ({}, 2),
        pytest.param({}, 4, marks=pytest.mark.thorough),  # of 4 batches one is smaller than the others
        ({"calibrated__num_samples": 5}, 3),  # more workers than batches
        pytest.param({"prepared__observer": "min_max"}, 2, marks=pytest.mark.thorough),
        ({"prepared__observer": "moving_average", "prepared__layers": {"Linear": {"observer": "mse"}}}, 3),
        ({"net": NETS["branches"]}, 2),
        ({"prepare": "quant.prepare_qat"}, 2),
        ({"before": "first: {uses: quant.calibrate, needs: {model: prepared}, with: {split: val}}"}, 2),
    ],
    ids=["mse", "four", "few", "min_max", "by layer", "branches", "fake quantization", "twice"],
)
def test_several_workers_end_where_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_workers: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a convolution's last bits follow from its number of threads
    alone, seen_alone = calibrated(tmp_path, **options)
    together, seen_together = calibrated(tmp_path, **options, calibrated__workers=num_workers)
    assert seen_alone == seen_together
    assert len(seen_alone.limits) > 3
    assert alone.tensors.keys() == together.tensors.keys()
    different = [name for name, tensor in alone.tensors.items() if not torch.equal(tensor, together.tensors[name])]
    assert not different


@builder
def flattening(*, view: bool) -> nn.Module:
    return Flattening(view=view)


class Flattening(nn.Module):
    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.view = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 10), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.fc(x.view(x.size(0), -1) if self.view else x.flatten(1))


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_a_view_behind_a_convolution_changes_no_range(digits, ctx, backend: str) -> None:
    ranges = []
    for view in (True, False):
        model = prepare(PrepareConfig(backend=backend), ctx, make_model(flattening, view=view))
        ranges.append(calibrate(CalibrateConfig(split="train", num_samples=64), ctx, model, digits)[1].limits)
    for one, other in zip(*(sorted(set(limits.values())) for limits in ranges), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_what_is_not_a_number_is_named(trained, digits, ctx) -> None:
    broken = dict(trained.tensors) | {"4.weight": torch.full_like(trained.tensors["4.weight"], float("nan"))}
    prepared = prepare(PrepareConfig(), ctx, Model(trained.recipe, broken))
    with pytest.raises(StageError, match=r"quant\.test: the output of flatten is not finite"):
        calibrate(CalibrateConfig(), ctx, prepared, digits)


class Exact(nn.Module):
    """All values are multiples of 1/4 and of moderate size: no sum is rounded, however a batch is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.ReLU())
        self.fc = nn.Linear(48, 10)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.convs(torch.round(x * 4) / 4).flatten(1))


@builder
def exact() -> nn.Module:
    return Exact()


@pytest.mark.parametrize("max_counted", [2**20, 500], ids=["every value", "some positions"])
@pytest.mark.parametrize("observer", ["mse", "percentile", "entropy", "min_max"])
def test_neither_batches_nor_order_change_the_result(
    digits, ctx, monkeypatch: pytest.MonkeyPatch, observer: str, max_counted: int
) -> None:
    monkeypatch.setattr(calibration, "_MAX_COUNTED", max_counted)
    prepared = prepare(PrepareConfig(backend=FIRST, observer=observer), ctx, make_model(exact))
    states = []
    for batch_size, step in ((64, 1), (7, -1), (1, 1)):
        split = digits.splits["train"].subset(np.arange(60)[::step].copy())
        data = Data(digits.info, {"train": split}, LoaderOptions(batch_size))
        states.append(calibrate(CalibrateConfig(split="train"), ctx, prepared, data)[0].tensors)
    for other in states[1:]:
        assert not [name for name, tensor in states[0].items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize(
    ("shape", "num_samples", "stride"),
    [
        ((8, 1, 32, 32), 2047, 1),  # nearly 2 million values
        ((8, 3, 32, 32), 1024, 3),
        ((8, 40, 30, 30), 1024, 37),  # 35 is the quotient; 35 and 36 have divisors in common with 900
        ((8, 4096, 4, 4), 1024, 5),  # at least 4 positions are counted, but for a common divisor
        ((8, 4096, 2, 2), 1024, 1),
        ((8, 999, 999), 4096, 1),  # the second axis may be anything
        ((7, 40, 30, 30), 1024, 1),  # the first one isn't the samples
    ],
)
def test_of_large_feature_maps_some_positions_are_counted(
    shape: tuple[int, ...], num_samples: int, stride: int
) -> None:
    assert calibration._stride(torch.empty(shape, device="meta"), 8, num_samples) == stride


@builder
def odd_activations(*, kind: str) -> nn.Module:
    """Outputs that are constant, all zero, or infinite."""
    first = nn.Conv2d(1, 3, 3)
    nn.init.constant_(first.weight, float("inf") if kind == "infinite" else 0.0)
    nn.init.constant_(first.bias, 3.0 if kind == "constant" else 0.0)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(108, 10))


COUNTING = ["mse", "percentile", "entropy"]


@pytest.mark.parametrize("observer", COUNTING)
@pytest.mark.parametrize("kind", ["constant", "zero"])
def test_constant_activations(digits, ctx, observer: str, kind: str) -> None:
    model = make_model(odd_activations, kind=kind)
    prepared = prepare(PrepareConfig(backend=FIRST, observer=observer), ctx, model)
    calibrated_model, ranges = calibrate(CalibrateConfig(split="train", num_samples=2), ctx, prepared, digits)
    assert list(ranges.limits.values())[1] == ((3.0, 3.0) if kind == "constant" else (0.0, 0.0))
    int8 = convert(ConvertConfig(), ctx, calibrated_model)
    pixels = {
        "images": digits.splits["train"].inputs["images"].take(np.arange(8)).astype(np.float32).reshape(8, 1, 8, 8)
    }
    with int8.predictor() as predict, model.predictor() as predict_float:
        (found,), (expected,) = predict(pixels).values(), predict_float(pixels).values()
    assert np.abs(found - expected).max() < 0.1


def with_calibration(data: Data, images: Column) -> Data:
    split = data.splits["calibration"].subset(np.arange(len(images)))
    return Data(data.info, {"calibration": replace(split, inputs={"images": images})}, LoaderOptions(batch_size=4))


def test_samples_that_show_no_range_are_refused(trained, digits, ctx) -> None:
    prepared = prepare(PrepareConfig(backend=FIRST), ctx, trained)
    pixels_NHWC = np.full((6, 8, 8, 1), 9, np.uint8)
    for num_samples, message in ((6, r"all 6 samples of calibration are the same \(images is 9"), (1, "has 1 sample,")):
        data = with_calibration(digits, ArrayColumn(pixels_NHWC[:num_samples]))
        with pytest.raises(StageError, match=message):
            calibrate(CalibrateConfig(), ctx, prepared, data)
    pixels_NHWC[-1, 0, 0] = 0
    calibrate(CalibrateConfig(), ctx, prepared, with_calibration(digits, ArrayColumn(pixels_NHWC)))


class Numbers(ImageInfo):
    """Pixels that are numbers already, which may be anything."""

    def conversion(self, name: str) -> Any:
        return lambda values, channels_last: values


def test_a_sample_that_is_not_finite_is_named_before_any_layer(trained, digits, ctx) -> None:
    images_NCHW = np.random.default_rng(0).normal(size=(12, 1, 8, 8)).astype(np.float32)
    images_NCHW[6, 0, 2, 2] = np.nan
    pictures = with_calibration(digits, ArrayColumn(images_NCHW))
    info = replace(digits.info, inputs={"images": Numbers(**vars(digits.info.inputs["images"]))})
    data = Data(info, pictures.splits, pictures.loader)
    prepared = prepare(PrepareConfig(backend=FIRST), ctx, trained)
    sample = data.splits["calibration"].ids[6]
    with pytest.raises(StageError, match=rf"images of {sample} \(split calibration\) is not finite"):
        calibrate(CalibrateConfig(), ctx, prepared, data)


@pytest.mark.parametrize("observer", [*COUNTING, "min_max"])
def test_an_infinite_activation_is_named(trained, digits, ctx, observer: str) -> None:
    prepared = prepare(PrepareConfig(observer=observer), ctx, trained)
    broken = dict(prepared.tensors)
    bias = next(name for name in broken if name.endswith(".bias"))
    broken[bias] = torch.full_like(broken[bias], float("inf"))
    with pytest.raises(StageError, match=r"quant\.test: the output of \S+ is not finite"):
        calibrate(CalibrateConfig(), ctx, Model(prepared.recipe, broken), digits)


class LikeOperators(nn.Module):
    """The path of a layer is the name of an operator's node."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ModuleList([nn.Linear(36, 10)])
        self.flatten, self.flatten_1 = nn.Conv2d(1, 1, 3), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits_NK: torch.Tensor = self.flatten_1(self.head[0](self.flatten(x).flatten(1)))
        return logits_NK


@builder
def like_operators() -> nn.Module:
    """What `LikeOperators` says."""
    return LikeOperators()


def test_ranges_have_the_names_of_layers(digits, ctx) -> None:
    prepared = prepare(PrepareConfig(), ctx, make_model(like_operators))
    limits = calibrate(CalibrateConfig(), ctx, prepared, digits)[1].limits
    assert list(limits) == ["x", "flatten_1", "head.0", "flatten_1 (flatten_2)"]


def test_inputs_must_be_those_of_the_data(digits, ctx) -> None:
    prepared = prepare(PrepareConfig(), ctx, make_model(flattening, view=False))
    other = prepared.with_recipe(signature=classifier((1, 9, 8), 10))
    with pytest.raises(
        StageError, match=r"takes images \(batch, 1, 9, 8\) float32; .* needs images \(batch, 1, 8, 8\)"
    ):
        calibrate(CalibrateConfig(), ctx, other, digits)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_workers_refuse_one_sample_alike(tmp_path: Path) -> None:
    options = {"data__calibration_size": 1, "calibrated__split": "calibration"}
    result = run(tmp_path, **options, calibrated__workers=2)
    assert result.exit_code == 1
    message = str(result.stages["calibrated"].message)
    assert message.startswith("quant.calibrate: calibration has 1 sample, and ranges need two at least")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_workers_name_it_too(tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(BROKEN, encoding="utf-8")
    result = run(tmp_path, net="model.broken", plugins=f"plugins: [{plugin}]", calibrated__workers=2)
    assert result.exit_code == 1
    assert "the output of 1 is not finite" in str(result.stages["calibrated"].message)


BROKEN = '''
"""A network whose weights are no numbers."""
from ptpipe import Context, StageConfig, hookimpl, stage
from ptpipe_torch import Data, Model, FunctionRef, Recipe, builder


@builder
def linear():
    from torch import nn

    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    nn.init.constant_(net[1].weight, float("nan"))
    return net


class Config(StageConfig):
    """None."""


@stage("model.broken")
def broken(config: Config, ctx: Context, data: Data) -> Model:
    """Broken."""
    return Model.from_module(Recipe(FunctionRef.to(linear), data.info.signature), linear())


@hookimpl
def ptpipe_stages():
    return [broken]
'''


class Overwriting(nn.Module):
    """Activations whose input nothing else reads, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.clamped = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU6())
        self.conv, self.relu6, self.view_relu6 = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU6(), nn.ReLU6()
        self.head, self.last = nn.Linear(4 * 8 * 8, 10), nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.clamped(self.fused(x))
        y = self.conv(x)
        y = y + self.relu6(y)
        z = y[:, :2]  # a view of what is read again
        y = torch.cat([y, self.view_relu6(z)], dim=1)[:, 2:]
        return self.last(self.head(y.flatten(1)))


@builder
def overwriting() -> nn.Module:
    return Overwriting()


def test_activations_overwrite_what_they_alone_read(digits, ctx, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(PrepareConfig(backend=FIRST), ctx, make_model(overwriting))
    module = model.build_prepared()
    calibration.overwrite_inputs(module)
    found = {name for name, layer in module.named_modules() if getattr(layer, "inplace", False)}
    assert found == {"fused.0.1", "clamped.1"}  # the input of `last` is observed

    overwritten = calibrate(CalibrateConfig(), ctx, model, digits)
    monkeypatch.setattr(calibration, "overwrite_inputs", lambda module: None)
    copied = calibrate(CalibrateConfig(), ctx, model, digits)
    assert overwritten[1] == copied[1]
    for name, tensor in overwritten[0].tensors.items():
        assert torch.equal(tensor, copied[0].tensors[name]), name
