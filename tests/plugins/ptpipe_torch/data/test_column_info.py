"""What columns are: the tensors of arrays and of images, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ptpipe import StageError
from ptpipe_torch import ArrayInfo, ImageInfo, InputForm, Misfit
from ptpipe_torch.data.augment import augment
from ptpipe_torch.data.meaning import OTHER_STATISTICS, OTHER_WORDS

RGB: dict[str, Any] = {"shape_CHW": (3, 4, 5), "mean": (0.1, 0.4, 0.7), "std": (0.2, 0.3, 0.5)}


@pytest.mark.parametrize("dtype", ["float32", "int64", "int32", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_an_array_is_taken_as_it_is(dtype: str, shape: tuple[int, ...], channels_last: bool) -> None:
    info = ArrayInfo(dtype=dtype, shape=shape)
    values_B = torch.ones((7, *shape)).to(getattr(torch, dtype))
    assert info.conversion("x")(values_B, channels_last) is values_B
    assert (info.spec("x").dtype, info.spec("x").shape) == (dtype, ("batch", *shape))


def test_an_axis_may_have_any_size() -> None:
    info = ArrayInfo(dtype="int64", shape=("length", 2))
    assert str(info.spec("tokens")) == "tokens (batch, length, 2) int64"
    for length in (1, 9):
        assert info.conversion("tokens")(torch.zeros(3, length, 2, dtype=torch.int64), False).shape[1] == length
    with pytest.raises(StageError, match=re.escape("a batch of shape (3, 9, 4) int64, which is not tokens (batch, ")):
        info.conversion("tokens")(torch.zeros(3, 9, 4, dtype=torch.int64), False)


@pytest.mark.parametrize(
    ("values_B", "found"),
    [
        (torch.zeros(4, 3, dtype=torch.float64), "(4, 3) float64"),
        (torch.zeros(4, 2), "(4, 2) float32"),
        (torch.zeros(4), "(4,) float32"),
        (torch.zeros(4, 3, 1), "(4, 3, 1) float32"),
    ],
)
def test_values_of_another_kind_are_refused(values_B: torch.Tensor, found: str) -> None:
    convert = ArrayInfo(dtype="float32", shape=(3,)).conversion("clinical")
    with pytest.raises(StageError) as caught:
        convert(values_B, False)
    assert str(caught.value) == (f"column clinical: a batch of shape {found}, which is not clinical (batch, 3) float32")


def test_augmentation_leaves_arrays_alone() -> None:
    values_B = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    positions_B = np.arange(6)
    array = ArrayInfo(dtype="uint8", shape=(4, 5, 3)).augment(values_B, positions_B, (1, 2), ("flip",))
    assert array is values_B
    image = ImageInfo(**RGB).augment(values_B.copy(), positions_B, (1, 2), ("flip", "shift"))
    np.testing.assert_array_equal(image, augment(values_B.copy(), positions_B, (1, 2), ("flip", "shift")))
    assert (image != values_B).any()


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_image_is_normalized(channels_last: bool) -> None:
    info = ImageInfo(**RGB)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    converted = info.conversion("images")(torch.from_numpy(pixels), channels_last)
    mean_C11, std_C11 = (np.array(values)[:, None, None] for values in (info.mean, info.std))
    expected = (pixels.transpose(0, 3, 1, 2) / 255 - mean_C11) / std_C11
    np.testing.assert_allclose(converted.numpy(), expected, rtol=1e-5, atol=1e-6)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert converted.is_contiguous(memory_format=wanted)
    assert str(info.spec("images")) == "images (batch, 3, 4, 5) float32"


@pytest.mark.parametrize(("form", "shape"), [("nhwc", "batch, 4, 64, 3"), ("nchw", "batch, 3, 4, 64")])
def test_raw_values_of_an_image_are_its_bytes(form: InputForm, shape: str) -> None:
    """All bytes in all channels: their raw form, scaled and shifted in float32, is what networks get."""
    info = ImageInfo(**RGB | {"shape_CHW": (3, 4, 64)})
    bytes_BHW = np.arange(256, dtype=np.uint8).reshape(1, 4, 64)
    pixels_BHWC = torch.from_numpy(np.stack([bytes_BHW] * 3, axis=3))
    raw = info.raw_form("images", form)
    found = raw.conversion(pixels_BHWC, False)
    assert str(raw.spec) == f"images ({shape}) uint8"
    assert raw.spec.fits(found.shape) and found.is_contiguous()
    values_BCHW = (found.permute(raw.transpose) if raw.transpose else found).float().numpy()
    scale_C11, offset_C11 = (np.float32(of)[:, None, None] for of in (raw.scale_C, raw.offset_C))
    expected = info.conversion("images")(pixels_BHWC, False).numpy()
    rounding = np.abs(values_BCHW * scale_C11).max() * np.finfo(np.float32).eps
    np.testing.assert_allclose(values_BCHW * scale_C11 + offset_C11, expected, rtol=0, atol=rounding)
    with pytest.raises(StageError, match="a batch of shape"):
        raw.conversion(pixels_BHWC.float(), False)


def test_other_values_have_one_raw_form() -> None:
    info = ArrayInfo(dtype="int64", shape=("length",))
    raw, ids_BL = info.raw_form("tokens", "nhwc"), torch.ones(2, 5, dtype=torch.int64)
    assert (raw.spec, raw.scale_C) == (info.spec("tokens"), ())
    assert raw.conversion(ids_BL, False) is ids_BL


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": (0.1,)},
        {"std": (0.2, 0.3)},
        {"std": (0.2, 0.3, 0.0)},
        {"std": (0.2, 0.3, -0.5)},
        {"mean": (0.1, 0.4, float("nan"))},
        {"mean": (0.1, 0.4, float("inf"))},
        {"shape_CHW": (3, 4)},
        {"shape_CHW": (3, 0, 5)},
        {"shape_CHW": (1, 4, 5)},
        {"size": 4},
    ],
)
def test_facts_of_an_image_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ImageInfo(**RGB | wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float64"},
        {"dtype": "object"},
        {"shape": (0,)},
        {"shape": (-1,)},
        {"shape": ("a b",)},
        {"shape": ("",)},
    ],
)
def test_facts_of_an_array_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ArrayInfo(**{"dtype": "float32"} | wrong)


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ImageInfo(**RGB).mean = (0.0, 0.0, 0.0)


def test_images_stand_for_their_normalization() -> None:
    info = ImageInfo(**RGB)
    assert info.meaning == ("mean 0.1, 0.4, 0.7", "std 0.2, 0.3, 0.5")
    near = ImageInfo(**RGB | {"mean": (0.105, 0.39, 0.7), "std": (0.2, 0.31, 0.48)})
    assert info.misfit(info.meaning) is info.misfit(near.meaning) is near.misfit(info.meaning) is None
    for other in ({"mean": (0.1, 0.42, 0.7)}, {"std": (0.2, 0.3, 0.6)}):
        words = ImageInfo(**RGB | other).meaning
        assert info.misfit(words) == Misfit(words, info.meaning, OTHER_STATISTICS)
        assert info.misfit(words, retrained=True) is None
    for words in ((), ("cat",), ("mean x, y", "std 1, 2")):
        assert info.misfit(words) == Misfit(words, info.meaning, OTHER_WORDS)
