"""Files of modules: which file a name would be imported from, and which modules this process has imported."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    BuiltinImporter,
    FrozenImporter,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

_SUFFIXES = (*EXTENSION_SUFFIXES, ".py")
_SEEN = "_ptpipe_imported"
_RECORDED = re.compile(r"^(?=[^,\n]*\.(?:py|so|pyd),)\w+[/.]", re.MULTILINE)
"""How a path in RECORD begins: `torch/` of `torch/nn/__init__.py`, `six.` of `six.py`."""
_LOADED_NS = time.time_ns()
_COMPILED_WITHIN_NS = 10 * 10**9
"""How long an import that has read a source may need until it writes its bytecode."""
_OF_CODE = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_name", "co_flags", "co_firstlineno"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_exceptiontable"),
)
_STANDARD_FINDERS = (BuiltinImporter, FrozenImporter, PathFinder)


class ModuleFile(NamedTuple):
    """What a module's name stands for."""

    file: str
    """Empty for a namespace package."""
    folders: tuple[str, ...] = ()
    """Of a package: where its submodules are."""


class ModuleFinder:
    """Finds modules as an import would, but imports nothing: not even the package that a module is in."""

    def __init__(self, folders: Sequence[str] = (), *, only: bool = False) -> None:
        """Search `sys.path` as it is now, then `folders`; `only`: search nothing but these."""
        self._only = only
        self._folders = tuple(dict.fromkeys(map(os.path.abspath, folders if only else (*sys.path, *folders))))
        self._found: dict[str, ModuleFile | None] = {}

    def find(self, name: str) -> ModuleFile | None:
        """Return what the dotted name stands for; None where nothing is found, and for built-in modules."""
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def searches(self, name: str, file: str) -> bool:
        """Return whether the file is, or was, in one of the folders that the name is searched in."""
        parent = name.rpartition(".")[0]
        package = self.find(parent) if parent else None
        path = Path(file)
        folder = path.parents[1] if path.stem == "__init__" else path.parent
        return str(folder) in (package.folders if package else self._folders)

    def _search(self, name: str) -> ModuleFile | None:
        parent, _, own_name = name.rpartition(".")
        if parent:
            package = self.find(parent)
            return _in_folders(own_name, package.folders) if package else None
        if name in sys.builtin_module_names:
            return None
        return _in_folders(name, self._folders) or (None if self._only else _from_other_finders(name))


def _in_folders(name: str, folders: Sequence[str]) -> ModuleFile | None:
    """Search as Python's path finder does: packages before modules, namespace packages where there is neither."""
    portions = []
    for folder in folders:
        path = f"{folder}/{name}"
        if os.path.isdir(path):  # noqa: PTH112 - a Path per candidate is slow
            if file := _existing(f"{path}/__init__"):
                return ModuleFile(file, (path,))
            portions.append(path)
        if file := _existing(path):
            return ModuleFile(file)
    return ModuleFile("", tuple(portions)) if portions else None


def _existing(path: str) -> str:
    return next((path + suffix for suffix in _SUFFIXES if os.path.isfile(path + suffix)), "")  # noqa: PTH113 - as above


def _from_other_finders(name: str) -> ModuleFile | None:
    """Ask the finders that editable installations add."""
    for finder in sys.meta_path:
        if finder in _STANDARD_FINDERS:
            continue
        try:
            spec = finder.find_spec(name, None, None)
            if spec is not None:
                file = spec.origin if spec.has_location and spec.origin else ""
                return ModuleFile(file, tuple(spec.submodule_search_locations or ()))
        except Exception:  # noqa: BLE001, S112 - a finder of somebody else's; Python asks the next one, too
            continue
    return None


@cache
def _library_folders() -> tuple[str, ...]:
    core = Path(__file__).parents[1]
    stdlib = {os.__file__.rpartition("/")[0], sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple(f"{folder}/" for folder in (*stdlib, core))


def is_own_code(file: str) -> bool:
    """Return whether a module's file belongs to neither the standard library, an installed package nor the core.

    Those change by version only: an installed package's version enters keys through `packages`, the core's through
    their format.
    """
    return bool(file) and not file.startswith(_library_folders()) and not is_installed(file)


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package: one in `site-packages`, or of `pip install --target`."""
    return is_in_site_packages(file) or any(file.startswith(_installed_in(folder)) for folder in sys.path)


def is_in_site_packages(file: str) -> bool:
    """Return whether a file lies where installers put packages, under Debian's name of that folder too."""
    return "/site-packages/" in file or "/dist-packages/" in file


@cache
def _installed_in(folder: str) -> tuple[str, ...]:
    """Return what the paths of installed modules begin with, in a folder of `sys.path`: as installers recorded them.

    Other files of the folder are the user's own: `pip install --target .` puts packages beside these.
    """
    if is_in_site_packages(f"{folder}/"):  # all of it is installed
        return ()
    found: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError):
            found.update(_RECORDED.findall(record.read_text(encoding="utf-8", errors="replace")))
    return tuple(f"{os.path.abspath(folder)}/{beginning}" for beginning in sorted(found))  # noqa: PTH100 - as above


def is_file(path: Path) -> bool:
    """Return whether there is such a file; False for what can be no file's name, which `Path.is_file` raises for."""
    return os.path.isfile(path)  # noqa: PTH113 - it returns False for these, too


def _members(module: object) -> Mapping[str, Any]:
    """Return what is in a module; asking for an attribute would import a lazy one."""
    try:
        members: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:  # Python allows any object in `sys.modules`
        return {}
    return members


