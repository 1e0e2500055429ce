"""Test vectors: inputs of real samples, the outputs that a file had for them, and how far other machines may differ.

Stored as one `.npz` file of NumPy arrays, without pickles, so that any machine that can run ONNX Runtime can read it:
NumPy is all it takes, where the protobuf files of ONNX's own test data sets need the package `onnx`. The arrays are
`input.NAME`, `output.NAME` and `about`, a JSON text with the rest. Imports neither torch nor onnx.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ptpipe import IntegrityError

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
SUFFIX = ".vectors.npz"
_ABOUT, _INPUT, _OUTPUT = "about", "input.", "output."
_MAX_BYTES = 2**30
"""Of all arrays, unpacked."""
_DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool")


@dataclass(frozen=True)
class Tolerance:
    """How far an output may differ, in units of `scales`."""

    max_abs: float
    rms: float
    scales: tuple[float, ...] = ()
    """The unit of each column of the second axis, such as a regression's targets; none: 1."""
    class_axis: int | None = None
    """The axis over classes, if the highest score along it is the predicted class."""
    step: float | None = None
    """The quantization step of the output, where it has one."""


@dataclass(frozen=True)
class Vectors:
    """What a file computed, and where."""

    model_sha256: str
    """Of the file, in hex digits."""
    inputs: Arrays
    outputs: Arrays
    tolerances: Mapping[str, Tolerance]
    """By the names of the outputs."""
    made_with: Mapping[str, str]
    """Versions and architecture."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(next(iter(self.inputs.values())))

    def save(self, path: Path) -> None:
        """Write the file; equal vectors give equal bytes."""
        tolerances = {name: asdict(tolerance) for name, tolerance in self.tolerances.items()}
        about = {"model_sha256": self.model_sha256, "tolerances": tolerances, "made_with": dict(self.made_with)}
        arrays: dict[str, Any] = {_INPUT + name: array for name, array in self.inputs.items()}
        arrays |= {_OUTPUT + name: array for name, array in self.outputs.items()}
        np.savez_compressed(path, **{_ABOUT: np.array(json.dumps(about)), **arrays})

    @classmethod
    def load(cls, path: Path) -> Vectors:
        """Read what `save` wrote. Raises IntegrityError for anything else, OSError where there is no such file."""
        with _damage_reported(path):
            with zipfile.ZipFile(path) as archive:
                if sum(member.file_size for member in archive.infolist()) > _MAX_BYTES:
                    raise ValueError(f"its arrays are larger than {_MAX_BYTES:,} bytes")
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            about = _About.model_validate_json(str(arrays.pop(_ABOUT)))
            inputs, outputs = (_named(arrays, prefix) for prefix in (_INPUT, _OUTPUT))
            _check(arrays, inputs, outputs, about)
            tolerances = {name: Tolerance(**dict(found)) for name, found in about.tolerances.items()}
            return cls(about.model_sha256, inputs, outputs, tolerances, about.made_with)


class _Tolerance(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_abs: float
    rms: float
    scales: tuple[float, ...]
    class_axis: int | None
    step: float | None = Field(None, gt=0)


class _About(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model_sha256: str
    tolerances: dict[str, _Tolerance]
    made_with: dict[str, str]


def _named(arrays: Arrays, prefix: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _check(arrays: Arrays, inputs: Arrays, outputs: Arrays, about: _About) -> None:
    if not inputs or not outputs or outputs.keys() != about.tolerances.keys():
        raise ValueError("it has no inputs, no outputs or no tolerances")
    sizes = {array.shape[:1] for array in arrays.values()}
    if len(sizes) != 1 or sizes & {(), (0,)}:
        raise ValueError("its arrays differ in their number of samples")
    for name, array in arrays.items():
        if array.dtype not in _DTYPES:
            raise ValueError(f"{name} is of {array.dtype}")
    for name, tolerance in about.tolerances.items():
        axis, scales = tolerance.class_axis, tolerance.scales
        if axis is not None and not 0 < axis < outputs[name].ndim:
            raise ValueError(f"output {name} has no axis {axis}")
        if scales and (outputs[name].ndim < 2 or len(scales) != outputs[name].shape[1] or min(scales) <= 0):
            raise ValueError(f"output {name} has other columns than scales")


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, NotImplementedError) as error:
        invalid = isinstance(error, ValidationError)
        reason = "its description is not valid" if invalid else " ".join(str(error).split())[:300]
        raise IntegrityError(f"{path.name} can't be read as test vectors: {reason}") from error
