"""Run an ONNX file on its test vectors and compare its outputs, with NumPy and ONNX Runtime alone.

Shape legend: N samples, K columns of an output.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from packaging.version import Version

from ptpipe import JSON, IntegrityError, StageError, __version__, host
from ptpipe_onnx import integer_products
from ptpipe_onnx.vectors import Tolerance, Vectors
from ptpipe_torch.files import file_digest

Match: TypeAlias = Literal["equal", "one step", "within tolerance", "differs"]
_EXACT_LAYER_NORMS = "1.27"
"""The ONNX Runtime from which on they are."""
_ROUNDING = 1e-3
"""Of a step: a difference of two float32 numbers, each a multiple of it."""


@dataclass(frozen=True)
class OutputDifference:
    """How one output differs from the stored one."""

    max_abs: float
    rms: float
    tolerance: Tolerance
    top1_agreement: float | None
    """Fraction of samples (or positions) whose highest score is the same; None if the output has no classes."""

    @property
    def is_reproduced(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.max_abs <= self.tolerance.max_abs and self.rms <= self.tolerance.rms

    @property
    def match(self) -> Match:
        """How the outputs compare: on machines whose sums don't saturate they are usually equal, or off by a step."""
        if not self.is_reproduced:
            return "differs"
        if self.max_abs == 0:
            return "equal"
        step = self.tolerance.step
        return "one step" if step is not None and self.max_abs <= step * (1 + _ROUNDING) else "within tolerance"

    @property
    def is_usual(self) -> bool:
        """Whether processors that don't saturate usually differ so."""
        return self.is_reproduced and (self.tolerance.step is None or self.match != "within tolerance")

    def to_json(self) -> dict[str, JSON]:
        """Return the figures."""
        return {
            "reproduced": self.is_reproduced,
            "match": self.match,
            "max_abs_difference": self.max_abs,
            "max_abs_allowed": self.tolerance.max_abs,
            "rms_difference": self.rms,
            "rms_allowed": self.tolerance.rms,
            "top1_agreement": self.top1_agreement,
        }


@dataclass(frozen=True)
class Reproduction:
    """Result of a check."""

    outputs: Mapping[str, OutputDifference]
    num_samples: int
    here: Mapping[str, str]
    made_with: Mapping[str, str]
    hint: str = ""
    """The likely cause of a difference, with its remedy."""

    @property
    def is_reproduced(self) -> bool:
        """Whether all outputs are."""
        return all(output.is_reproduced for output in self.outputs.values())

    def to_json(self) -> dict[str, JSON]:
        """Return all figures."""
        return {
            "reproduced": self.is_reproduced,
            "num_samples": self.num_samples,
            "outputs": {name: output.to_json() for name, output in self.outputs.items()},
            "here": dict(self.here),
            "made_with": dict(self.made_with),
            "hint": self.hint or None,
        }


def environment() -> dict[str, str]:
    """Return the versions and the processor that a file's outputs depend on."""
    ort = _runtime()
    flags = host.cpu_flags()
    vnni = "unknown" if flags is None else ", ".join(flag for flag in host.VNNI_FLAGS if flag in flags) or "none"
    return {
        "ptpipe": __version__,
        "onnxruntime": str(ort.__version__),
        "architecture": platform.machine(),
        "processor": host.processor_name(),
        "vnni": vnni,
    }


def stored_environment() -> dict[str, str]:
    """Return what is stored of it: nothing that differs between machines on which the export is the same."""
    return {name: value for name, value in environment().items() if name in ("ptpipe", "onnxruntime", "architecture")}


def reproduce(path: Path, vectors: Vectors) -> Reproduction:
    """Run the file on the inputs, as one batch, and compare.

    Raises IntegrityError if the vectors were made for another file, StageError if ONNX Runtime can't run it.
    """
    if file_digest(path) != vectors.model_sha256:
        raise IntegrityError(f"{path.name} is not the file that these test vectors were made for: its bytes differ")
    differences, metadata = _differences(path, vectors)
    here = environment()
    found = Reproduction(differences, vectors.num_samples, here, vectors.made_with)
    return replace(found, hint=_hint(path, vectors, found, metadata))


