"""Plugins' errors in words, and the lines of their code that these came through."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from ptpipe import hookspecs
from ptpipe.plan.module_files import is_in_site_packages
from ptpipe.printable import first_line

if TYPE_CHECKING:
    from ptpipe.plan.vocabulary import Plugin


def describe_error(error: BaseException) -> str:
    """Return a plugin's error in one line, with the line of the plugin's code that raised it."""
    text = first_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg or text} ({Path(error.filename).name}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    inside = [frame for frame in frames if Path(frame.filename).is_relative_to(Path(frames[0].filename).parent)]
    place = f" ({Path(inside[-1].filename).name}:{inside[-1].lineno})" if inside else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def own_frames(
    plugins: Sequence[Plugin], error: BaseException, folders: Collection[Path] = (), message: str = ""
) -> tuple[str, ...]:
    """Return a traceback's lines in the plugins' code, outermost first: `prune.py:12 in prune: 1 / 0`.

    Those of built-in plugins are left out where code of others follows, hooks that wrap what failed, and lines that
    `message` names. `folders`: others whose files count.
    """
    built_in = {package_folder(plugin.module) for plugin in plugins if plugin.is_built_in}
    packages = {package_folder(plugin.module) for plugin in plugins}
    beside = {Path(plugin.module.__file__).parent for plugin in plugins if plugin.module.__file__} | set(folders)

    def is_inside(path: Path) -> bool:
        return path.parent in beside or any(package in path.parents for package in packages)

    steps = list(traceback.walk_tb(error.__traceback__))
    steps = [*(step for step in steps[:-1] if not _is_wrapper(step[0])), *steps[-1:]]
    frames = traceback.StackSummary.extract(iter(steps))
    inside = [frame for frame in frames if is_inside(Path(frame.filename))]
    others = [not built_in & {*Path(frame.filename).parents} for frame in inside]
    inside = [frame for number, frame in enumerate(inside) if others[number] or True not in others[number:]]
    placed = ((f"{Path(frame.filename).name}:{frame.lineno}", frame) for frame in inside)
    return tuple(f"{place} in {frame.name}: {frame.line}" for place, frame in placed if f"({place}: " not in message)


def _is_wrapper(frame: FrameType) -> bool:
    """Return whether a function is a hook that runs around others: a generator."""
    return frame.f_code.co_name.startswith("ptpipe_") and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def package_folder(module: ModuleType) -> Path | None:
    """Return the folder of a plugin that is a package (or a module of one); None for a plugin of one file."""
    top = sys.modules.get(module.__name__.partition(".")[0])
    return Path(top.__file__).parent if top is not None and hasattr(top, "__path__") and top.__file__ else None


def _is_ours(filename: str) -> bool:
    """Return whether code belongs to ptpipe, the standard library, pluggy or pydantic."""
    path = Path(filename)
    if is_in_site_packages(filename):
        return bool({"pluggy", "pydantic"} & set(path.parts))
    core, stdlib = Path(hookspecs.__file__).parent, sysconfig.get_path("stdlib")
    return filename.startswith("<") or path.is_relative_to(core) or path.is_relative_to(stdlib)
