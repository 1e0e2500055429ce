"""An ExecuTorch program as an artifact, run by ExecuTorch on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, JsonValue

from ptpipe import JSON, IntegrityError, StageError, host
from ptpipe_torch import Deployable, Predictor, Signature, released_memory
from ptpipe_torch.model.deployable import check_output

if TYPE_CHECKING:
    import numpy.typing as npt

PROGRAM, _INFO = "model.pte", "info.json"


class ExecuTorchModel(Deployable):
    """One `.pte` file. Immutable.

    `precision`: `float32`, `int8` or `int8 dynamic`. `outputs`: the names of its outputs, in its order.
    `max_batch_size`: of the batches that it takes; larger ones are predicted in pieces.
    """

    def __init__(
        self, path: Path, signature: Signature, precision: str, outputs: Sequence[str], max_batch_size: int
    ) -> None:
        self.path, self._signature, self.precision = path, signature, precision
        self.outputs, self.max_batch_size = tuple(outputs), max_batch_size

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def format(self) -> str:
        return f"executorch {self.precision}"

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        if message := missing_executorch():
            raise StageError(message)
        from ptpipe_executorch.xnnpack import open_program

        def predict(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
            import numpy as np

            arrays = [inputs[name] for name in names]
            num_samples, size = len(arrays[0]), self.max_batch_size
            pieces = [run([array[start : start + size] for array in arrays]) for start in range(0, num_samples, size)]
            whole = pieces[0] if len(pieces) == 1 else [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
            return self._checked(whole, num_samples)

        names = [spec.name for spec in self.signature.inputs]
        with released_memory(), open_program(self.path, names, num_threads or host.num_threads()) as run:
            yield predict

    def _checked(self, arrays: Sequence[npt.NDArray[Any]], num_samples: int) -> dict[str, npt.NDArray[Any]]:
        found = dict(zip(self.outputs, arrays, strict=True))
        for spec in self.signature.outputs:
            check_output(self.path.name, spec, found[spec.name], num_samples)
        return {spec.name: found[spec.name] for spec in self.signature.outputs}

    def save(self, folder: Path) -> None:
        shutil.copyfile(self.path, folder / PROGRAM)
        info = {
            "signature": self.signature.to_json(),
            "precision": self.precision,
            "outputs": list(self.outputs),
            "max_batch_size": self.max_batch_size,
        }
        (folder / _INFO).write_text(json.dumps(info, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. Raises IntegrityError where `info.json` is damaged."""
        try:
            info = _Info.model_validate_json((folder / _INFO).read_bytes())
            signature = Signature.from_json(info.signature)
            if sorted(info.outputs) != sorted(spec.name for spec in signature.outputs) or info.max_batch_size < 1:
                raise ValueError("outputs or max_batch_size don't fit the signature")
            return cls(folder / PROGRAM, signature, info.precision, info.outputs, info.max_batch_size)
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{_INFO} can't be read: {' '.join(str(error).split())[:300]}") from error

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        return (PROGRAM,)

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes}


class _Info(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    signature: dict[str, JsonValue]
    precision: str
    outputs: list[str]
    max_batch_size: int


def missing_executorch() -> str | None:
    """Return what to install where ExecuTorch is missing; else None."""
    from importlib.util import find_spec

    found = find_spec("executorch") is not None
    return None if found else "ExecuTorch is not installed: pip install 'ptpipe[executorch]'"