def _hint(path: Path, vectors: Vectors, found: Reproduction, metadata: Mapping[str, str]) -> str:
    version = found.here["onnxruntime"]
    is_int8 = metadata.get("precision", "").startswith("int8")
    if is_int8 and not integer_products.are_right():  # the vectors' batch may be too small to show it
        return integer_products.problem(version)
    if not all(output.is_usual for output in found.outputs.values()) and _may_saturate(found.here, metadata):
        return _saturation_hint(path, vectors)
    return "" if found.is_reproduced else _layer_norm_hint(path, version)


def _saturation_hint(path: Path, vectors: Vectors) -> str:
    try:
        exact, _ = _differences(path, vectors, exact_sums=True)
        is_remedied = all(output.is_usual for output in exact.values())
    except (ImportError, StageError):  # no onnx here, which files with shared weights need
        is_remedied = False
    found = (
        "saturate in 16 bits. With the session option session.x64quantprecision set to 1 the outputs are those of the "
        "vectors; a file quantized with reduce_range: true needs no option"
        if is_remedied
        else "can saturate in 16 bits, which changes outputs by more than a step: set the session option "
        "session.x64quantprecision to 1, or quantize with reduce_range: true"
    )
    return f"this processor has no VNNI, and sums of the file's products {found}"


def _layer_norm_hint(path: Path, version: str) -> str:
    if Version(version) >= Version(_EXACT_LAYER_NORMS) or b"LayerNormalization" not in path.read_bytes():
        return ""
    return (
        f"onnxruntime {version} computes the variance in layer norms as the difference of two means: outputs are wrong "
        "by 2 % where a mean is 100 times the standard deviation, and NaN at 1,000 times; "
        f"{_EXACT_LAYER_NORMS} and later are right"
    )


def difference_of(found: npt.NDArray[Any], expected: npt.NDArray[Any], tolerance: Tolerance) -> OutputDifference:
    """Compare one output. Raises StageError for one of another shape or type."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise StageError(
            f"the file returned {found.dtype} {found.shape}, its vectors have {expected.dtype} {expected.shape}"
        )
    difference = found.astype(np.float64) - expected.astype(np.float64)
    if tolerance.scales:
        difference = difference / np.array(tolerance.scales).reshape(-1, *(1,) * (difference.ndim - 2))
    axis = tolerance.class_axis
    agreement = None if axis is None else float(np.mean(found.argmax(axis) == expected.argmax(axis)))
    rms = float(np.sqrt(np.mean(np.square(difference))))
    return OutputDifference(float(np.abs(difference).max()), rms, tolerance, agreement)


def _differences(
    path: Path, vectors: Vectors, *, exact_sums: bool = False
) -> tuple[dict[str, OutputDifference], dict[str, str]]:
    """Return how the outputs differ, and the file's metadata."""
    outputs, metadata = _run(path, vectors, exact_sums=exact_sums)
    found = {
        name: difference_of(outputs[name], vectors.outputs[name], tolerance)
        for name, tolerance in vectors.tolerances.items()
    }
    return found, metadata


def _run(path: Path, vectors: Vectors, *, exact_sums: bool) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Return the outputs and the file's metadata."""
    from ptpipe_torch.model.onnx_file import open_session

    _runtime()
    with open_session(path, host.num_threads(), exact_sums=exact_sums) as session:
        inputs = {value.name for value in session.get_inputs()}
        if inputs != vectors.inputs.keys() or not vectors.outputs.keys() <= {v.name for v in session.get_outputs()}:
            raise StageError(f"{path.name} has other inputs or outputs than its test vectors")
        names = list(vectors.outputs)
        outputs = dict(zip(names, session.run(names, dict(vectors.inputs)), strict=True))
        return outputs, dict(session.get_modelmeta().custom_metadata_map)


def _runtime() -> Any:
    try:
        from ptpipe_torch.ort import ort
    except ImportError as error:
        raise StageError("onnxruntime can't be imported: pip install onnxruntime") from error
    return ort


def _may_saturate(here: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
    return (
        host.is_x86(here["architecture"])
        and here["vnni"] in ("none", "unknown")
        and metadata.get("saturating_layers_without_vnni", "[]") != "[]"
    )
