"""What a model said of every sample of a split.

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

_ARRAYS, _FACTS = "predictions.safetensors", "predictions.json"


@dataclass(frozen=True, eq=False)
class Predictions(Artifact):
    """Logits, labels and ids of a split, with the metrics worked out from them. The three are in one order."""

    ids: npt.NDArray[np.str_]
    """(N,) names of the samples, as in the data set."""
    labels_N: npt.NDArray[np.int64]
    logits_NK: npt.NDArray[np.float32]
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    """`num_samples`, `top1`, `top5` (with more than five classes), `loss`; `class_names`; `per_class`, a list of
    {name, precision, recall, support}; `confusion`, rows are labels, columns predictions; and where they are from:
    `data`, `split`, `format`."""

    @property
    def predicted_N(self) -> npt.NDArray[np.int64]:  # noqa: N802  # the shape legend
        """The class of each sample's greatest logit, the first of equals; int64."""
        predicted_N: npt.NDArray[np.int64] = self.logits_NK.argmax(axis=1)
        return predicted_N

    def save(self, folder: Path) -> None:
        """Write the arrays as safetensors, ids and metrics as JSON."""
        import numpy as np
        from safetensors.numpy import save_file

        # safetensors writes the memory of an array as it lies: one in Fortran order would come back scrambled.
        arrays: dict[str, Any] = {
            "labels_N": np.ascontiguousarray(self.labels_N),
            "logits_NK": np.ascontiguousarray(self.logits_NK),
        }
        save_file(arrays, folder / _ARRAYS)
        # JSON keeps ids that are no valid UTF-8 (file names may hold anything) and is as small as padded strings.
        facts = {"ids": self.ids.tolist(), "metrics": dict(self.metrics)}
        (folder / _FACTS).write_text(json.dumps(facts, separators=(",", ":"), allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. Raises IntegrityError where the parts don't belong together."""
        import numpy as np
        from safetensors.numpy import load_file

        arrays = load_file(folder / _ARRAYS)
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        ids = np.array(facts["ids"], dtype=np.str_)
        if not len(ids) == len(arrays["labels_N"]) == len(arrays["logits_NK"]):
            raise IntegrityError(f"{folder}: ids, labels and logits are of different number")
        return cls(ids, arrays["labels_N"], arrays["logits_NK"], facts["metrics"])

    def summary(self) -> dict[str, JSON]:
        """The metrics that are one number or word."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, int | float | str)}
