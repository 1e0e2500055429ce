"""Images, labels and ids in disjoint splits, handed out as whole normalized batches.

Shape legend: N images of a split, B of a batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ptpipe import JSON, Artifact, StageError
from ptpipe_torch.images import ArrayImages, Images

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = ["SPLITS", "ArrayImages", "Batch", "Data", "DataFacts", "Images", "LoaderOptions", "Split", "epoch_order"]

SPLITS = ("train", "val", "test", "calibration")
_DISJOINT = (("test", "train"), ("test", "val"), ("test", "calibration"), ("train", "val"))


@dataclass(frozen=True)
class DataFacts:
    """What is known of a data set as a whole."""

    name: str
    """`mnist`; or, where a stand-in was used, what it really is: `digits (in place of mnist)`."""
    class_names: tuple[str, ...]
    shape_CHW: tuple[int, int, int]
    mean: tuple[float, ...]
    """Per channel, of pixels scaled to [0, 1]."""
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made; the words of torch's DataLoader."""

    batch_size: int = 128
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int = 2
    persistent_workers: bool = False
    augment: tuple[str, ...] = ()
    """Names of whole-batch augmentations, applied to training batches in this order."""


@dataclass(frozen=True)
class Split:
    """One part of a data set."""

    ids: npt.NDArray[np.str_]
    """(N,) names that stay the same whatever is drawn from the source: `train/00042`."""
    labels_N: npt.NDArray[np.int64]
    images: Images

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Batch:
    """What a training or evaluation step gets."""

    images_NCHW: torch.Tensor
    """float32, normalized."""
    labels_N: torch.Tensor
    """int64."""
    indices_N: torch.Tensor
    """int64: positions in the split (`split.ids[indices]` are the ids)."""


class Data(Artifact):
    """A data set in splits `train`, `val`, `test` and `calibration` (some may be empty), with its loader options.

    Construction raises StageError where a sample id stands in two splits that must be disjoint: test with any
    other, val with train.
    """

    def __init__(self, facts: DataFacts, splits: Mapping[str, Split], loader: LoaderOptions = LoaderOptions()) -> None:  # noqa: B008
        self.facts = facts
        self.splits = splits
        self.loader = loader
        _refuse_overlap(splits)

    def save(self, folder: Path) -> None:
        from ptpipe_torch.data_folder import write_data

        write_data(self, folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        from ptpipe_torch.data_folder import read_data

        return cls(*read_data(folder))

    def summary(self) -> dict[str, JSON]:
        sizes: dict[str, JSON] = {f"num_{name}": len(split) for name, split in self.splits.items()}
        shape: list[JSON] = list(self.facts.shape_CHW)
        return {"name": self.facts.name, "shape": shape, "num_classes": self.facts.num_classes, **sizes}

    def batches(
        self,
        split: str,
        *,
        order_N: npt.NDArray[np.int64] | None = None,
        batch_size: int | None = None,
        augment_seed: Sequence[int] | None = None,
        channels_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield the split's batches, the last one smaller where it doesn't divide.

        `order_N`: positions to hand out, in this order (default: all, in order); use `epoch_order` for training
        and a slice of it to resume in mid-epoch or to share it among ranks. `batch_size`: default the loader's.
        `augment_seed`: a few integers, e.g. (seed, epoch); augment with randomness that is a function of these
        and of the sample's position alone; None: don't augment. `channels_last`: memory format of the images.
        """
        import numpy as np
        import torch

        part = self.splits[split]
        order_N = np.arange(len(part)) if order_N is None else order_N
        size = batch_size or self.loader.batch_size
        mean_C11, std_C11 = (torch.tensor(values).view(-1, 1, 1) * 255 for values in (self.facts.mean, self.facts.std))
        for start in range(0, len(order_N), size):
            indices_B = order_N[start : start + size]
            pixels_NHWC = torch.from_numpy(part.images.take(indices_B))
            images_NCHW = pixels_NHWC.permute(0, 3, 1, 2).float().sub_(mean_C11).div_(std_C11)
            images_NCHW = images_NCHW.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
            yield Batch(images_NCHW, torch.from_numpy(part.labels_N[indices_B]), torch.from_numpy(indices_B))


def epoch_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of samples in one epoch: a permutation that (seed, epoch) alone decides."""
    import numpy as np

    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def _refuse_overlap(splits: Mapping[str, Split]) -> None:
    ids = {name: set(split.ids.tolist()) for name, split in splits.items()}
    for one, other in _DISJOINT:
        shared = ids.get(one, set()) & ids.get(other, set())
        if shared:
            raise StageError(f"{len(shared)} samples stand in {one} and in {other}, among them {min(shared)}")
