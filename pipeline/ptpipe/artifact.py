"""Artifacts: typed values that stages exchange through the store, saved to folders."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self, TypeAlias

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class Artifact(ABC):
    """A value that a stage returns and others take as input. It goes through the store, as files.

    A subclass must be importable without heavy libraries (import torch inside its methods), because binding a manifest
    needs only the class. The class in a stage's return annotation loads what that stage saved: `load(save(x))` must
    equal `x`, and saving it again must write the same bytes.
    """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the value to `folder`, which is empty. Regular files and folders only; no links, no pickles."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote. `folder` is read-only and outlives the returned value, which may map its files."""

    def with_options(self, options: Mapping[str, JSON]) -> Self:
        """Return the value with options applied that say how to use it and change nothing in it; by default ignored.

        `options`: by name, the `unkeyed_options` of the stage that the value is an output of, and of the stages above
        it. They are not saved with the value, because a cached one must follow the present manifest's.
        """
        return self

    def with_source_functions(self, functions: Sequence[str]) -> Self:
        """Return the value, which may call these functions of the user's and no others; by default ignored.

        `functions`: `/home/me/mine.py:make_net`, those that the stage which the value is an output of, and the stages
        above it, name by `source_functions`. They are not saved with the value: what is stored may come from anywhere,
        and must not choose what runs.
        """
        return self

    def summary(self) -> dict[str, JSON]:
        """Return a few facts for listings and reports, as JSON."""
        return {}

    @classmethod
    def deliverables(cls, folder: Path) -> Iterable[str]:
        """Name the files to ship, relative to `folder`, which holds what `save` wrote; by default none.

        A run places them in its own folder under the stage's name: `runs/<id>/onnx/model.onnx`. Called for each stage
        of every run, cached ones too: look at names, not into large files.
        """
        return ()


class Decision(StrEnum):
    """The decision of a gate."""

    PASSED = "passed"
    REFUSED = "refused"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict(Artifact):
    """The result of a gate: a stage with a Verdict among its outputs is one.

    `REFUSED` ends the run with exit code 3 after the other stages are done, `UNDECIDED` with 4 where `fail_undecided`
    says so. Further outputs of the gate, a model that it guards, are then given to no stage: those that need one are
    skipped.
    """

    decision: Decision
    reason: str
    """One line for the user."""
    facts: Mapping[str, JSON] = field(default_factory=dict)
    """What the decision is based on, for reports."""
    fail_undecided: bool = False
    """Whether `UNDECIDED` ends the run with exit code 4; otherwise it passes."""

    def __post_init__(self) -> None:
        for name, type_ in (("decision", Decision), ("reason", str), ("facts", Mapping), ("fail_undecided", bool)):
            if not isinstance(value := getattr(self, name), type_):
                raise TypeError(f"a verdict's {name} is a {type_.__name__}, not {value!r:.80}")

    def save(self, folder: Path) -> None:
        (folder / "verdict.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        content = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
        return cls(**content | {"decision": Decision(content["decision"])})

    def summary(self) -> dict[str, JSON]:
        return {**self.facts, **self.judgement()}  # in this order: a fact called `decision` must not decide

    def judgement(self) -> dict[str, JSON]:
        """Return the fields that decide how the run ends; the summary of a subclass must contain them."""
        return {"decision": str(self.decision), "reason": self.reason, "fail_undecided": self.fail_undecided}
