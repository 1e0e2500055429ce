"""Synthetic, learnable images for quick experiments.

Shape legend: N images, K classes, C channels, H height, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe_data.channel_stats import channel_stats
from ptpipe_data.classes import classification
from ptpipe_data.idx import make_split
from ptpipe_data.labelled_images import image_info, images_of, labels_of
from ptpipe_data.splitting import draw_splits
from ptpipe_torch import Data

if TYPE_CHECKING:
    from ptpipe_data.config import SyntheticConfig

_GRID = 4
"""Side of the random grid that a class's pattern is interpolated from."""
_MAX_SHIFT = 1
_NOISE_STD = 25.0


def make_synthetic(config: SyntheticConfig, seed: int) -> Data:
    """Generate a smooth random pattern for each class; an image is its class's pattern, shifted, scaled and noisy."""
    rng = np.random.default_rng((seed, config.num_classes, config.image_size, config.channels))
    patterns_KHWC = _patterns(rng, config)
    generated = []
    for name, num in (("train", config.num_train), ("test", config.num_test)):
        labels_N = rng.permutation(np.arange(num) % config.num_classes)
        generated.append(make_split(name, _images(rng, patterns_KHWC[labels_N]), labels_N))
    splits = draw_splits(generated[0], generated[1], config, seed)
    images = images_of(splits["train"])
    names = [f"class {number}" for number in range(config.num_classes)]
    task = classification(names, config.classes, labels_of(splits["train"]))
    return Data(image_info("synthetic", task, images, *channel_stats(images)), splits, config.loader_options())


def _patterns(rng: np.random.Generator, config: SyntheticConfig) -> npt.NDArray[np.float64]:
    side = config.image_size
    grid_KHWC = rng.uniform(-1, 1, (config.num_classes, _GRID, _GRID, config.channels))
    position = np.linspace(0, _GRID - 1, side)
    weights = np.stack([np.interp(position, np.arange(_GRID), unit) for unit in np.eye(_GRID)], axis=1)
    patterns_KHWC: npt.NDArray[np.float64] = np.einsum("ih,khwc,jw->kijc", weights, grid_KHWC, weights)
    return patterns_KHWC


def _images(rng: np.random.Generator, patterns_NHWC: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    num = len(patterns_NHWC)
    for axis in (1, 2):
        shifts_N = rng.integers(-_MAX_SHIFT, _MAX_SHIFT + 1, num)
        for shift in range(-_MAX_SHIFT, _MAX_SHIFT + 1):
            chosen = shifts_N == shift
            patterns_NHWC[chosen] = np.roll(patterns_NHWC[chosen], shift, axis=axis)
    strength_N111 = rng.uniform(40, 100, (num, 1, 1, 1))
    noise_NHWC = rng.normal(0, _NOISE_STD, patterns_NHWC.shape)
    return np.clip(np.rint(128 + strength_N111 * patterns_NHWC + noise_NHWC), 0, 255).astype(np.uint8)
