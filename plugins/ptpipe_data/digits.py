"""The bundled handwritten digits (1,797 images, 8 x 8), as they are or resized to stand in for MNIST.

Source: E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998); see
digits.txt. Shape legend: N images, H height, W width, C channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe_data.catalog import DIGITS_FILE
from ptpipe_data.channel_stats import channel_stats
from ptpipe_data.classes import classification
from ptpipe_data.idx import make_split
from ptpipe_data.labelled_images import image_info, images_of, labelled_images, labels_of
from ptpipe_data.splitting import draw_splits
from ptpipe_torch import ArrayColumn, Data, Split

if TYPE_CHECKING:
    from ptpipe_data.config import LabelledImageConfig

_TEST_EVERY = 4
_BOX, _SIDE = 20, 28
_SHIFTS = (0, -2, 2)


def load_digits(config: LabelledImageConfig, seed: int) -> Data:
    """Return the digits as they are; every fourth image is a test image, independent of the seed."""
    train, test = _train_and_test(*_read_bundled())
    return _data("digits", draw_splits(train, test, config, seed), config)


def load_digits_like_mnist(name: str, config: LabelledImageConfig, seed: int) -> Data:
    """Return the digits in MNIST's format, so that manifests and networks for it run and train.

    As in MNIST, an image is 28 x 28 with the digit in a box of 20 x 20. Each training image occurs nine times, shifted
    by two pixels in each direction: an epoch then has enough steps for a small CNN (99 % test accuracy after three
    epochs, instead of 88 % with the 1,280 images alone) and accuracy gates are meaningful. Val is held out before the
    copies are made, and test images are never shifted.
    """
    pixels_NHWC, labels_N = _read_bundled()
    margin = (_SIDE - _BOX) // 2
    framed_NHWC = np.pad(_resize(pixels_NHWC, _BOX), ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    train, test = _train_and_test(framed_NHWC, labels_N)
    splits = draw_splits(train, test, config, seed, enlarge=_add_shifted_copies)
    return _data(f"digits (in place of {name})", splits, config)


def _read_bundled() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return pixels of shape (N, 8, 8, 1), scaled from 0..16 to 0..255, and labels of shape (N,)."""
    with np.load(DIGITS_FILE, allow_pickle=False) as bundle:
        pixels_NHW: npt.NDArray[np.float64] = bundle["images_NHW"].astype(np.float64) * (255 / 16)
        return np.rint(pixels_NHW[..., np.newaxis]).astype(np.uint8), bundle["labels_N"].astype(np.int64)


def _train_and_test(pixels_NHWC: npt.NDArray[np.uint8], labels_N: npt.NDArray[np.int64]) -> tuple[Split, Split]:
    every = make_split("digits", pixels_NHWC, labels_N)
    is_test = np.arange(len(every)) % _TEST_EVERY == _TEST_EVERY - 1
    return every.subset(np.flatnonzero(~is_test)), every.subset(np.flatnonzero(is_test))


def _resize(pixels_NHWC: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """Interpolate bilinearly, as torch's interpolate with align_corners=False."""
    small = pixels_NHWC.shape[1]
    centers = (np.arange(side) + 0.5) * small / side - 0.5
    weights = np.stack([np.interp(centers, np.arange(small), unit) for unit in np.eye(small)], axis=1)
    resized_NHWC: npt.NDArray[np.float64] = np.einsum("ih,nhwc,jw->nijc", weights, pixels_NHWC, weights)
    return np.rint(resized_NHWC).astype(np.uint8)


def _add_shifted_copies(train: Split) -> Split:
    pixels_NHWC = images_of(train).values()
    ids, pixels = [], []
    for down in _SHIFTS:
        for right in _SHIFTS:
            ids.append([f"{id_}{down:+d}{right:+d}" if down or right else id_ for id_ in train.ids.tolist()])
            pixels.append(np.roll(pixels_NHWC, (down, right), axis=(1, 2)))  # only empty margin wraps around
    copies = len(_SHIFTS) ** 2
    return labelled_images(
        np.concatenate([np.array(shifted) for shifted in ids]),
        ArrayColumn(np.concatenate(pixels)),
        np.tile(labels_of(train), copies),
    )


def _data(name: str, splits: dict[str, Split], config: LabelledImageConfig) -> Data:
    images = images_of(splits["train"])
    task = classification("0123456789", config.classes, labels_of(splits["train"]))
    return Data(image_info(name, task, images, *channel_stats(images)), splits, config.loader_options())
