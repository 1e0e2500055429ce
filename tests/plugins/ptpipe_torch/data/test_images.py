from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ptpipe import StageError
from ptpipe_torch.data.images import ImageDecoder, in_8_bits, open_image_file


def opened(path: Path, channels: int = 1) -> np.ndarray:
    with open_image_file(path, 1000) as image:
        return np.asarray(in_8_bits(image, path.name, channels))


@pytest.mark.parametrize("name", ["grey.png", "grey.tif", "grey.ppm"])
def test_16_bits_are_scaled(tmp_path: Path, name: str) -> None:
    values_HW = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    Image.fromarray(values_HW).save(tmp_path / name)
    assert np.array_equal(opened(tmp_path / name), values_HW >> 8)
    assert opened(tmp_path / name, channels=3).shape == (16, 16, 3)


@pytest.mark.parametrize(("low", "high"), [(0, 255), (0, 65_536), (-1, 1000)])
def test_integers_of_another_range_are_refused(tmp_path: Path, low: int, high: int) -> None:
    Image.fromarray(np.array([[low, high]], dtype=np.int32)).save(tmp_path / "x.tif")
    with pytest.raises(StageError, match=f"x.tif has pixels of {low} to {high} in 32 bits: save it with 8 or 16"):
        opened(tmp_path / "x.tif")


def test_32_bits_of_a_16_bit_range_are_scaled(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 65_535]], dtype=np.int32)).save(tmp_path / "x.tif")
    assert opened(tmp_path / "x.tif").tolist() == [[0, 255]]
    Image.fromarray(np.zeros((1, 2), dtype=np.int32)).save(tmp_path / "x.tif")
    assert opened(tmp_path / "x.tif").tolist() == [[0, 0]]


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0.1, 0.9]], dtype=np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(StageError, match=r"x\.tif has floating-point pixels: save it with 8 or 16 bits"):
        opened(tmp_path / "x.tif")


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How an upright picture is stored for a reader that undoes an EXIF orientation."""


def ramp(width: int = 96, height: int = 64) -> Image.Image:
    """A picture that no turn leaves as it is, and JPEG hardly changes."""
    y_H1, x_1W = np.arange(height)[:, None], np.arange(width)[None, :]
    return Image.fromarray((x_1W * 1.5 + y_H1).astype(np.uint8))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
@pytest.mark.parametrize("number", [1, *STORED_AS])
@pytest.mark.parametrize(("size", "resize"), [(16, 24), ((16, 48), None)])
def test_images_are_turned_upright(
    tmp_path: Path, number: int, suffix: str, size: int | tuple[int, int], resize: int | None
) -> None:
    stored = ramp() if number == 1 else ramp().transpose(STORED_AS[number])
    lossless = {".webp": {"lossless": True}, ".jpg": {"quality": 95}}.get(suffix, {})
    stored.save(tmp_path / f"turned{suffix}", exif=exif(number), **lossless)
    ramp().save(tmp_path / "upright.png")
    decoder = ImageDecoder(size, resize, 1)
    seen = []
    for name in (f"turned{suffix}", "upright.png"):
        with open_image_file(tmp_path / name, 100_000) as image:
            seen.append(decoder.pixels(image, name).astype(int))
    assert np.abs(seen[0] - seen[1]).max() <= 3


@pytest.mark.parametrize("tags", [exif(9).tobytes(), b"Exif\0\0II*\0", b"Exif\0\0no TIFF file"])
def test_damaged_exif_turns_nothing(tmp_path: Path, tags: bytes) -> None:
    ramp().save(tmp_path / "x.jpg", exif=tags)
    with open_image_file(tmp_path / "x.jpg", 100_000) as image:
        assert ImageDecoder(64, 64, 1).pixels(image, "x").shape == (64, 64, 1)
        assert image.size == (96, 64)
