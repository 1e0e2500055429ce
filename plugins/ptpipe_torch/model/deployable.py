"""The interface of every model that can be evaluated, measured and shipped: torch float and int8, ONNX, others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ptpipe import Artifact, StageError
from ptpipe_torch.data.raw_form import NORMALIZED, InputForm
from ptpipe_torch.model.signature import Signature, TensorSpec

if TYPE_CHECKING:
    import numpy.typing as npt


class Predictor(Protocol):
    """A callable from named inputs to named outputs; the same for torch, int8 and ONNX models."""

    def __call__(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs of a batch of samples.

        `inputs` are C-contiguous and of the form `Deployable.input_form`. Names, dtypes and shapes of outputs, and of
        normalized inputs, are those of `Deployable.signature`.
        """
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
    def signature(self) -> Signature:
        """Its named inputs and outputs."""

    @property
    def input_form(self) -> InputForm:
        """What it predicts from: raw values where it normalizes them itself; see `Data.batches`."""
        return NORMALIZED

    @abstractmethod
    def predictor(self, num_threads: int | None = None) -> AbstractContextManager[Predictor]:
        """Return a context manager that loads the model and gives a function to predict with.

        `num_threads`: threads of one prediction; None: as many as the process may use. Process-wide settings (torch's
        threads and quantized engine) are restored on exit, and the model's memory is freed: don't call the function
        after that. Raises StageError, with the reason, where this machine can't run the model.
        """


def check_output(source: str, spec: TensorSpec, output: Any, num_samples: int) -> None:
    """Raise StageError where an output is not what `spec` says, for a batch of samples. `source`: in the message."""
    shape: tuple[int, ...] = getattr(output, "shape", ())
    if not spec.fits(shape) or shape[0] != num_samples or output.dtype != spec.dtype:
        raise StageError(f"{source} returned something other than {spec} for a batch of {num_samples}")
