"""The check after a stage: its key still describes the code that was executed and the files that were read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ptpipe.errors import StageError
from ptpipe.events import ModulesImported
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.keys import Key, code_roots, fingerprint_of
from ptpipe.plan.module_files import ImportedModule, look_at_earlier
from ptpipe.plan.source_digest import ModuleCode, SourceDigests
from ptpipe.plan.source_functions import SourceFunction, functions_above


def check_unchanged(
    plan: Plan, stage: PlannedStage, key: Key, sources: SourceDigests, imported: Iterable[ModulesImported]
) -> dict[str, str]:
    """Return the modules that the stage's result depends on besides the code in its key, with their digests.

    `sources`: as the key was computed with. `imported`: from each process that executed the stage.
    Raises StageError where the files outside the store that the stage reads are not those of its key any more, or where
    a module that it imported is not that of the key, or changed while it was imported.
    """
    _check_data(stage, key)
    own = sources.code(*code_roots(plan, stage))
    functions = functions_above(plan)
    own_files = _files(functions[stage.id], sources)
    others = _files((function for of in functions.values() for function in of), sources)
    modules = [
        (name, ImportedModule(*facts))  # type: ignore[arg-type]  # from another process: a list
        for event in imported
        for name, facts in event.modules.items()
    ]
    own_imports = _names_imported((function.path for function in functions[stage.id]), sources, dict(modules))
    known = {name for name, _ in modules}
    modules += [(name, found) for name in sorted(own_imports - known) if (found := look_at_earlier(name))]
    dependencies: dict[str, str] = {}
    for name, module in modules:
        file = os.path.realpath(module.file)
        if code := own.get(name) or own_files.get(file):
            if module.sha256 != code.sha256 or module.stale_bytecode:
                raise _changed(module)
        # Modules that other plugins import themselves, and files that options of other stages name, were imported for
        # these stages, perhaps in this same process.
        elif (name in own_imports or (module.is_new and file not in others)) and not sources.is_of_plugins(
            name, module.file
        ):
            if module.stale_bytecode or (not module.is_new and _has_changed(module, sources)):
                raise _changed(module)
            dependencies |= _dependency(name, module, sources)
    return dependencies


def _names_imported(files: Iterable[Path], sources: SourceDigests, modules: Mapping[str, ImportedModule]) -> set[str]:
    """Return the names that the files import, and the modules that these names stand for in this process, and so on."""
    names, waiting = set[str](), [*files]
    while waiting:
        with contextlib.suppress(OSError):  # a module whose file is gone
            new = sources.imports_of_file(waiting.pop().absolute()) - names
            names |= new
            found = (modules.get(name) or look_at_earlier(name) for name in new)
            waiting += [Path(module.file) for module in found if module]
    return names


def _has_changed(module: ImportedModule, sources: SourceDigests) -> bool:
    now = sources.digest(module.file)
    return not module.is_settled or now is None or now.sha256 != module.sha256


def _files(functions: Iterable[SourceFunction], sources: SourceDigests) -> dict[str, ModuleCode]:
    """Return the code of the files of these functions, and of what they import from their folders, by real path."""
    files = {function.path for function in functions}
    modules = [module for file in files for module in sources.source_file(file).values()]
    return {os.path.realpath(path): code for path, code in modules}


def _check_data(stage: PlannedStage, key: Key) -> None:
    try:
        is_same = fingerprint_of(stage) == key.parts["fingerprint"]
    except Exception as error:  # a plugin may raise anything; it did not when the key was computed
        raise StageError(f"data changed while the stage ran, so its result is not kept: {error}") from error
    if not is_same:
        raise StageError("data changed while the stage ran, so its result is not kept: run it again")


def _dependency(name: str, module: ImportedModule, sources: SourceDigests) -> dict[str, str]:
    has_name = sources.can_import(name, module.file)
    if not module.is_settled:
        if has_name:
            raise _changed(module)
        return {}  # the stage wrote it
    address = name if has_name else _path_address(module.file)
    now = sources.digest(address)
    # A file that changed after its import: the digest of what was imported is one that it never has again.
    return {address: now.digest if now is not None and now.sha256 == module.sha256 else module.sha256}


def _path_address(file: str) -> str:
    """Return the path of a module that has no name to import it by: in the working directory, relative to it.

    A store may be shared between checkouts, each of which has its own file there.
    """
    path, folder = Path(os.path.normpath(file)), Path.cwd()
    return f"./{path.relative_to(folder)}" if path.is_relative_to(folder) else str(path)


def _changed(module: ImportedModule) -> StageError:
    if module.stale_bytecode:
        return StageError(
            f"{module.file} was imported from bytecode of an older version of it, so the stage's result is not kept: "
            f"delete {module.stale_bytecode}, and run it again"
        )
    if module.is_new:
        return StageError(f"{module.file} changed during the run, so the stage's result is not kept: run it again")
    return StageError(
        f"this process imported {module.file} before it changed, so the stage's result is not kept: "
        "run it again in a new one"
    )
