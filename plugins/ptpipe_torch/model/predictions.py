"""The predictions of a model for every sample of a split, with metrics.

Shape legend: N samples, K classes.
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
    """Logits, labels and ids of a split, all in one order, with the metrics computed from them."""

    ids: npt.NDArray[np.str_]
    """(N,) names of the samples, as in the data set."""
    labels_N: npt.NDArray[np.int64]
    logits_NK: npt.NDArray[np.float32]
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    """`num_samples`, `top1`, `top5` (with more than five classes), `loss`; `class_names`; `per_class`, a list of
    {name, precision, recall, support}; `confusion`, rows are labels, columns predictions; and the
    origin: `data`, `split`, `format`."""

    @property
    def predicted_N(self) -> npt.NDArray[np.int64]:  # noqa: N802  # the shape legend
        """(N,) int64: the class of each sample's maximum logit, the first of equals."""
        predicted_N: npt.NDArray[np.int64] = self.logits_NK.argmax(axis=1)
        return predicted_N

    def save(self, folder: Path) -> None:
        """Write the arrays as safetensors, ids and metrics as JSON."""
        import numpy as np
        from safetensors.numpy import save_file

        # safetensors writes an array's memory in its present order: Fortran order would come back scrambled.
        arrays: dict[str, Any] = {
            "labels_N": np.ascontiguousarray(self.labels_N),
            "logits_NK": np.ascontiguousarray(self.logits_NK),
        }
        save_file(arrays, folder / _ARRAYS)
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
            labels_N, logits_NK, metrics = arrays["labels_N"], arrays["logits_NK"], dict(content["metrics"])
            if 4 * len(content["ids"]) * max(map(len, content["ids"]), default=0) > _MAX_ID_BYTES:
                raise ValueError("the ids are too long")
            ids = np.array(content["ids"], dtype=np.str_)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"not stored predictions: {' '.join(str(error).split())[:300]}") from error
        if not (len(ids),) == labels_N.shape == logits_NK.shape[:1] or logits_NK.ndim != 2:
            raise IntegrityError(f"{folder}: ids, labels and logits differ in number")
        return cls(ids, labels_N, logits_NK, metrics)

    def summary(self) -> dict[str, JSON]:
        """The metrics that are single numbers or strings."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, int | float | str)}
