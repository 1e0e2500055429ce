"""The predictions of a model for every sample of a split, with metrics.

Shape legend: N samples, K classes of a classification.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, Artifact, IntegrityError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ARRAYS, _METRICS, _TABLE = "predictions.safetensors", "predictions.json", "predictions.csv"
_COLUMNS = {"labels": "label", "targets": "target", "prediction": "prediction", "score": "score"}
"""Of the table, by the name of the array."""
_MAX_PROBABILITIES = 100
"""Classes that the table has a column for each of."""
_LOWEST_SCORE = -700.0
"""The exponential of more than 709 is infinite."""
_PART_ROWS = 1024
_MAX_ID_BYTES = 4 << 30
"""Of all ids as an array, where each takes as much as the longest: one long id among many short ones is a bomb."""


@dataclass(frozen=True, eq=False)
class Predictions(Artifact):
    """What the task keeps of each sample of a split, with ids, and the metrics computed from all of them."""

    ids: npt.NDArray[np.str_]
    """(N,) names of the samples, as in the data set."""
    arrays: Mapping[str, npt.NDArray[Any]]
    """With N rows, in the order of the ids: `prediction`, `score` (higher is better) and what else the task keeps; of a
    classification `labels`, int64 (N,), and `logits`, float32 (N, K)."""
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    """`num_samples`, the task's figures (of a classification `accuracy`, `top5_accuracy` with more than five classes,
    `loss`; `class_names`; `per_class`, a list of {name, precision, recall, support}; `confusion`, rows are labels,
    columns predictions), the origin: `data`, `split`, `format`; `probabilities`: `softmax` or `sigmoid` of which
    arrays, by name."""

    def save(self, folder: Path) -> None:
        """Write the arrays as safetensors, ids and metrics as JSON, and as CSV what other programs read of them."""
        import numpy as np
        from safetensors.numpy import save_file

        # safetensors writes an array's memory in its present order: Fortran order would come back scrambled.
        save_file({name: np.ascontiguousarray(array) for name, array in self.arrays.items()}, folder / _ARRAYS)
        # JSON keeps ids that are not valid UTF-8 (file names may be any bytes) and is as small as padded strings.
        content = {"ids": self.ids.tolist(), "metrics": dict(self.metrics)}
        (folder / _METRICS).write_text(json.dumps(content, separators=(",", ":"), allow_nan=False), encoding="utf-8")
        if (columns := self._columns()) is not None:
            self._write_table(columns, folder / _TABLE)

    def _write_table(self, columns: Mapping[str, list[Any]], path: Path) -> None:
        scores = self._scores
        names = [] if scores is None else [f"probability_{name}" for name in self._names]
        if len(names) == 1:
            names = ["probability"]
        # An id that is no UTF-8 is shown with escapes.
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(["id", *columns, *names])
            writer = csv.writer(file, lineterminator="")
            for start in range(0, len(self.ids), _PART_ROWS):
                rows = slice(start, start + _PART_ROWS)
                cells = zip(self.ids[rows].tolist(), *(of[rows] for of in columns.values()), strict=True)
                ends = repeat("\n") if scores is None else self._probabilities(scores, rows)
                for row, end in zip(cells, ends, strict=False):
                    writer.writerow(row)
                    file.write(end)

    def _columns(self) -> dict[str, list[Any]] | None:
        """Return what is known and predicted of each sample; None where that is more than a few named numbers."""
        columns: dict[str, list[Any]] = {}
        for name, column in _COLUMNS.items():
            array = self.arrays.get(name)
            if array is None:
                continue
            if array.ndim == 1:
                columns[column] = self._cells(array)
            elif array.shape[1:] == (len(self._parts),):
                parts = [f"{column}_{part}" for part in self._parts] if len(self._parts) > 1 else [column]
                columns |= {part: self._cells(array[:, number]) for number, part in enumerate(parts)}
            else:
                return None
        return columns if "prediction" in self.arrays else None

    @property
    def _parts(self) -> list[str]:
        """The names of the labels or targets that each sample has."""
        rows = self.metrics.get("per_label", self.metrics.get("per_target"))
        return [str(row["name"]) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @property
    def _scores(self) -> tuple[str, str] | None:
        """The array that the probabilities of the table are made of, and the function; None where it has none."""
        functions = self.metrics.get("probabilities")
        for name, function in functions.items() if isinstance(functions, dict) else ():
            array = self.arrays.get(name)
            is_listed = array is not None and array.shape[1:] == (len(self._names),)
            if is_listed and len(self._names) <= _MAX_PROBABILITIES:
                return name, str(function)
        return None

    def _probabilities(self, scores: tuple[str, str], rows: slice) -> Iterable[str]:
        """Return the ends of the rows' lines. `scores`: an array and what makes probabilities of it."""
        import numpy as np

        name, function = scores
        values_BK = self.arrays[name][rows].astype(np.float64)
        if function == "softmax":
            exponentials_BK = np.exp(values_BK - values_BK.max(axis=1, keepdims=True))
            probabilities_BK = exponentials_BK / exponentials_BK.sum(axis=1, keepdims=True)
        else:
            probabilities_BK = 1 / (1 + np.exp(-np.maximum(values_BK, _LOWEST_SCORE)))
        form = ",%.7g" * values_BK.shape[1] + "\n"  # a cell at a time takes twice as long
        return (form % tuple(row) for row in probabilities_BK.tolist())

    @property
    def _names(self) -> list[str]:
        """The names of the classes, labels or targets."""
        names = self.metrics.get("class_names")
        return list(map(str, names)) if isinstance(names, list) else self._parts

    def _cells(self, array_N: npt.NDArray[Any]) -> list[Any]:
        """Return a column's values: names of classes, and the shortest decimals that give a float back."""
        names = self.metrics.get("class_names")
        if isinstance(names, list) and array_N.dtype.kind == "i":
            return [names[number] for number in array_N.tolist()]
        return [str(number) for number in array_N] if array_N.dtype.kind == "f" else array_N.tolist()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. Raises IntegrityError for anything else."""
        import numpy as np
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(folder / _ARRAYS)
            content = json.loads((folder / _METRICS).read_text(encoding="utf-8"))
            metrics = dict(content["metrics"])
            if 4 * len(content["ids"]) * max(map(len, content["ids"]), default=0) > _MAX_ID_BYTES:
                raise ValueError("the ids are too long")
            ids = np.array(content["ids"], dtype=np.str_)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"not stored predictions: {' '.join(str(error).split())[:300]}") from error
        for name, array in arrays.items():
            if array.shape[:1] != (len(ids),):
                raise IntegrityError(f"{folder}: {name} has the shape {array.shape} for {len(ids)} samples")
        return cls(ids, arrays, metrics)

    @classmethod
    def deliverables(cls, folder: Path) -> Iterable[str]:
        """The table; where what is predicted fits none, as tags of tokens don't, arrays, and ids with metrics."""
        return [_TABLE] if (folder / _TABLE).exists() else [_ARRAYS, _METRICS]

    def summary(self) -> dict[str, JSON]:
        """The metrics that are single numbers or strings."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, int | float | str)}
