"""An ONNX file with what is needed to run it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ptpipe import JSON
from ptpipe_torch.deployable import Deployable, Predictor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MODEL, _FACTS = "model.onnx", "facts.json"


@dataclass(frozen=True)
class OnnxFile(Deployable):
    """One self-contained `.onnx` file: input `images` (N, C, H, W) float32, output `logits` (N, K), N dynamic."""

    path: Path
    input_shape_CHW: tuple[int, int, int]  # type: ignore[assignment]  # a field in place of the property
    num_classes: int  # type: ignore[assignment]
    precision: str = "float32"
    """`float32`, `int8` or `int8 dynamic`."""
    parity: Mapping[str, JSON] = field(default_factory=dict)
    """How its outputs compared with the torch model's when it was written."""

    @property
    def format(self) -> str:
        return f"onnx {self.precision}"

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        import os

        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads or len(os.sched_getaffinity(0))
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        (input_,) = session.get_inputs()
        (output,) = session.get_outputs()

        def predict(images_NCHW: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            logits_NK: npt.NDArray[np.float32] = session.run([output.name], {input_.name: images_NCHW})[0]
            return logits_NK

        yield predict

    def save(self, folder: Path) -> None:
        shutil.copyfile(self.path, folder / _MODEL)
        facts = {
            "input_shape_CHW": self.input_shape_CHW,
            "num_classes": self.num_classes,
            "precision": self.precision,
            "parity": dict(self.parity),
        }
        (folder / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        return cls(folder / _MODEL, **facts | {"input_shape_CHW": tuple(facts["input_shape_CHW"])})

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes, "parity": dict(self.parity)}
