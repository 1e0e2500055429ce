"""The interface of every model that can be evaluated, measured and shipped: torch float and int8, ONNX, others."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from ptpipe import Artifact

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Predictor(Protocol):
    """A callable from images to logits; the same for torch, int8 and ONNX models."""

    def __call__(self, images_NCHW: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Normalized images, C-contiguous float32 of shape (N, C, H, W), to logits, float32 of shape (N, K)."""
        ...


class Deployable(Artifact):
    """An artifact that predicts. Plugins for other formats derive from it and work with every `eval.*` stage."""

    @property
    @abstractmethod
    def format(self) -> str:
        """Name of the format for tables: `torch float32`, `torch int8 fbgemm`, `onnx int8`."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of the file that one would ship."""

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
        """Return a context manager that loads the model and gives a function to predict with.

        `num_threads`: threads of one prediction; None: as many as the process may use. Process-wide settings (torch's
        threads and quantized engine) are restored on exit, and the model's memory is freed: don't call the function
        after that. Raises StageError, with the reason, where this machine can't run the model.
        """
