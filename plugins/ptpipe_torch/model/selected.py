"""A model that was chosen among others, of any format, as an artifact of its own."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ptpipe import JSON, IntegrityError, StageError
from ptpipe_torch.data.raw_form import InputForm
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.model.function_ref import loaded_attribute
from ptpipe_torch.model.signature import Signature

_FILE = "selection.json"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,199}")
_SAVED = {"name": str, "type": str}


@dataclass(frozen=True, eq=False)
class Selected(Deployable):
    """The model that a stage has chosen, under its name in the manifest; it behaves as that model does.

    A gate that chooses none returns an empty one (`Selected()`): no stage gets it, because the gate then refuses, and
    what has been refused is not handed on.
    """

    name: str = ""
    """The chosen model's reference."""
    chosen: Deployable | None = None

    @property
    def model(self) -> Deployable:
        """The chosen model. Raises StageError where none was."""
        if self.chosen is None:
            raise StageError("no model was selected")
        return self.chosen

    @property
    def format(self) -> str:
        return self.model.format

    @property
    def size_bytes(self) -> int:
        return self.model.size_bytes

    @property
    def signature(self) -> Signature:
        return self.model.signature

    @property
    def input_form(self) -> InputForm:
        return self.model.input_form

    def predictor(self, num_threads: int | None = None) -> AbstractContextManager[Predictor]:
        return self.model.predictor(num_threads)

    def save(self, folder: Path) -> None:
        """Write the model to a folder of its name, and the address of its class: deliverables keep their names."""
        content: dict[str, str] = {}
        if self.chosen is not None:
            own = type(self.chosen)
            content = {"name": self.name, "type": f"{own.__module__}:{own.__qualname__}"}
            (folder / self.name).mkdir()
            self.chosen.save(folder / self.name)
        (folder / _FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. Raises IntegrityError where it names no class of a loaded plugin."""
        name, type_ = _saved(folder)
        return cls() if type_ is None else cls(name, type_.load(folder / name))

    def with_options(self, options: Mapping[str, JSON]) -> Self:
        return self if self.chosen is None else replace(self, chosen=self.chosen.with_options(options))

    def with_source_functions(self, functions: Sequence[str]) -> Self:
        return self if self.chosen is None else replace(self, chosen=self.chosen.with_source_functions(functions))

    def summary(self) -> dict[str, JSON]:
        return {} if self.chosen is None else {"selected": self.name, **self.chosen.summary()}

    @classmethod
    def deliverables(cls, folder: Path) -> Iterable[str]:
        name, type_ = _saved(folder)
        return () if type_ is None else tuple(f"{name}/{file}" for file in type_.deliverables(folder / name))


def _saved(folder: Path) -> tuple[str, type[Deployable] | None]:
    """Return the name and the class of a saved model; no class where there is none.

    The class is one of a loaded plugin: what is stored may come from anywhere, and must not choose what is imported.
    """
    try:
        content: Any = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{_FILE} can't be read: {' '.join(str(error).split())[:300]}") from error
    if content == {}:
        return "", None
    if not isinstance(content, dict) or {key: type(value) for key, value in content.items()} != _SAVED:
        raise IntegrityError(f"{_FILE} is not that of a selected model")
    if not _NAME.fullmatch(content["name"]):
        raise IntegrityError(f"{_FILE}: {content['name'][:200]!r} is no model's name")
    found = loaded_attribute(content["type"], "model")
    if not (inspect.isclass(found) and issubclass(found, Deployable) and not inspect.isabstract(found)):
        raise IntegrityError(f"{content['type']} is not a class of models")
    return content["name"], found
