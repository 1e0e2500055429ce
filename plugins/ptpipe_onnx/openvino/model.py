"""A model in OpenVINO's format as an artifact, run by OpenVINO on the CPU."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, JsonValue

from ptpipe import JSON, IntegrityError, StageError, host
from ptpipe_torch import Deployable, InputForm, Predictor, Signature
from ptpipe_torch.model.deployable import check_output
from ptpipe_torch.model.fixed_batches import run_in_pieces

if TYPE_CHECKING:
    import numpy.typing as npt

GRAPH, WEIGHTS, _INFO = "model.xml", "model.bin", "info.json"
_NO_COMPUTATION = {
    *("Broadcast", "Concatenation", "Const", "Convert", "Gather", "Input", "MemoryInput", "MemoryOutput", "Output"),
    *("Pad", "Reorder", "Reshape", "ShapeOf", "Slice", "Split", "StridedSlice", "Tile", "Transpose"),
}
_CONVERSION = "FakeQuantize"
_INT8 = ("u8", "i8")
_TELEMETRY = "openvino_telemetry"


class OpenVinoModel(Deployable):
    """A graph, `model.xml`, and its weights, `model.bin`. Immutable.

    `folder` has both. `precision`: as in `OnnxFile.precision`. `input_form`: see `Deployable`.
    """

    def __init__(
        self, folder: Path, signature: Signature, precision: str, input_form: InputForm = "normalized"
    ) -> None:
        self.folder, self._signature, self.precision = folder, signature, precision
        self._input_form = input_form

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def input_form(self) -> InputForm:
        return self._input_form

    @property
    def format(self) -> str:
        return f"openvino {self.precision}"

    @property
    def size_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in (GRAPH, WEIGHTS))

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        compiled = [self._compiled(num_threads or host.num_threads())]
        with errors_in_one_line("can't run the model"):
            requests = [compiled[0].create_infer_request()]
            fixed = _fixed_batch_size(compiled[0].inputs)

        def run(feed: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
            found = requests[0].infer(dict(feed), share_inputs=True)
            return [found[spec.name] for spec in self.signature.outputs]

        def predict(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
            with errors_in_one_line("can't run the model"):
                feed = {spec.name: inputs[spec.name] for spec in self.signature.inputs}
                outputs = run_in_pieces(run, feed, fixed)
            num_samples = len(inputs[self.signature.inputs[0].name])
            for spec, output in zip(self.signature.outputs, outputs, strict=True):
                check_output("OpenVINO", spec, output, num_samples)
            return {spec.name: output for spec, output in zip(self.signature.outputs, outputs, strict=True)}

        try:
            yield predict
        finally:  # the caller may keep `predict`, which would keep the weights
            requests.clear()
            compiled.clear()

    def operators(self) -> Counter[tuple[str, bool]]:
        """Count the operators that compute, as OpenVINO runs them on this machine, by type and whether in int8."""
        counts: Counter[tuple[str, bool]] = Counter()
        for operator in self._compiled(1).get_runtime_model().get_ops():
            about = operator.get_rt_info()
            type_ = about["layerType"].astype(str)
            if type_ not in _NO_COMPUTATION and type_ != _CONVERSION:
                counts[type_, about["runtimePrecision"].astype(str) in _INT8] += 1
        return counts

    def save(self, folder: Path) -> None:
        for name in (GRAPH, WEIGHTS):
            shutil.copyfile(self.folder / name, folder / name)
        info = {"signature": self.signature.to_json(), "precision": self.precision, "input_form": self.input_form}
        (folder / _INFO).write_text(json.dumps(info, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. Raises IntegrityError where `info.json` is damaged."""
        try:
            info = _Info.model_validate_json((folder / _INFO).read_bytes())
            return cls(folder, Signature.from_json(info.signature), info.precision, info.input_form)
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{_INFO} can't be read: {' '.join(str(error).split())[:300]}") from error

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        return (GRAPH, WEIGHTS)

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes}

    def _compiled(self, num_threads: int) -> Any:
        # bfloat16, its default where processors have it, would be another model.
        properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": num_threads, "NUM_STREAMS": 1}
        runtime = import_openvino()
        with errors_in_one_line("can't run the model"):
            return runtime.Core().compile_model(str(self.folder / GRAPH), "CPU", properties)


def _fixed_batch_size(inputs: Sequence[Any]) -> int | None:
    """Return the only batch size that a compiled model's inputs can have; None where they take any."""
    sizes = [value.partial_shape[0] for value in inputs if len(value.partial_shape)]
    return min((size.get_length() for size in sizes if size.is_static), default=None)


class _Info(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    signature: dict[str, JsonValue]
    precision: str
    input_form: InputForm


def missing_openvino() -> str | None:
    """Return what to install where OpenVINO is missing; else None."""
    from importlib.util import find_spec

    found = find_spec("openvino") is not None
    return None if found else "OpenVINO is not installed: pip install 'ptpipe[openvino]'"


def import_openvino() -> Any:
    """Return the module. Raises StageError where it is missing."""
    if message := missing_openvino():
        raise StageError(message)
    with _without_telemetry():
        import openvino

    return openvino


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Hide the package by which OpenVINO reports every import and conversion to its vendor, unless it is in use."""
    if _TELEMETRY in sys.modules:
        yield
        return
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # importing it fails, and OpenVINO does without it
    try:
        yield
    finally:
        del sys.modules[_TELEMETRY]


@contextmanager
def errors_in_one_line(failed: str) -> Iterator[None]:
    """Raise StageError in the place of OpenVINO's exceptions, whose texts have many lines of its sources."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:  # they have no common base class
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if not line.startswith(("Exception from", "Check '"))), "")
        printable = "".join(char if char.isprintable() else " " for char in reason or type(error).__name__)
        raise StageError(f"OpenVINO {failed}: {' '.join(printable.split())[:500]}") from error