def _own_spec(name: str, module: ModuleType) -> tuple[ModuleSpec, str] | None:
    """Return spec and file of a module of the user's own that was imported by this name; None for others."""
    members = _members(module)
    # Without a spec, it was not imported: compilers write and execute modules of their own. With the spec of another
    # name, it is an alias: multiprocessing calls the main module `__mp_main__`, too.
    file, spec = members.get("__file__"), members.get("__spec__")
    if isinstance(spec, ModuleSpec) and spec.name == name and isinstance(file, str) and is_own_code(file):
        return spec, file
    return None


class ImportedModule(NamedTuple):
    """A module that a process imported."""

    file: str
    sha256: str
    """Of the file's bytes, soon after it was imported."""
    is_settled: bool
    """Whether the file is older than the interval in which it was imported, so that it is what was imported."""
    is_new: bool
    """Whether it was imported since the log was created, not by an earlier run of this process."""
    stale_bytecode: str = ""
    """The file of bytecode of other code that it was imported from; mostly empty."""


def record_import(module: ModuleType) -> None:
    """Record the file of `module` as it is now, soon after its import: an edit from now on does no harm to a result.

    For code of the user's that a stage imports when it is first needed, and not when its plugin is loaded.
    """
    spec, file = module.__spec__, module.__file__
    if spec is not None and file is not None:
        setattr(spec, _SEEN, _look(spec, file, time.time_ns()))


def _look(spec: ModuleSpec, file: str, since_ns: int) -> ImportedModule:
    try:
        status, content = os.stat(file), Path(file).read_bytes()  # noqa: PTH116 - as above
    except OSError:  # deleted meanwhile
        return ImportedModule(file, "", is_settled=False, is_new=True)
    # ctime: it can't be set, so a file that was replaced by one with an older mtime is noticed.
    is_settled, stale = status.st_ctime_ns <= since_ns, _stale_bytecode(spec, content, status.st_ctime_ns)
    return ImportedModule(file, hashlib.sha256(content).hexdigest(), is_settled, is_new=True, stale_bytecode=stale)


def _stale_bytecode(spec: ModuleSpec, content: bytes, changed_ns: int) -> str:
    """Return the file of bytecode that stands for a module's source and is not of this `content`; empty if it is.

    Python compares only the size and the second of modification: an edit within a second, or a restored time, escapes.
    `changed_ns`: the source's ctime. Bytecode that was written well after it is of this content.
    """
    loader = spec.loader
    if not spec.cached or type(loader) is not SourceFileLoader:  # others may have bytecode of their own elsewhere
        return ""
    with suppress(OSError, ImportError, SyntaxError, ValueError), no_bytecode():  # the source was edited meanwhile
        if os.stat(spec.cached).st_mtime_ns <= changed_ns + _COMPILED_WITHIN_NS:  # noqa: PTH116 - as above
            cached = loader.get_code(spec.name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return "" if _is_same(cached, loader.source_to_code(content, loader.path)) else spec.cached
    return ""


def _is_same(one: object, other: object) -> bool:
    """Return whether constants are the same: also NaN, and code without the columns of its lines."""
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return all(getattr(one, name) == getattr(other, name) for name in _OF_CODE) and (
            [*one.co_lines()] == [*other.co_lines()] and _is_same(one.co_consts, other.co_consts)
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and (one == other if isinstance(one, frozenset) else repr(one) == repr(other))


@contextmanager
def no_bytecode() -> Iterator[None]:
    """Write no `__pycache__` inside the `with`: `validate` and `plan` leave a stranger's folder as it was."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def look_at_earlier(name: str) -> ImportedModule | None:
    """Return the user's module that this process imported before any log; None where there is none of this name.

    When it was imported is not known: it is settled where its file is older than the process.
    """
    module = sys.modules.get(name)
    own = _own_spec(name, module) if module is not None else None
    if own is None:
        return None
    seen = getattr(own[0], _SEEN, None) or _look(*own, _process_start_ns())
    return seen._replace(is_new=False)


@cache
def _process_start_ns() -> int:
    """Return when this process was started; where the system doesn't tell, about when it first called `ptpipe.run`."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        ticks += 2  # it was rounded down, as are the times of files; Python needs longer until it imports anything
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return _LOADED_NS
    return time.time_ns() - round(age_s * 1e9)


class ImportLog:
    """The modules of the user's own code that this process has imported since its first log was created.

    What was seen of a module stays with its spec, as long as the module: so a second run in one process knows which
    code it executes. A file that changes between the import and the next `update` is not settled.
    """

    def __init__(self) -> None:
        self._before = dict(sys.modules)
        self._since_ns = time.time_ns()
        self._others: dict[str, ModuleType] = {}
        """Thousands, which are not looked at again."""

    def update(self) -> Mapping[str, ImportedModule]:
        """Look at what was imported since the last update; return all modules by name."""
        now_ns, found = time.time_ns(), {}
        for name, module in list(sys.modules.items()):
            if self._others.get(name) is not module:
                if seen := self._seen(name, module):
                    found[name] = seen
                else:
                    self._others[name] = module
        self._since_ns = now_ns
        return found

    def _seen(self, name: str, module: ModuleType) -> ImportedModule | None:
        """Return the user's module by this name; None for others, and for those that were there before any log."""
        own = _own_spec(name, module)
        if own is None:
            return None
        spec, file = own
        is_new = self._before.get(name) is not module
        seen = getattr(spec, _SEEN, None) or (_look(spec, file, self._since_ns) if is_new else None)
        setattr(spec, _SEEN, seen)
        return seen._replace(is_new=is_new) if seen else None
