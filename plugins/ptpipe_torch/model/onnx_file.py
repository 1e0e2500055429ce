"""An ONNX file as an artifact, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, IntegrityError, StageError, host
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.runtime import released_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MODEL, _INFO = "model.onnx", "info.json"


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
                logits_NK: npt.NDArray[np.float32] = sessions[0].run(outputs, {inputs[0]: images_NCHW})[0]
                return logits_NK

            try:
                yield predict
            finally:
                sessions.clear()  # the caller may keep `predict`, which would keep the weights

    def save(self, folder: Path) -> None:
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
        """Read back what `save` wrote. Raises IntegrityError where `info.json` is damaged."""
        try:
            info = json.loads((folder / _INFO).read_text(encoding="utf-8"))
            channels, height, width = info.pop("input_shape_CHW")
            return cls(folder / _MODEL, (channels, height, width), **info)
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(f"{_INFO} can't be read: {error!r}") from error

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        return (_MODEL,)

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes, "parity": dict(self.parity)}


def _session(path: Path, num_threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors are raised; its warnings are about its own optimizations
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base class
        reason = str(error).strip().partition("\n")[0]
        raise StageError(f"ONNX Runtime can't run {path.name}: {reason}") from error
