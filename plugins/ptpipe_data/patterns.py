"""Images that are made up and can be learned, for trying things out in seconds.

Shape legend: N images, K classes, C channels, H height, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe_data.idx import make_pool
from ptpipe_data.splitting import draw_splits
from ptpipe_data.statistics import channel_statistics
from ptpipe_torch.data.data import Data, DatasetInfo

if TYPE_CHECKING:
    from ptpipe_data import SyntheticConfig

_COARSE = 4
_REACH = 1
_NOISE = 25.0


def synthetic(config: SyntheticConfig, seed: int) -> Data:
    """Give each class a smooth random pattern; an image is its class's, moved a little, fainter or stronger, noisy."""
    rng = np.random.default_rng((seed, config.num_classes, config.image_size, config.channels))
    patterns_KHWC = _patterns(rng, config)
    pools = []
    for name, num in (("train", config.num_train), ("test", config.num_test)):
        labels_N = rng.permutation(np.arange(num) % config.num_classes)
        pools.append(make_pool(name, _images(rng, patterns_KHWC[labels_N]), labels_N))
    splits = draw_splits(pools[0], pools[1], config, seed)
    mean, std = channel_statistics(splits["train"].images)
    names = tuple(f"class {number}" for number in range(config.num_classes))
    info = DatasetInfo("synthetic", names, (config.channels, config.image_size, config.image_size), mean, std)
    return Data(info, splits, config.loader_options())


def _patterns(rng: np.random.Generator, config: SyntheticConfig) -> npt.NDArray[np.float64]:
    side = config.image_size
    coarse_KHWC = rng.uniform(-1, 1, (config.num_classes, _COARSE, _COARSE, config.channels))
    position = np.linspace(0, _COARSE - 1, side)
    weights = np.stack([np.interp(position, np.arange(_COARSE), unit) for unit in np.eye(_COARSE)], axis=1)
    patterns_KHWC: npt.NDArray[np.float64] = np.einsum("ih,khwc,jw->kijc", weights, coarse_KHWC, weights)
    return patterns_KHWC


def _images(rng: np.random.Generator, patterns_NHWC: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    num = len(patterns_NHWC)
    for axis in (1, 2):
        moves_N = rng.integers(-_REACH, _REACH + 1, num)
        for move in range(-_REACH, _REACH + 1):
            chosen = moves_N == move
            patterns_NHWC[chosen] = np.roll(patterns_NHWC[chosen], move, axis=axis)
    strength_N111 = rng.uniform(40, 100, (num, 1, 1, 1))
    noise_NHWC = rng.normal(0, _NOISE, patterns_NHWC.shape)
    return np.clip(np.rint(128 + strength_N111 * patterns_NHWC + noise_NHWC), 0, 255).astype(np.uint8)
