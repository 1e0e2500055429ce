"""Files that resize images of any size themselves.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from PIL.Image import Image as PILImage

from ptpipe import Context, StageError
from ptpipe_onnx import ExportConfig, preprocessing
from ptpipe_onnx.check_command import check
from ptpipe_onnx.checks import unsupported_opset
from ptpipe_onnx.file_interface import raw_forms
from ptpipe_torch import Data, ImageInfo, InputForm, Model, OnnxFile, Resizing
from ptpipe_torch.model.exact_session import exact_session
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_zoo import OnnxModelConfig, onnx_model

from .conftest import NARROW, Exported

Export = Callable[..., OnnxFile]
CROPPED, STRETCHED = Resizing(shorter_side=19), Resizing()
"""Of images of 16 x 16."""


def with_resizing(digits: Data, resizing: Resizing) -> Data:
    info = digits.info.inputs["images"]
    assert isinstance(info, ImageInfo)
    infos = {"images": info.model_copy(update={"resizing": resizing})}
    return Data(replace(digits.info, inputs=infos), digits.splits)


def picture(digits: Data, number: int, height: int, width: int) -> PILImage:
    """Return a test image of another size."""
    pixels_HW = digits.splits["test"].inputs["images"].values()[number, :, :, 0]
    return Image.fromarray(pixels_HW).resize((width, height), Image.Resampling.BICUBIC)


def logits_of(model: Model, data: Data, pixels_NHWC: np.ndarray) -> np.ndarray:
    normalized = data.info.inputs["images"].conversion("images")(torch.from_numpy(pixels_NHWC), False)
    with model.predictor() as predict:
        return predict({"images": normalized.numpy()})["logits"]


SIZES = ((16, 16), (19, 19), (40, 23), (23, 60), (9, 7), (200, 17), (16, 32))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("backend", "layout", "resizing"),
    [
        (None, "nchw", CROPPED),
        ("fbgemm", "nhwc", CROPPED),
        ("qnnpack", "nchw", STRETCHED),
        (None, "nhwc", STRETCHED),
    ],
)
def test_images_of_any_size(
    backend: str | None,
    layout: str,
    resizing: Resizing,
    run_export: Export,
    exported: Callable[..., Exported],
    digits: Data,
    events,
) -> None:
    model, data = exported("cnn", backend).model, with_resizing(digits, resizing)
    file = run_export(model, data, preprocessing=layout, resize=True, postprocessing=True)
    assert events.metrics["max_resize_difference_levels"] <= 2
    session = exact_session(file.path, session_options(1))
    for number, (height, width) in enumerate(SIZES):
        given = [picture(digits, 2 * number + of, height, width) for of in range(2)]
        is_own = (height, width) == (16, 16)
        fitted = given if is_own else [resizing.fit(image, (16, 16)) for image in given]
        expected_NK = logits_of(model, data, np.stack(fitted)[..., np.newaxis])
        fed_NHW = np.stack(given)
        found_NK = session.run(
            ["logits"], {"images": fed_NHW[..., np.newaxis] if layout == "nhwc" else fed_NHW[:, np.newaxis]}
        )[0]
        difference = np.abs(found_NK - expected_NK).max()
        assert difference <= (0.05 if backend else 0.01) * np.abs(expected_NK).max(), (height, width)
        assert (found_NK.argmax(1) == expected_NK.argmax(1)).all()


def test_what_a_file_says_of_itself(
    run_export: Export, exported: Callable[..., Exported], digits: Data, tmp_path: Path
) -> None:
    file = run_export(
        exported("cnn", "fbgemm", narrow=NARROW).model,
        with_resizing(digits, CROPPED),
        preprocessing="nhwc",
        resize=True,
        num_samples=32,
    )
    assert str(file.own_signature) == (
        "images (batch, images_height, images_width, 1) uint8 -> logits (batch, 10) float32"
    )
    metadata = {entry.key: entry.value for entry in onnx.load(file.path).metadata_props}
    assert metadata["resize"] == "images: shorter side to 19, then a centre crop of 16 x 16"
    assert metadata["signature"] == str(file.own_signature)
    (batch,) = digits.batches("test", batch_size=300, input_form=file.input_form)
    with file.predictor() as predict:  # what stages feed
        assert predict(batch.input_arrays())["logits"].shape == (300, 10)
    loaded = onnx_model(OnnxModelConfig(file=str(file.path)), Context("file", "model.onnx", 7, tmp_path), digits)
    assert (loaded.input_form, loaded.signature.inputs) == (file.input_form, file.signature.inputs)
    result = CliRunner().invoke(check, [str(file.path), "--json"], standalone_mode=False)
    assert (result.return_value, json.loads(result.stdout)["reproduced"]) == (0, True)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("resizing", [CROPPED, STRETCHED])
def test_it_is_pillows(
    layout: InputForm, channels: int, resizing: Resizing, digits: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of noise, in random sizes from a row or a column to nine times as much."""
    random = np.random.default_rng(0)
    monkeypatch.setattr(preprocessing, "TRIED_SIZES", np.exp(random.uniform(-2.5, 2.2, (25, 2))))
    info = ImageInfo(shape_CHW=(channels, 12, 17), mean=(0.3,) * channels, std=(0.4,) * channels, resizing=resizing)
    data = Data(replace(digits.info, inputs={"images": info}), digits.splits)
    forms = raw_forms(data, layout, data.info.signature.inputs, resize=True)
    noise_NHWC = random.integers(0, 256, (5, 12, 17, channels), dtype=np.uint8)
    raw = noise_NHWC if layout == "nhwc" else noise_NHWC.transpose(0, 3, 1, 2)
    for opset in filter(lambda opset: unsupported_opset(opset) is None, (18, 23)):
        assert preprocessing.check_resizing(forms, {"images": raw}, opset) <= 2


class Nearest(Resizing):
    """What another data set might do."""

    def fit(self, image: PILImage, size_HW: tuple[int, int]) -> PILImage:
        return image.resize(size_HW[::-1], Image.Resampling.NEAREST)


def test_another_resizing_is_found(run_export: Export, exported: Callable[..., Exported], digits: Data) -> None:
    with pytest.raises(
        StageError, match=r"resizing of images .* differs .* by \d+ of 255 levels, for an image of 37 x 27"
    ):
        run_export(
            exported("cnn", None).model,
            with_resizing(digits, Nearest()),
            preprocessing="nhwc",
            resize=True,
            num_samples=8,
        )


def test_unknown_resizing_is_refused(digits: Data) -> None:
    with pytest.raises(StageError, match=r"resize: digits does not say how images are resized, as data\.image_"):
        raw_forms(digits, "nhwc", digits.info.signature.inputs, resize=True)


def test_normalized_values_are_not_resized() -> None:
    with pytest.raises(ValueError, match="resize: the file takes normalized values; set preprocessing to nhwc or nchw"):
        ExportConfig(resize=True)
