"""What can be evaluated, measured and shipped, whatever it is made of."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from ptpipe import Artifact

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Predictor(Protocol):
    """Images in, logits out; the one face of torch, int8 and ONNX models."""

    def __call__(self, images_NCHW: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Normalized images, C-contiguous float32 of shape (N, C, H, W), to logits, float32 of shape (N, K)."""
        ...


class Deployable(Artifact):
    """An artifact that predicts. Plugins for other formats derive from it and fit every `eval.*` stage."""

    @property
    @abstractmethod
    def format(self) -> str:
        """What it is, for tables: `torch float32`, `torch int8 fbgemm`, `onnx int8`."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the file that one would ship."""

    @property
    @abstractmethod
    def input_shape_CHW(self) -> tuple[int, int, int]:  # noqa: N802  # the shape legend
        """Shape of one input image: channels, height, width."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Length of a row of logits."""

    @abstractmethod
    def predictor(self, num_threads: int | None = None) -> AbstractContextManager[Predictor]:
        """Make ready to predict with that many threads (None: all of the machine), inside a `with`.

        Process-wide settings (torch's threads and quantized engine) hold inside the `with` and are put back after.
        Raises StageError where this machine can't run it, with the reason.
        """
