"""Ranges of activations observed in calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ptpipe import JSON, Artifact, IntegrityError


@dataclass(frozen=True)
class Ranges(Artifact):
    """Minimum and maximum of each observed tensor of a prepared model, by the name of the layer or operator."""

    limits: Mapping[str, tuple[float, float]]
    num_samples: int

    def save(self, folder: Path) -> None:
        content = {"limits": {name: list(pair) for name, pair in self.limits.items()}, "num_samples": self.num_samples}
        (folder / "ranges.json").write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            content = json.loads((folder / "ranges.json").read_text(encoding="utf-8"))
            limits = {name: (float(min_val), float(max_val)) for name, (min_val, max_val) in content["limits"].items()}
            num_samples = content["num_samples"]
            if type(num_samples) is not int:
                raise TypeError("num_samples is not an integer")
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"not a file of ranges: {error!r}") from error
        return cls(limits, num_samples)

    def summary(self) -> dict[str, JSON]:
        return {"num_tensors": len(self.limits), "num_samples": self.num_samples}
