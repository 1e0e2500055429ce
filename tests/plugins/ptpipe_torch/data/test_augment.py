"""Augmentations against what they say they do, pixel by pixel."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe_torch.data.augment import AUGMENTATIONS, Draws, augment

NAMES = sorted(AUGMENTATIONS)


def images(num: int = 64, height: int = 14, width: int = 14, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (num, height, width, channels), dtype=np.uint8)


def applied(name: str, pixels: np.ndarray, seed: tuple[int, ...] = (1, 2)) -> np.ndarray:
    return augment(pixels.copy(), np.arange(len(pixels)), seed, [name])


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_type_stay(name: str) -> None:
    for shape in ((5, 8, 12, 1), (1, 28, 28, 1), (3, 7, 7, 3)):
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        result = applied(name, pixels)
        assert result.shape == shape and result.dtype == np.uint8 and result.flags.c_contiguous


@pytest.mark.parametrize("name", NAMES)
def test_seed_position_and_nothing_else_decide(name: str) -> None:
    pixels = images()
    whole = applied(name, pixels)
    np.testing.assert_array_equal(whole, applied(name, pixels))
    some = np.array([40, 3, 17])
    np.testing.assert_array_equal(augment(pixels[some], some, (1, 2), [name]), whole[some])
    assert (applied(name, pixels, (1, 3)) != whole).any()
    same_image = np.repeat(pixels[:1], 64, axis=0)
    assert len(np.unique(applied(name, same_image), axis=0)) > 1


def test_order_and_repetition_matter() -> None:
    pixels = images()
    np.testing.assert_array_equal(
        augment(pixels.copy(), np.arange(64), (1,), ["flip", "shift"]),
        augment(pixels.copy(), np.arange(64), (1,), ["flip", "shift"]),
    )
    twice = augment(pixels.copy(), np.arange(64), (1,), ["flip", "flip"])
    assert (twice != pixels).any(), "each has draws of its own"


def test_flip() -> None:
    pixels = images(1000, 4, 4, 1)
    result = applied("flip", pixels)
    kept = (result == pixels).all(axis=(1, 2, 3))
    np.testing.assert_array_equal(result[~kept], pixels[~kept][:, :, ::-1])
    assert 400 < kept.sum() < 600


@pytest.mark.parametrize(("name", "reach"), [("shift", 2), ("crop", 4)])
def test_moves(name: str, reach: int) -> None:
    pixels = images(600, 28 if name == "shift" else 32, 28 if name == "shift" else 32, 1)
    result = applied(name, pixels)
    _, height, width, _ = pixels.shape
    seen = set()
    for before, after in zip(pixels[..., 0], result[..., 0], strict=True):
        rows, columns = np.flatnonzero(after.any(axis=1)), np.flatnonzero(after.any(axis=0))
        down = rows[0] if rows[0] else rows[-1] + 1 - height
        right = columns[0] if columns[0] else columns[-1] + 1 - width
        expected = np.zeros_like(before)
        expected[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = before[
            max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
        ]
        np.testing.assert_array_equal(after, expected)
        seen.add((down, right))
    assert len(seen) > 0.9 * (2 * reach + 1) ** 2
    assert max(max(abs(a), abs(b)) for a, b in seen) == reach


@pytest.mark.parametrize("size_HW", [(320, 32), (32, 320)])
def test_an_image_moves_by_a_part_of_each_of_its_sides(size_HW: tuple[int, int]) -> None:
    white = np.full((200, *size_HW, 1), 255, dtype=np.uint8)
    for name, part in (("shift", 14), ("crop", 8)):
        moved = applied(name, white)[..., 0] > 0
        for axis, side in ((2, size_HW[0]), (1, size_HW[1])):
            assert (side - moved.any(axis=axis).sum(axis=1)).max() == round(side / part), (name, side)
    erased = applied("erase", white)[..., 0] == 0
    assert [erased.any(axis=axis).sum(axis=1).max() for axis in (2, 1)] == [9, 9], "0.3 times the shorter side"


@pytest.mark.parametrize(("name", "crc"), [("crop", 386544090), ("erase", 799136872), ("shift", 2521044875)])
def test_square_images_are_augmented_as_ever(name: str, crc: int) -> None:
    assert zlib.crc32(applied(name, images(64, 28, 28)).tobytes()) == crc


def test_rotate_turns_about_the_centre() -> None:
    pixels = np.zeros((200, 29, 29, 1), dtype=np.uint8)
    pixels[:, 14, 26] = 255  # twelve pixels to the right of the centre
    result = applied("rotate", pixels)[..., 0].astype(float)
    rows, columns = np.mgrid[0:29, 0:29]
    weight = result.sum(axis=(1, 2))
    y, x = ((result * axis).sum(axis=(1, 2)) / weight - 14 for axis in (rows, columns))
    np.testing.assert_allclose(np.hypot(x, y), 12, atol=0.3)
    degrees = np.rad2deg(np.arctan2(y, x))
    assert -10.5 < degrees.min() < -8 and 8 < degrees.max() < 10.5 and abs(degrees.mean()) < 1.5


def test_rotation_of_a_wide_image_is_still_a_rotation() -> None:
    pixels = np.zeros((100, 29, 61, 1), dtype=np.uint8)
    pixels[:, 14, 50] = 255
    result = applied("rotate", pixels)[..., 0].astype(float)
    rows, columns = np.mgrid[0:29, 0:61]
    weight = result.sum(axis=(1, 2))
    y, x = (result * rows).sum(axis=(1, 2)) / weight - 14, (result * columns).sum(axis=(1, 2)) / weight - 30
    np.testing.assert_allclose(np.hypot(x, y), 20, atol=0.4)


def test_zoom_enlarges_a_part() -> None:
    ramp = np.broadcast_to(np.linspace(0, 250, 50)[None, None, :, None], (200, 50, 50, 1)).round().astype(np.uint8)
    result = applied("zoom", ramp)[..., 0].astype(float)
    slope = (result[:, 25, 40] - result[:, 25, 10]) / (ramp[0, 25, 40, 0] - 0.0 - ramp[0, 25, 10, 0])
    assert 0.69 < slope.min() < 0.74 and 0.96 < slope.max() < 1.01
    assert result.min() >= 0 and (result[:, 25, 5] > 0).any()
    constant = np.full((50, 20, 20, 3), 77, dtype=np.uint8)
    assert (applied("zoom", constant)[:, 1:-1, 1:-1] == 77).all()


def test_erase() -> None:
    pixels = images(300, 20, 20, 3)
    result = applied("erase", pixels)
    erased = (result == 0).all(axis=-1)
    np.testing.assert_array_equal(result[~erased], pixels[~erased])
    rows, columns = erased.any(axis=2), erased.any(axis=1)
    np.testing.assert_array_equal(erased, rows[:, :, None] & columns[:, None, :])
    assert rows.sum(axis=1).max() == 5 and rows.sum(axis=1).min() >= 3


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 255))
def test_draws_are_splitmix64(key: int, position: int, draw: int) -> None:
    mask = 2**64 - 1
    mixed = (key + (position * 256 + draw + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    assert Draws(key, np.array([position])).uniform(draw)[0] == (mixed >> 11) / 2**53


def test_draws_are_even_and_independent() -> None:
    positions = np.arange(100_000)
    first, second = Draws(5, positions).uniform(0), Draws(5, positions).uniform(1)
    counts = np.histogram(first, bins=20, range=(0, 1))[0]
    assert counts.min() > 4700 and counts.max() < 5300
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.01
    whole = Draws(5, positions).integers(0, -2, 2)
    assert np.unique(whole).tolist() == [-2, -1, 0, 1, 2]
