"""Mixup and cutmix: every training sample is mixed with another one, its partner.

Partners, weights and boxes are drawn for all samples of an epoch at once: they don't depend on how samples are grouped
into batches or on which process mixes them. Partners lie near each other in the epoch's order, so that most batches
have both.

Shape legend: N samples of a split, B of a batch, R read for it, H height, W width; 4: top, left, bottom, right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ptpipe import StageError
from ptpipe_torch.data.data import Batch, Partners
from ptpipe_torch.data.dataset_info import DatasetInfo
from ptpipe_torch.model.signature import TensorSpec

Tensors: TypeAlias = Mapping[str, torch.Tensor]
_DISTANCE = 8
"""Of partners in an epoch's order: shards of 1, 2, 4 or 8 workers of a batch of a multiple of 16 have both."""
_STREAM = 1
"""Of the random numbers of a seed and an epoch, another one than that of their order."""


@dataclass(frozen=True)
class MixOptions:
    """Parameters of the Beta distributions that weights are drawn from; 0: not mixed in that way.

    Where neither is 0, each sample is mixed in one way or the other, with probability 1/2.
    """

    mixup_alpha: float = 0.0
    """Zhang, Cisse, Dauphin, Lopez-Paz: mixup: beyond empirical risk minimization (2018)."""
    cutmix_alpha: float = 0.0
    """Yun, Han, Oh, Chun, Choe, Yoo: CutMix: regularization strategy to train strong classifiers (2019)."""

    def check(self, info: DatasetInfo) -> None:
        """Raise StageError, with the column, for a data set that can't be mixed so."""
        for spec in info.signature.inputs:
            if self.mixup_alpha and spec.dtype != "float32":
                raise StageError(f"mixup_alpha: the input {spec} has no float32 values to blend: leave the option out")
            if self.cutmix_alpha and _height_and_width(spec) is None:
                raise StageError(
                    f"cutmix_alpha: the input {spec} is no image (C, H, W) with a box to cut: leave the option out"
                )
            if spec.symbols:
                raise StageError(
                    f"mixup_alpha: the input {spec} has another {spec.symbols[0]} in each batch: leave the option out"
                )
        if self.cutmix_alpha:
            self._check_sizes(info)

    def _check_sizes(self, info: DatasetInfo) -> None:
        first, *others = info.signature.inputs
        for spec in others:
            if _height_and_width(spec) != _height_and_width(first):
                raise StageError(
                    f"cutmix_alpha: the inputs {first} and {spec} are images of different sizes: leave the option out"
                )
        for spec in (column.spec(name) for name, column in info.targets.items()):
            if len(spec.sample_shape) > 1 and not _is_map(spec.sample_shape, _height_and_width(first)):
                raise StageError(
                    f"cutmix_alpha: the target {spec} can't be cut as the images {first} are: use mixup_alpha alone"
                )

    def draw(self, info: DatasetInfo, order_N: npt.NDArray[np.int64], seed: Sequence[int]) -> Mixing:
        """Return how the samples of an epoch are mixed, a function of the arguments alone.

        `order_N`: the epoch's order, of the whole split. `seed`: non-negative integers: (seed, epoch).
        """
        rng = np.random.default_rng(np.random.SeedSequence(tuple(seed), spawn_key=(_STREAM,)))
        partners_N = np.empty_like(order_N)
        partners_N[order_N] = order_N[_partner_places(len(order_N))]
        num_ways = bool(self.mixup_alpha) + bool(self.cutmix_alpha)
        is_cut_N = rng.random(len(order_N)) < bool(self.cutmix_alpha) / num_ways
        alphas_N = np.where(is_cut_N, self.cutmix_alpha, self.mixup_alpha)
        weights_N, centers_N2 = rng.beta(alphas_N, alphas_N), rng.random((len(order_N), 2))
        size_HW = _height_and_width(info.signature.inputs[0]) if self.cutmix_alpha else None
        if size_HW is None:
            return Mixing(self, partners_N, weights_N, is_cut_N)
        boxes_N4 = cut_boxes(weights_N, centers_N2, size_HW)
        boxes_N4[~is_cut_N] = 0
        weights_N = np.where(is_cut_N, weights_outside(boxes_N4, size_HW), weights_N)
        return Mixing(self, partners_N, weights_N, is_cut_N, boxes_N4, size_HW)


