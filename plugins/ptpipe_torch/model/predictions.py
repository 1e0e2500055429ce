"""The predictions of a model for every sample of a split, with metrics.

Shape legend: N samples, K classes of a classification.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, Artifact, IntegrityError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ARRAYS, _METRICS = "predictions.safetensors", "predictions.json"
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
    columns predictions), and the origin: `data`, `split`, `format`."""

    def save(self, folder: Path) -> None:
        """Write the arrays as safetensors, ids and metrics as JSON."""
        import numpy as np
        from safetensors.numpy import save_file

        # safetensors writes an array's memory in its present order: Fortran order would come back scrambled.
        save_file({name: np.ascontiguousarray(array) for name, array in self.arrays.items()}, folder / _ARRAYS)
        # JSON keeps ids that are not valid UTF-8 (file names may be any bytes) and is as small as padded strings.
        content = {"ids": self.ids.tolist(), "metrics": dict(self.metrics)}
        (folder / _METRICS).write_text(json.dumps(content, separators=(",", ":"), allow_nan=False), encoding="utf-8")

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

    def summary(self) -> dict[str, JSON]:
        """The metrics that are single numbers or strings."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, int | float | str)}
