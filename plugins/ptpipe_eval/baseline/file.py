"""The file of an accepted model: its metrics, and what it made of every sample, as JSON. Needs numpy.

Samples are in the order of their ids, so that pairing by id needs their digest alone; ids are not in the file.

Shape legend: N samples.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from ptpipe import IntegrityError, UsageError, write_atomically

_FORMAT = 1
_MAX_BYTES = 64 << 20
"""Of a file: 10 million samples and a few metrics."""
_DIGEST = r"[0-9a-f]{64}"

Digest = Annotated[str, Field(pattern=f"^{_DIGEST}$")]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class AcceptedModel(_Facts):
    """The model."""

    name: Name
    """In the manifest of its run."""
    format: str
    digest: Digest
    """Of the stored artifact."""
    size_bytes: int = Field(ge=0)


class SampleSet(_Facts):
    """The samples that it was evaluated on."""

    name: Name
    split: str
    digest: Digest
    """Of the stored data set."""
    num_samples: int = Field(ge=1)
    ids_sha256: Digest
    """Of the sorted ids."""
    targets_sha256: Digest | None = None
    """Of the targets in their order; None: not known."""


class AcceptedMetric(_Facts):
    """A metric, and what it is computed from."""

    name: Name
    higher_is_better: bool
    is_fraction: bool
    value: float
    right: str | None = None
    """Which samples are right, a bit each, in base64; where the metric is their fraction."""
    scores: str | None = None
    """The contribution of each sample, float16, in base64; where the metric is their mean."""


class AcceptedRun(_Facts):
    """Where it comes from."""

    id: str
    manifest: str
    stage: str
    """The comparison's."""
    seed: int
    measured_at: str


class Baseline(_Facts):
    """A model that was accepted, as its file has it."""

    ptpipe_baseline: Literal[1] = 1
    accepted_at: str
    """ISO 8601, UTC."""
    model: AcceptedModel
    data: SampleSet
    metrics: tuple[AcceptedMetric, ...] = Field(min_length=1)
    run: AcceptedRun
    environment: dict[str, JsonValue]
    """Versions and machine that the comparison was measured with."""

    @model_validator(mode="after")
    def _has_all_samples(self) -> Self:
        for metric in self.metrics:
            right_bytes, score_bytes = (self.data.num_samples + 7) // 8, 2 * self.data.num_samples
            for text, num_bytes in ((metric.right, right_bytes), (metric.scores, score_bytes)):
                if text is not None and len(b64decode(text, validate=True)) != num_bytes:
                    raise ValueError(f"{metric.name}: not the values of {self.data.num_samples} samples")
        if not all(np.isfinite(scores_N).all() for scores_N in self.scores.values()):
            raise ValueError("a score is not finite")
        return self

    @property
    def right(self) -> dict[str, npt.NDArray[np.bool_]]:
        """Which samples are right, (N,), in the order of their ids, for each metric that is their fraction."""
        return {
            metric.name: np.unpackbits(
                np.frombuffer(b64decode(metric.right), np.uint8), count=self.data.num_samples
            ).astype(bool)
            for metric in self.metrics
            if metric.right is not None
        }

    @property
    def scores(self) -> dict[str, npt.NDArray[np.float16]]:
        """The contribution of each sample, (N,), in the order of their ids, for each metric that is their mean."""
        return {
            metric.name: np.frombuffer(b64decode(metric.scores), "<f2")
            for metric in self.metrics
            if metric.scores is not None
        }

    def write(self, path: Path) -> None:
        """Replace the file. The digest of the content is its last member."""
        content = self.model_dump(mode="json", exclude_none=True)
        content["sha256"] = _digest(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises UsageError where there is none, or another one; IntegrityError where it was altered."""
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise UsageError(f"cannot read the baseline {path}: {error.strerror or error}") from error
        try:
            content: Any = json.loads(text) if len(text) <= _MAX_BYTES else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or "ptpipe_baseline" not in content:
            raise UsageError(f"{path} is no baseline: `ptpipe baseline accept` writes one")
        if content["ptpipe_baseline"] != _FORMAT:
            raise UsageError(f"{path} was written by another version of ptpipe: accept a model again")
        if content.pop("sha256", None) != _digest(content):
            raise IntegrityError(f"{path} was altered: accept a model again, or take the file from your repository")
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            reason = " ".join(str(error.errors(include_url=False)[0]["msg"]).split())[:200]
            raise IntegrityError(f"{path} is no baseline: {reason}") from error


@dataclass(frozen=True)
class Order:
    """The order of samples in a file: that of their ids."""

    positions_N: npt.NDArray[np.int64]
    ids_sha256: str

    @classmethod
    def of(cls, ids: Sequence[str]) -> Order:
        """Sort ids. Raises UsageError where they are not unique, or there are none."""
        if not ids:
            raise UsageError("the comparison has no samples")
        positions = sorted(range(len(ids)), key=ids.__getitem__)
        ordered = [ids[position] for position in positions]
        if len(set(ids)) < len(ids):
            raise UsageError("several samples have the same id, so they can't be compared with others by it")
        digest = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
        return cls(np.array(positions, dtype=np.int64), digest)


def packed_bits(right_N: npt.NDArray[np.bool_]) -> str:
    """Return a bit for each sample as base64."""
    return b64encode(np.packbits(right_N).tobytes()).decode()


def packed_scores(scores_N: npt.NDArray[np.float16]) -> str:
    """Return two bytes for each sample as base64."""
    return b64encode(scores_N.astype("<f2").tobytes()).decode()


def _digest(content: Mapping[str, Any]) -> str:
    """Return the digest of the values, however the file is laid out: version control may change the ends of lines."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