@dataclass(frozen=True, eq=False)
class Mixing:
    """How each sample of a split is mixed in one epoch, by its position in the split."""

    options: MixOptions
    partners_N: npt.NDArray[np.int64]
    """Positions of the partners."""
    weights_N: npt.NDArray[np.float64]
    """Of the sample itself in the loss, and in its values where it is blended; its partner has the rest."""
    is_cut_N: npt.NDArray[np.bool_]
    """Whether a box is the partner's (cutmix); else the sample is blended (mixup)."""
    boxes_N4: npt.NDArray[np.int64] | None = None
    """The pixels that are the partner's, without bottom and right; empty in a blended sample. None: without cutmix."""
    size_HW: tuple[int, int] | None = None
    """Of the images; None: without cutmix."""

    def to_read(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return what is read for a batch, (R,): its samples and, after them, their partners that are none of these."""
        return np.concatenate([indices_B, np.setdiff1d(self.partners_N[indices_B], indices_B)])

    def mix(self, batch: Batch, num_samples: int) -> Batch:
        """Return the first samples of a batch, mixed. `batch`: of the samples that `to_read` returned."""
        indices_R = batch.indices_N.numpy()
        indices_B = indices_R[:num_samples]
        sorter_R = np.argsort(indices_R, kind="stable")
        rows_B = sorter_R[np.searchsorted(indices_R, self.partners_N[indices_B], sorter=sorter_R)]
        own, partners = batch.rows(0, num_samples), batch.take(torch.from_numpy(rows_B), num_samples)
        device = next((of.device for of in (*own.targets.values(), *own.args)), torch.device("cpu"))
        weights_B = torch.from_numpy(self.weights_N[indices_B]).float().to(device)
        is_cut_B = torch.from_numpy(self.is_cut_N[indices_B]).to(device)
        inputs = own.inputs
        if self.options.mixup_alpha:
            inputs = _blended(inputs, partners.inputs, weights_B.masked_fill(is_cut_B, 1.0))
        if self.boxes_N4 is None or self.size_HW is None:
            return Batch(inputs, own.targets, own.indices_N, Partners(partners.targets, weights_B))
        inside_BHW = _inside(torch.from_numpy(self.boxes_N4[indices_B]).to(device), self.size_HW)
        inputs = _pasted(inputs, partners.inputs, inside_BHW)
        maps = {name: of for name, of in own.targets.items() if _is_map(of.shape[1:], self.size_HW)}
        cut = _pasted(maps, partners.targets, inside_BHW)
        if not self.options.mixup_alpha and maps.keys() == own.targets.keys():
            return Batch(inputs, cut, own.indices_N)
        # Both losses have the target that was cut, and their weights add up to 1.
        others = {name: torch.where(_like(is_cut_B, of), of, partners.targets[name]) for name, of in cut.items()}
        return Batch(inputs, {**own.targets, **cut}, own.indices_N, Partners({**partners.targets, **others}, weights_B))


def cut_boxes(
    weights_N: npt.NDArray[np.float64], centers_N2: npt.NDArray[np.float64], size_HW: tuple[int, int]
) -> npt.NDArray[np.int64]:
    """Return boxes with sides of sqrt(1 - weight) of the image's, clipped to the image: int64 of shape (N, 4).

    Yun et al. (2019), section 3.1. `centers_N2`: fractions of height and width, in [0, 1).
    """
    size_2 = np.array(size_HW)
    sides_N2 = np.rint(np.sqrt(1 - weights_N)[:, None] * size_2).astype(np.int64)
    starts_N2 = np.rint(centers_N2 * size_2 - sides_N2 / 2).astype(np.int64)
    return np.concatenate([starts_N2.clip(min=0), (starts_N2 + sides_N2).clip(max=size_2)], axis=1)


def weights_outside(boxes_N4: npt.NDArray[np.int64], size_HW: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Return the fraction of the pixels that is outside of each box, float64 of shape (N,)."""
    height, width = size_HW
    weights_N: npt.NDArray[np.float64] = 1 - (boxes_N4[:, 2:] - boxes_N4[:, :2]).prod(axis=1) / (height * width)
    return weights_N


def _partner_places(num: int) -> npt.NDArray[np.int64]:
    """Return the place of each sample's partner in an order of so many samples: int64 of shape (N,).

    Places are paired within blocks of 16. At the end, where there is no such pair, it is the place before.
    """
    places_N = np.arange(num)
    paired_N = places_N ^ _DISTANCE
    return np.where(paired_N < num, paired_N, np.roll(places_N, 1))


def _height_and_width(spec: TensorSpec) -> tuple[int, int] | None:
    """Return those of images (C, H, W); None for values of another shape."""
    match spec.sample_shape:
        case (int(), int(height), int(width)):
            return height, width
    return None


def _is_map(sample_shape: Sequence[int | str], size_HW: tuple[int, int] | None) -> bool:
    """Return whether a target of this shape has values for each pixel of the images."""
    return tuple(sample_shape[-2:]) == size_HW


def _blended(own: Tensors, partners: Tensors, weights_B: torch.Tensor) -> Tensors:
    # Not torch.lerp, which may round otherwise at the end of a tensor than in the middle, so by the size of a batch.
    return {
        name: (of * _like(weights_B, of)).add_(partners[name] * _like(1 - weights_B, of)) for name, of in own.items()
    }


def _pasted(own: Tensors, partners: Tensors, inside_BHW: torch.Tensor) -> Tensors:
    num, *size = inside_BHW.shape
    return {
        name: torch.where(inside_BHW.view(num, *[1] * (of.dim() - 3), *size), partners[name], of)
        for name, of in own.items()
    }


def _inside(boxes_B4: torch.Tensor, size_HW: tuple[int, int]) -> torch.Tensor:
    """Return whether each pixel is in its sample's box: bool of shape (B, H, W)."""
    top_B1, left_B1, bottom_B1, right_B1 = boxes_B4[:, :, None].unbind(1)
    rows_H, columns_W = (torch.arange(side, device=boxes_B4.device) for side in size_HW)
    inside_BH = (rows_H >= top_B1) & (rows_H < bottom_B1)
    inside_BW = (columns_W >= left_B1) & (columns_W < right_B1)
    return inside_BH[:, :, None] & inside_BW[:, None, :]


def _like(values_B: torch.Tensor, tensor_B: torch.Tensor) -> torch.Tensor:
    """Return a value for each sample in a shape that broadcasts to the tensor's."""
    return values_B.view(-1, *[1] * (tensor_B.dim() - 1))
