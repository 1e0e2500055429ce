"""What reports show of each model of a comparison beside its figures: tables, losses and predictions of the samples.

No gate reads them. Shape legend: N samples, M models, T numbers of a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ptpipe import JSON, IntegrityError

_ARRAYS, _TABLES = "details.safetensors", "details.json"
_MAX_TABLE_BYTES = 200_000
"""Of each table of a model: a confusion matrix of 200 classes."""
_MAX_NUMBERS = 1_000_000
_MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class ModelDetails:
    """Of one model."""

    tables: Mapping[str, JSON] = field(default_factory=dict)
    """The figures of the task that are lists, by name: `confusion`, `per_class`."""
    losses_N: npt.NDArray[np.float32] | None = None
    classes_N: npt.NDArray[np.int32] | None = None
    """Of each sample, the predicted class; None where predictions are no classes."""
    numbers_NT: npt.NDArray[np.float32] | None = None
    """Of each sample, the predicted numbers; None where predictions are none, or too many."""


@dataclass(frozen=True, eq=False)
class Details:
    """Of all models, in the order of the rows of a comparison."""

    models: tuple[ModelDetails, ...]
    targets_NT: npt.NDArray[np.float32] | None = None
    """What the predicted numbers should be."""

    def save(self, folder: Path) -> None:
        """Write arrays as safetensors, tables as JSON."""
        from safetensors.numpy import save_file

        arrays = {} if self.targets_NT is None else {"targets": np.ascontiguousarray(self.targets_NT)}
        for number, model in enumerate(self.models):
            found = {"losses": model.losses_N, "classes": model.classes_N, "numbers": model.numbers_NT}
            arrays |= {f"{name}.{number}": np.ascontiguousarray(of) for name, of in found.items() if of is not None}
        save_file(arrays, folder / _ARRAYS)
        text = json.dumps([dict(model.tables) for model in self.models], separators=(",", ":"), allow_nan=False)
        (folder / _TABLES).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, num_models: int, num_samples: int) -> Self | None:
        """Read what `save` wrote; None where it wrote nothing. Raises IntegrityError for anything else."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        if not (folder / _TABLES).exists():
            return None
        try:
            for name in (_ARRAYS, _TABLES):
                if (folder / name).stat().st_size > _MAX_FILE_BYTES:
                    raise ValueError(f"{name} is too large")
            tables = json.loads((folder / _TABLES).read_text(encoding="utf-8"))
            arrays = load_file(folder / _ARRAYS)
            _check(tables, arrays, num_models, num_samples)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:300]
            raise IntegrityError(f"not the details of a comparison: {reason}") from error
        models = (
            ModelDetails(own, *(arrays.get(f"{name}.{number}") for name in ("losses", "classes", "numbers")))
            for number, own in enumerate(tables)
        )
        return cls(tuple(models), arrays.get("targets"))


def tables_of(figures: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the figures that are lists, without long ones and those that are not finite."""
    found: dict[str, JSON] = {}
    for name, value in figures.items():
        if isinstance(value, list):
            try:
                size = len(json.dumps(value, allow_nan=False))
            except ValueError:
                continue
            if size <= _MAX_TABLE_BYTES:
                found[name] = value
    return found


def numbers_of(parts: Sequence[npt.NDArray[Any]], num_samples: int) -> npt.NDArray[np.float32] | None:
    """Return batches of predicted or wanted numbers as one array, (N, T); None where there are too many."""
    if not parts or parts[0].ndim > 2 or parts[0].size / max(1, len(parts[0])) * num_samples > _MAX_NUMBERS:
        return None
    return np.concatenate(parts).reshape(num_samples, -1).astype(np.float32)


def _check(tables: Any, arrays: Mapping[str, npt.NDArray[Any]], num_models: int, num_samples: int) -> None:
    if not isinstance(tables, list) or len(tables) != num_models or not all(isinstance(of, dict) for of in tables):
        raise ValueError(f"tables of {num_models} models are missing")
    dtypes = {"losses": np.float32, "classes": np.int32, "numbers": np.float32, "targets": np.float32}
    for name, array in arrays.items():
        kind = name.partition(".")[0]
        is_flat = kind in ("losses", "classes")
        if array.dtype != dtypes[kind] or array.shape[:1] != (num_samples,) or array.ndim != (1 if is_flat else 2):
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape} for {num_samples} samples")
