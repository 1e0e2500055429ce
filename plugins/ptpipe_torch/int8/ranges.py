"""The ranges that calibration saw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ptpipe import JSON, Artifact, IntegrityError


@dataclass(frozen=True)
class Ranges(Artifact):
    """For each observed tensor of a prepared model: the least and the greatest value seen."""

    limits: Mapping[str, tuple[float, float]]
    num_samples: int

    def save(self, folder: Path) -> None:
        content = {"limits": {name: list(pair) for name, pair in self.limits.items()}, "num_samples": self.num_samples}
        (folder / "ranges.json").write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            content = json.loads((folder / "ranges.json").read_text(encoding="utf-8"))
            limits = {name: (float(low), float(high)) for name, (low, high) in content["limits"].items()}
            num_samples = content["num_samples"]
            if type(num_samples) is not int:
                raise TypeError("num_samples is not a whole number")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"not a record of ranges: {error!r}") from error
        return cls(limits, num_samples)

    def summary(self) -> dict[str, JSON]:
        return {"num_tensors": len(self.limits), "num_samples": self.num_samples}
