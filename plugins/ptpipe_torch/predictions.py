"""What a model said of every sample of a split.

Shape legend: N samples, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ptpipe import JSON, Artifact

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ARRAYS, _FACTS = "predictions.safetensors", "predictions.json"


@dataclass(frozen=True)
class Predictions(Artifact):
    """Logits, labels and ids of a split, with the metrics worked out from them."""

    ids: npt.NDArray[np.str_]
    labels_N: npt.NDArray[np.int64]
    logits_NK: npt.NDArray[np.float32]
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    """`top1`, `top5`, `loss`, `num_samples`, `per_class`, `confusion` ..."""

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        arrays: dict[str, Any] = {"labels_N": self.labels_N, "logits_NK": self.logits_NK}
        save_file(arrays, folder / _ARRAYS)
        facts = {"ids": self.ids.tolist(), "metrics": dict(self.metrics)}
        (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        import numpy as np
        from safetensors.numpy import load_file

        arrays = load_file(folder / _ARRAYS)
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        return cls(np.array(facts["ids"], dtype=np.str_), arrays["labels_N"], arrays["logits_NK"], facts["metrics"])

    def summary(self) -> dict[str, JSON]:
        return {name: value for name, value in self.metrics.items() if isinstance(value, int | float | str)}
