from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ptpipe import StageError
from ptpipe_torch.data.images import in_8_bits, open_image_file


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
