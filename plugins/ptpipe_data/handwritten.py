"""scikit-learn's bundled handwritten digits: 1,797 real images of 8 x 8 pixels.

Source: E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI machine learning repository (1998).

Shape legend: N images, H height, W width, C channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe_data.idx import make_pool
from ptpipe_data.splitting import draw_splits
from ptpipe_data.statistics import channel_statistics
from ptpipe_torch.data.data import Data, DatasetInfo, Split
from ptpipe_torch.data.images import ArrayImages

if TYPE_CHECKING:
    from ptpipe_data import SplitConfig

_TEST_EVERY = 4
_BOX, _SIDE = 20, 28
_SHIFTS = (0, -2, 2)


def digits(config: SplitConfig, seed: int) -> Data:
    """The digits as they are; every fourth is a test image, whatever the seed."""
    train, test = _pools(*_bundled())
    return _data("digits", draw_splits(train, test, config, seed), config)


def digits_in_place_of(name: str, config: SplitConfig, seed: int) -> Data:
    """The digits dressed up as MNIST, so that manifests and networks written for it work and mean something.

    As in MNIST, an image is 28 x 28 with the digit in a box of 20 x 20. And each training image is there nine times,
    shifted by two pixels each way: a small CNN then has as many steps an epoch as it takes to learn (three epochs:
    99 % of the test images; with the bare 1,280 images: 88 %), and a gate on the accuracy has something to hold on to.
    Val is set aside before, and test images are never shifted.
    """
    pixels_NHWC, labels_N = _bundled()
    margin = (_SIDE - _BOX) // 2
    framed_NHWC = np.pad(_enlarged(pixels_NHWC, _BOX), ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    train, test = _pools(framed_NHWC, labels_N)
    return _data(f"digits (in place of {name})", draw_splits(train, test, config, seed, enlarge=_shifted), config)


def _bundled() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels, 0 to 16 stretched to 0 to 255, of shape (N, 8, 8, 1), and labels."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    pixels_NHW: npt.NDArray[np.float64] = bundle.images * (255 / 16)
    return np.rint(pixels_NHW[..., np.newaxis]).astype(np.uint8), bundle.target.astype(np.int64)


def _pools(pixels_NHWC: npt.NDArray[np.uint8], labels_N: npt.NDArray[np.int64]) -> tuple[Split, Split]:
    every = make_pool("digits", pixels_NHWC, labels_N)
    is_test = np.arange(len(every)) % _TEST_EVERY == _TEST_EVERY - 1
    return every.subset(np.flatnonzero(~is_test)), every.subset(np.flatnonzero(is_test))


def _enlarged(pixels_NHWC: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """Bilinear, pixel centres aligned."""
    small = pixels_NHWC.shape[1]
    centres = (np.arange(side) + 0.5) * small / side - 0.5
    weights = np.stack([np.interp(centres, np.arange(small), unit) for unit in np.eye(small)], axis=1)
    enlarged_NHWC: npt.NDArray[np.float64] = np.einsum("ih,nhwc,jw->nijc", weights, pixels_NHWC, weights)
    return np.rint(enlarged_NHWC).astype(np.uint8)


def _shifted(train: Split) -> Split:
    pixels_NHWC = train.images.take(np.arange(len(train)))
    ids, pixels = [], []
    for down in _SHIFTS:
        for right in _SHIFTS:
            ids.append([f"{id_}{down:+d}{right:+d}" if down or right else id_ for id_ in train.ids.tolist()])
            pixels.append(np.roll(pixels_NHWC, (down, right), axis=(1, 2)))  # only empty margin comes round
    copies = len(_SHIFTS) ** 2
    return Split(
        np.concatenate([np.array(part) for part in ids]),
        np.tile(train.labels_N, copies),
        ArrayImages(np.concatenate(pixels)),
    )


def _data(name: str, splits: dict[str, Split], config: SplitConfig) -> Data:
    train = splits["train"]
    mean, std = channel_statistics(train.images)
    _, height, width, channels = train.images.take(np.arange(1)).shape
    info = DatasetInfo(name, tuple("0123456789"), (channels, height, width), mean, std)
    return Data(info, splits, config.loader_options())
