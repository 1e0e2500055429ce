"""Typed values that write themselves to a folder and read themselves back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self, TypeAlias

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class Artifact(ABC):
    """A value that stages hand on to each other through the store.

    A subclass must be importable without heavy libraries (import torch inside its methods): binding
    a manifest looks only at the class. The class named by a stage's return annotation reads back what
    that stage wrote.
    """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write everything into an empty folder. Plain files and folders only; no links, no pickles."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. The folder is read-only and outlives the returned value."""

    def summary(self) -> dict[str, JSON]:
        """A few facts for listings and reports; small, JSON-able."""
        return {}

    @classmethod
    def deliverables(cls, folder: Path) -> Iterable[str]:
        """Name the files to ship, relative to `folder`, which holds what `save` wrote; by default none.

        A run places them in its own folder under the stage's name: `runs/<id>/onnx/model.onnx`. Called for each stage
        of every run, cached ones too: look at names, not into large files.
        """
        return ()


class Decision(StrEnum):
    """What a gate said."""

    PASSED = "passed"
    REFUSED = "refused"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict(Artifact):
    """A gate's answer. A stage whose output is a Verdict is a gate.

    `REFUSED` ends the run with exit code 3 after the other stages are done. `UNDECIDED` ends it with exit
    code 4 where `fail_undecided` is set, and passes otherwise.
    """

    decision: Decision
    reason: str
    facts: Mapping[str, JSON] = field(default_factory=dict)
    fail_undecided: bool = False

    def save(self, folder: Path) -> None:
        (folder / "verdict.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        content = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
        return cls(**content | {"decision": Decision(content["decision"])})

    def summary(self) -> dict[str, JSON]:
        return {**self.facts, **self.judgement()}  # a fact that is called `decision` doesn't decide

    def judgement(self) -> dict[str, JSON]:
        """What decides how the run ends; a subclass's summary must have it too."""
        return {"decision": str(self.decision), "reason": self.reason, "fail_undecided": self.fail_undecided}
