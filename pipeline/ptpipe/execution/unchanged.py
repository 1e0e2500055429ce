"""The check after a stage: its key still describes the code that was executed and the files that were read."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ptpipe.errors import StageError
from ptpipe.events import ModulesImported
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.keys import Key, code_roots, fingerprint_of
from ptpipe.plan.module_files import ImportedModule
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
    own_imports = {name for function in functions[stage.id] for name in sources.imports_of_file(function.path)}
    dependencies: dict[str, str] = {}
    for name, facts in (item for event in imported for item in event.modules.items()):
        module = ImportedModule(*facts)  # type: ignore[arg-type]  # from another process: a list
        file = os.path.realpath(module.file)
        if code := own.get(name) or own_files.get(file):
            if module.sha256 != code.sha256:
                raise _changed(module)
        # Modules that other plugins import themselves, and files that options of other stages name, were imported for
        # these stages, perhaps in this same process.
        elif (
            module.is_new
            and (file not in others or name in own_imports)
            and not sources.is_of_plugins(name, module.file)
        ):
            dependencies |= _dependency(name, module, sources)
    return dependencies


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
    address = name if has_name else module.file
    now = sources.digest(address)
    # A file that changed after its import: the digest of what was imported is one that it never has again.
    return {address: now.digest if now is not None and now.sha256 == module.sha256 else module.sha256}


def _changed(module: ImportedModule) -> StageError:
    if module.is_new:
        return StageError(f"{module.file} changed during the run, so the stage's result is not kept: run it again")
    return StageError(
        f"this process imported {module.file} before it changed, so the stage's result is not kept: "
        "run it again in a new one"
    )
