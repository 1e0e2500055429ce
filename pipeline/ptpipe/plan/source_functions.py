"""Functions in Python files that a manifest's options name: code of the user's that is no plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ptpipe.errors import Problem
from ptpipe.plan.module_files import is_file
from ptpipe.plan.source_digest import SourceDigests

if TYPE_CHECKING:
    from ptpipe.plan.bind import Plan, PlannedStage


class SourceCode(NamedTuple):
    """The code of a Python file and of what it imports from its own folder."""

    digest: str
    """Of the syntax trees: the same wherever the folder is, and whatever the file is called."""
    sha256: str
    """Of the bytes of all these files."""
    modules: Mapping[str, Path]
    """The modules of its own folder that it imports, directly or not, by name."""


class SourceFunction(NamedTuple):
    """A function in a Python file."""

    file: str
    """As the user wrote it."""
    name: str

    @property
    def path(self) -> Path:
        """The file's absolute path; relative paths of options are relative to the working directory."""
        return Path(self.file).expanduser().absolute()

    @property
    def address(self) -> str:
        """What `Artifact.with_source_functions` gets: `/home/me/mine.py:make_net`."""
        return f"{self.path}:{self.name}"


def source_code(file: Path) -> SourceCode:
    """Return what the result of running `file` depends on, as it is now. Reads it and runs nothing.

    The result of the same code is the same, whatever its comments and layout. Raises OSError where it can't be read.
    """
    sources = SourceDigests(None, {})
    modules = sources.source_file(file.absolute())
    return SourceCode(
        digest=sources.digest_of_file(file.absolute()),
        sha256=sources.digest_of_file(file.absolute(), by_bytes=True),
        modules={name: path for name, (path, _) in modules.items() if name},
    )


def source_functions(stage: PlannedStage) -> tuple[SourceFunction, ...]:
    """Return the functions that a stage's options name."""
    ask = stage.stage.source_functions
    functions = (address.rpartition(":") for address in (ask(stage.config) if ask else ()))
    return tuple(SourceFunction(file, name) for file, _, name in functions)


def functions_above(plan: Plan) -> dict[str, tuple[SourceFunction, ...]]:
    """Return for each stage the functions that its options and those of the stages above it name, each once."""
    found: dict[str, tuple[SourceFunction, ...]] = {}
    for stage in plan.stages:
        above = (function for name in stage.upstream for function in found[name])
        found[stage.id] = tuple(dict.fromkeys((*above, *source_functions(stage))))
    return found


def missing_files(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each file that an option names and that is not there."""
    for stage in plan.stages:
        try:
            functions = source_functions(stage)
        except Exception as error:  # noqa: BLE001  # a plugin may raise anything
            yield plan.plugin_problem(stage.id, "source_functions()", error)
            continue
        for file, path in {function.file: function.path for function in functions}.items():
            if not is_file(path):
                options = [name for name, value in stage.options.items() if value == file]
                yield plan.problem(stage.id, f"there is no file {path}", *options[:1])
