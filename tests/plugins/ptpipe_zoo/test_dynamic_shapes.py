"""`model.dynamic_shapes`. Shape legend: N pictures, C channels, H height, W width."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import ptpipe_zoo
from ptpipe import Context, StageError
from ptpipe_torch import BATCH, FunctionRef, Model, Recipe, Signature, TensorSpec
from ptpipe_torch.model.function_ref import builder
from ptpipe_zoo import DynamicShapesConfig, SmallUNetConfig, dynamic_shapes, small_unet

from ...signatures import classifier, pictures
from ...streets import street_data
from .conftest import MakeData


class Valid(nn.Module):
    """Convolutions without padding: the outputs are smaller, twice as large, and of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 2, 2)

    def forward(self, images_NCHW: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.conv(images_NCHW)
        return {"smaller": x, "doubled": self.up(images_NCHW), "mean": x.mean((2, 3))}


@builder
def valid() -> nn.Module:
    return Valid()


@builder
def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 48, 5))


class Framed(nn.Module):
    """Frames of 400 samples, as those of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 400, 160)

    def forward(self, waves_NL: torch.Tensor) -> torch.Tensor:
        return self.conv(waves_NL[:, None]).transpose(1, 2)


@builder
def framed() -> nn.Module:
    return Framed()


def model_of(make: object, signature: Signature) -> Model:
    reference = FunctionRef.to(make)
    return Model.from_module(Recipe(reference, signature), reference.resolve("builder")())


def opened(ctx: Context, model: Model, shape: list[int | str]) -> Model:
    return dynamic_shapes(DynamicShapesConfig(inputs={"images": shape}), ctx, model)


@pytest.fixture
def unet(ctx: Context) -> Model:
    return small_unet(SmallUNetConfig(width=4, depth=2), ctx, street_data())


def test_a_network_has_the_same_weights_and_takes_other_sizes(unet: Model, ctx: Context) -> None:
    model = opened(ctx, unet, [3, "8*height", "8*width"])
    assert str(model.signature) == (
        "images (batch, 3, 8*height, 8*width) float32 -> logits (batch, 3, 8*height, 8*width) float32"
    )
    assert model.signature.meanings == unet.signature.meanings
    assert all(torch.equal(tensor, unet.tensors[name]) for name, tensor in model.tensors.items())
    with model.predictor() as predict:
        outputs = predict({"images": torch.zeros(2, 3, 40, 16).numpy()})
    assert outputs["logits"].shape == (2, 3, 40, 16)
    street_data().info.check_fit("the model", model.signature)


def test_it_comes_back_from_its_folder(unet: Model, ctx: Context) -> None:
    model = opened(ctx, unet, [3, "8*height", 48])
    folder = ctx.scratch / "model"
    folder.mkdir()
    model.save(folder)
    assert Model.load(folder).signature == model.signature


def test_outputs_have_the_sizes_that_follow(ctx: Context) -> None:
    specs = [("smaller", (4, 30, 46)), ("doubled", (4, 64, 96)), ("mean", (4,))]
    outputs = tuple(TensorSpec(name, "float32", (BATCH, *shape)) for name, shape in specs)
    model = opened(ctx, model_of(valid, Signature(pictures((3, 32, 48)), outputs)), [3, "height", "width"])
    shapes = {spec.name: spec.sample_shape for spec in model.signature.outputs}
    assert shapes == {"smaller": (4, "smaller_2", "smaller_3"), "doubled": (4, "2*height", "2*width"), "mean": (4,)}


@pytest.mark.parametrize("shape", [(3, 40, 48), (3, 32, 36), (1, 32, 48)])
def test_data_of_a_size_that_the_network_does_not_take_is_refused(
    shape: tuple[int, int, int], unet: Model, ctx: Context
) -> None:
    model = opened(ctx, unet, [3, "8*height", "16*width"])
    if shape == (3, 40, 48):
        street_data(shape).info.check_fit("the model", model.signature)
        return
    with pytest.raises(StageError, match=r"the model takes images \(batch, 3, 8\*height, 16\*width\) float32; streets"):
        street_data(shape).info.check_fit("the model", model.signature)


def test_a_network_that_takes_multiples_alone_names_them(unet: Model, ctx: Context) -> None:
    with pytest.raises(StageError) as error:
        opened(ctx, unet, [3, "height", "4*width"])
    text = str(error.value)
    assert text.startswith("the network can't take samples of other sizes, such as images (3, ")
    assert "Sizes of tensors must match" in text
    assert text.endswith(". It takes multiples of 8: inputs: {images: [3, 8*height, 8*width]}")


def test_waveforms_that_are_longer_than_a_frame(ctx: Context) -> None:
    signature = Signature(
        (TensorSpec("waves", "float32", (BATCH, 16_128)),), (TensorSpec("frames", "float32", (BATCH, 99, 4)),)
    )
    model = model_of(framed, signature)
    with pytest.raises(StageError, match=r"It takes multiples of 256: inputs: {waves: \[256\*samples\]}$"):
        dynamic_shapes(DynamicShapesConfig(inputs={"waves": ["samples"]}), ctx, model)
    found = dynamic_shapes(DynamicShapesConfig(inputs={"waves": ["256*samples"]}), ctx, model).signature
    assert found.outputs == (TensorSpec("frames", "float32", (BATCH, "frames_1", 4)),)


def test_a_network_of_one_size_says_so(ctx: Context) -> None:
    model = model_of(flat, classifier((3, 32, 48), 5))
    with pytest.raises(StageError, match=r"shapes cannot be multiplied.*Leave these axes at the data set's size$"):
        opened(ctx, model, [3, "height", "width"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"pictures": [3, "height", 48]}, r"^inputs: the model has no pictures; it takes images \(batch, 3, 32, 48\)"),
        (
            {"images": [1, "height", 48]},
            r"^inputs: images of shape \(1, height, 48\) does not fit images \(batch, 3, 32",
        ),
        ({"images": ["height", "width"]}, r"^inputs: images of shape \(height, width\) does not fit"),
        ({"images": [3, "size", "size"]}, r"^inputs: images of shape \(3, size, size\) does not fit"),
        ({"images": [3, "64*height", 48]}, r"^inputs: images of shape \(3, 64\*height, 48\) does not fit"),
    ],
)
def test_inputs_that_the_model_does_not_have_are_refused(
    inputs: dict[str, list[int | str]], message: str, unet: Model, ctx: Context
) -> None:
    with pytest.raises(StageError, match=message):
        dynamic_shapes(DynamicShapesConfig(inputs=inputs), ctx, unet)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "at least 1 item"),
        ({"images": [3, 32, 48]}, r"images: \[3, 32, 48\] has no name of an axis, such as height"),
        ({"images": ["batch", 3, "height", "width"]}, "images: batch is the first axis, of any size already"),
        ({"images": [3, "h w", 48]}, "String should match pattern"),
        ({"images": [3, 0, "width"]}, "greater than 0"),
    ],
)
def test_wrong_options_are_refused(inputs: dict[str, list[int | str]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DynamicShapesConfig(inputs=inputs)


def test_a_quantized_model_is_refused(make_data: MakeData, unet: Model, ctx: Context) -> None:
    prepared = unet.with_recipe(backend="fbgemm", prepare=(FunctionRef.to(valid),))
    with pytest.raises(StageError, match=r"prepared fbgemm: its graph was recorded .* Put model.test before the stage"):
        opened(ctx, prepared, [3, "8*height", "8*width"])


def test_the_plugin_offers_its_stages_after_a_call(unet: Model, ctx: Context) -> None:
    opened(ctx, unet, [3, "8*height", "8*width"])
    assert "model.dynamic_shapes" in {stage.kind for stage in ptpipe_zoo.ptpipe_stages()}
