"""What a wrong word may have meant: by its parts, letters and help texts; and what goes by the same name elsewhere."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ptpipe.artifact import JSON
from ptpipe.errors import nearest
from ptpipe.plan.vocabulary import FILE_PREFIX
from ptpipe.stages import Stage

_MAX_LISTED = 3
_MIN_LETTERS = 3
"""Of a word that is looked for in help texts."""


def kind_hint(kind: str, stages: Mapping[str, Stage[..., object]]) -> tuple[str | None, str]:
    """Return the kind of `stages` that an unknown one may have meant, or None; else what to add to the message.

    The parts of its name count first (`quant.qat`: `quant.prepare_qat`), then its letters, those of the family apart,
    then where help texts have the word.
    """
    family, _, thing = kind.partition(".")
    words = {*re.split(r"[._]", kind)}
    alike = [name for name in stages if words <= {*re.split(r"[._]", name)}]
    relatives = {name.partition(".")[2]: name for name in stages if name.startswith(f"{family}.")}
    close = nearest(thing, relatives) if relatives else nearest(kind, stages)
    if len(alike) == 1 or close is not None:
        return (alike[0] if len(alike) == 1 else relatives.get(close or "", close)), ""
    found = alike or _kinds_about(thing, [stages[name] for name in relatives.values()])
    if len(found) == 1:
        return found[0], ""
    if 1 < len(found) <= _MAX_LISTED:
        return None, f"; see {', '.join(found)}"
    return None, f"; `ptpipe stages {family}` lists this family" if relatives else ""


def option_hint(option: str, config_type: Any) -> str | None:
    """Return the option that an unknown one may have meant, or None.

    `config_type`: the options' type. Letters count first, then what an option is by its help: `learning_rate` is `lr`,
    the "peak learning rate".
    """
    fields = config_type.model_fields
    if close := nearest(option, fields):
        return close
    heads = {name: re.split("[;:,]", field.description or "", maxsplit=1)[0] for name, field in fields.items()}
    found = [name for name, head in heads.items() if any(not head[end:] for end in _ends(option, head))]
    return found[0] if len(found) == 1 else None


def _kinds_about(word: str, stages: Iterable[Stage[..., object]]) -> list[str]:
    """Return the kinds whose help has a word: its first line, else the rest, else that of an option."""
    stages = list(stages)
    texts = (
        {stage.kind: stage.help.partition("\n")[0] for stage in stages},
        {stage.kind: stage.help for stage in stages},
        {
            stage.kind: "\n".join(field.description or "" for field in stage.config_type.model_fields.values())
            for stage in stages
        },
    )
    for by_kind in texts:
        if found := [kind for kind, text in by_kind.items() if any(_ends(word, text))]:
            return found
    return []


def _ends(word: str, text: str) -> Iterator[int]:
    """Yield where each occurrence of a word ends, whatever its case, and the spaces and hyphens between its parts."""
    letters = re.sub("[^a-z0-9]", "", word.lower())[:64]
    if len(letters) >= _MIN_LETTERS:
        pattern = rf"(?<![a-z0-9]){'[ _-]?'.join(letters)}(?![a-z0-9])"
        yield from (match.end() for match in re.finditer(pattern, text.lower()))


def same_name_hint(wanted: type, given: Iterable[type]) -> str:
    """Return what to do where a value is of another class of the wanted one's name; else nothing."""
    other = next((each for each in given if each is not wanted and each.__name__ == wanted.__name__), None)
    if other is None:
        return ""
    places = f"{_module_in_words(other)} and of {_module_in_words(wanted)}"
    return f"; there are two classes {wanted.__name__}, of {places}: define it in one module that both import"


def beside_manifest_hint(manifest: Path, options: Mapping[str, JSON], message: str) -> str:
    """Return what to add to a message about a missing file that lies beside the manifest; else nothing.

    `manifest`: its path. `options`: of the stage; one of them is the file, relative to the working directory.
    `message`: names it by its absolute path, or as the option does: a bare word, such as `test`, may be no file there.
    """
    for value in (text for option in options.values() for text in (option if isinstance(option, list) else [option])):
        if isinstance(value, str):
            wanted, there = Path(value).absolute(), manifest.parent / value
            is_bare = value.isidentifier()
            is_named = f"{wanted} " in f"{message} " or (not is_bare and f" {value} " in f" {message} ")
            if is_named and not _exists(wanted) and _exists(there):
                return f"; it lies beside the manifest: run ptpipe in {manifest.parent}, or name it {there}"
    return ""


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - `Path.exists` raises for what can be no file's name


def _module_in_words(type_: type) -> str:
    """Return where a class is. A file that a manifest names is another module than the one that code imports."""
    name = type_.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return f"plugin {Path(file).name}" if name.startswith(FILE_PREFIX) and file else f"module {name}"
