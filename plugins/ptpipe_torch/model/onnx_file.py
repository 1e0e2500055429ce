"""An ONNX file as an artifact, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, JsonValue, PositiveInt

from ptpipe import JSON, IntegrityError, StageError, host
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.model.onnx_bytes import is_self_contained
from ptpipe_torch.runtime import released_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MODEL, _INFO = "model.onnx", "info.json"
_FATAL = 4


class OnnxFile(Deployable):
    """One self-contained `.onnx` file: input `images` (N, C, H, W) float32, output `logits` (N, K), N dynamic.

    Immutable. `precision`: `float32`, `int8` or `int8 dynamic`. `parity`: how its logits compared with the torch
    model's when it was written.
    """

    def __init__(
        self,
        path: Path,
        input_shape_CHW: tuple[int, int, int],
        num_classes: int,
        precision: str = "float32",
        parity: Mapping[str, JSON] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self._input_shape_CHW, self._num_classes = input_shape_CHW, num_classes
        self.precision = precision
        self.parity = parity

    @property
    def input_shape_CHW(self) -> tuple[int, int, int]:  # noqa: N802
        return self._input_shape_CHW

    @property
    def num_classes(self) -> int:
        return self._num_classes

    @property
    def format(self) -> str:
        return f"onnx {self.precision}"

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        with released_memory():
            sessions = [_session(self.path, num_threads or host.num_threads())]
            inputs = [value.name for value in sessions[0].get_inputs()]
            outputs = [value.name for value in sessions[0].get_outputs()]
            if len(inputs) != 1 or len(outputs) != 1:
                raise StageError(
                    f"{self.path.name} has {len(inputs)} inputs and {len(outputs)} outputs; it must have one of each"
                )

            def predict(images_NCHW: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
                with _one_line_errors(self.path):
                    logits_NK: npt.NDArray[np.float32] = sessions[0].run(outputs, {inputs[0]: images_NCHW})[0]
                shape = (len(images_NCHW), self.num_classes)
                if getattr(logits_NK, "shape", None) != shape or logits_NK.dtype != "float32":
                    raise StageError(f"{self.path.name} returned something other than float32 logits of shape {shape}")
                return logits_NK

            try:
                yield predict
            finally:
                sessions.clear()  # the caller may keep `predict`, which would keep the weights

    def save(self, folder: Path) -> None:
        """Copy the file. Raises StageError where it refers to others, which would be missing beside the copy."""
        _check_self_contained(self.path)
        shutil.copyfile(self.path, folder / _MODEL)
        info = {
            "input_shape_CHW": self.input_shape_CHW,
            "num_classes": self.num_classes,
            "precision": self.precision,
            "parity": dict(self.parity),
        }
        (folder / _INFO).write_text(json.dumps(info, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. Raises IntegrityError where `info.json` is damaged or `model.onnx` altered."""
        try:
            info = _Info.model_validate_json((folder / _INFO).read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise IntegrityError(f"{_INFO} can't be read: {' '.join(str(error).split())[:300]}") from error
        try:
            _check_self_contained(folder / _MODEL)
        except StageError as error:
            raise IntegrityError(str(error)) from error
        return cls(folder / _MODEL, info.input_shape_CHW, info.num_classes, info.precision, info.parity)

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        return (_MODEL,)

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes, "parity": dict(self.parity)}


class _Info(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    input_shape_CHW: tuple[PositiveInt, PositiveInt, PositiveInt]
    num_classes: PositiveInt
    precision: str = "float32"
    parity: dict[str, JsonValue] = {}


def session_options(num_threads: int) -> Any:
    """Return the options of every session: nothing is logged to the terminal, since all errors are raised."""
    import onnxruntime as ort

    ort.set_default_logger_severity(_FATAL)  # its allocators log there, whatever the session's options are
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _FATAL
    return options


def _session(path: Path, num_threads: int) -> Any:
    import onnxruntime as ort

    _check_self_contained(path)
    with _one_line_errors(path), redirect_stdout(None):  # for some files it prints that it tries again
        return ort.InferenceSession(str(path), session_options(num_threads), providers=["CPUExecutionProvider"])


def _check_self_contained(path: Path) -> None:
    with _one_line_errors(path):
        if is_self_contained(path):
            return
    raise StageError(
        f"{path.name} keeps tensors in other files, which are not read: write them into it "
        "(onnx.save_model(onnx.load(PATH), PATH))"
    )


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        # The file decides what an error quotes: names with newlines, escapes, of any length.
        reason = "".join(char if char.isprintable() else " " for char in str(error))
        raise StageError(f"ONNX Runtime can't run {path.name}: {' '.join(reason.split())[:500]}") from error
