"""Which models fit a data set. Shape legend: C channels, H height, W width."""

from __future__ import annotations

import pytest

from ptpipe import StageError
from ptpipe_torch import BATCH, Signature, TensorSpec

from ....streets import street_data


def segmenter(inputs: tuple[int | str, ...], outputs: tuple[int | str, ...]) -> Signature:
    image, logits = (
        TensorSpec(name, "float32", (BATCH, 3, *of)) for name, of in (("images", inputs), ("logits", outputs))
    )
    return Signature((image,), (logits,))


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ((32, 48), (32, 48)),
        (("height", "width"), ("height", "width")),
        (("8*height", "16*width"), ("8*height", "16*width")),
        (("4*half", 48), ("4*half", 48)),
    ],
)
def test_a_model_of_pictures_of_any_size_fits(inputs: tuple[int | str, ...], outputs: tuple[int | str, ...]) -> None:
    street_data().info.check_fit("net", segmenter(inputs, outputs))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (("side", "side"), ("side", "side"), r"net takes images \(batch, 3, side, side\) float32; streets needs"),
        (("5*height", "width"), ("5*height", "width"), r"net takes images \(batch, 3, 5\*height, width\)"),
        (("height", "width"), ("width", "height"), r"net returns logits \(batch, 3, 48, 32\) float32; streets needs"),
        (("height", "width"), ("2*height", "2*width"), r"net returns logits \(batch, 3, 64, 96\) float32; streets"),
    ],
)
def test_one_of_other_sizes_does_not(
    inputs: tuple[int | str, ...], outputs: tuple[int | str, ...], message: str
) -> None:
    with pytest.raises(StageError, match=message):
        street_data().info.check_fit("net", segmenter(inputs, outputs))
