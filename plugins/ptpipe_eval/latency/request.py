"""What is to be measured, as the session sends it to the server. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ptpipe import NamedCode


@dataclass(frozen=True)
class StoredModel:
    """A model in a folder, and the class that loads it."""

    name: str
    module: str
    type: str
    folder: str
    input_form: str
    """What it predicts from."""


@dataclass(frozen=True)
class CellInputs:
    """What the models predict in one cell, whatever the number of threads."""

    batch_size: int
    length: int | None
    """Of the sequences; None: that of the data set's own samples."""
    files: Mapping[str, Sequence[str]]
    """One for each batch, by the form of its inputs."""


@dataclass(frozen=True)
class Request:
    """The models, and at which numbers of threads and sizes of inputs they are measured."""

    models: tuple[StoredModel, ...]
    baseline: int
    """Position of the model that the others are compared with."""
    inputs: tuple[CellInputs, ...]
    threads: tuple[int, ...]
    """Numbers of threads."""
    budget_s: float
    """After it no further workers are started."""
    precision: float
    """Half the width of a ratio's interval, relative, at which measuring ends."""
    seed: int
    code: NamedCode
    libraries: tuple[str, ...]
    """To import before workers are forked: else each of them would."""

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`."""
        content: dict[str, Any] = json.loads(text)
        code = content["code"]
        changed: dict[str, Any] = {name: tuple(content[name]) for name in ("threads", "libraries")}
        changed["code"] = NamedCode(tuple(code["plugins"]), code["folder"], tuple(code["source_functions"]))
        changed["models"] = tuple(StoredModel(**model) for model in content["models"])
        changed["inputs"] = tuple(CellInputs(**own) for own in content["inputs"])
        return cls(**{**content, **changed})
