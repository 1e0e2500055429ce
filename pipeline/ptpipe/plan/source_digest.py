"""Digests of the source code behind stages by its syntax tree: comments and layout do not count."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ptpipe.errors import IntegrityError
from ptpipe.plan.module_files import ModuleFinder, is_file, is_installed, is_own_code
from ptpipe.store.documents import read_document, write_document

_LAYOUT = 5
_MADE_BY = [_LAYOUT, *sys.version_info[:2]]
"""Other versions of Python have other syntax trees."""
_RECORD = {"stamp", "digest", "sha256", "imports"}
_IMPORTING = (ast.Import, ast.ImportFrom, ast.Call)
_CODE_SUFFIXES = (".py", ".so", ".pyd")
_LINE_END = re.compile(r"\r\n?")
# Patterns that begin with letters are found fastest.
_FROM_IMPORT = re.compile(r"from\b\s*([.\s]*)\b([\w.]*)\s*\bimport\b\s*(\((?:[^)#]|#.*)*\)|[^;\n]*)")
_IMPORT = re.compile(r"import\b\s*([^;\n]*)")
_IMPORT_CALL = re.compile(r"""import(?:_module|__)\(\s*[rRuU]?["']([^"']*)""")
_COMMENT = re.compile(r"#.*")


class ModuleCode(NamedTuple):
    """The code of one module."""

    digest: str
    """Of its syntax tree; of the bytes of what is not Python."""
    sha256: str
    """Of the file's bytes."""


@dataclass
class SourceDigests:
    """Digests of the code behind stages, cached by file in `cache_path` between processes.

    The code behind a stage is the module that defines it, its plugin (a package as a whole), and everything that these
    import, directly or not, that is neither installed nor in the standard library. Imports are read from the source:
    nothing is executed. Libraries enter a key by version, through `packages`.
    """

    cache_path: Path | None
    modules: Mapping[str, ModuleType]
    """The loaded plugins by the top-level name of their module."""
    libraries: tuple[str, ...] = ()
    """Folders, with a slash at the end, whose files count by their bytes, as those of installed packages do."""
    _files: dict[str, dict[str, Any]] = field(default_factory=dict)
    _code: dict[tuple[str, ...], dict[str, ModuleCode]] = field(default_factory=dict)
    _source_files: dict[Path, dict[str, tuple[Path, ModuleCode]]] = field(default_factory=dict)
    _changed: bool = False

    def __post_init__(self) -> None:
        files = (getattr(plugin, "__file__", None) for plugin in self.modules.values())
        beside = [str(Path(file).parent) for file in files if file]
        self._finder = ModuleFinder(beside)
        if self.cache_path is not None:
            with contextlib.suppress(IntegrityError, OSError, ValueError):
                cached = read_document(self.cache_path)
                self._files = cached["files"] if _is_usable(cached) else {}

    def of(self, *names: str) -> str:
        """Return the digest of the code behind a stage, as it was when first asked for.

        `names`: of the modules that the stage's function and its plugin are defined in.
        """
        parts = sorted((name, code.digest) for name, code in self.code(*names).items())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def code(self, *names: str) -> Mapping[str, ModuleCode]:
        """Return the modules that `of(*names)` is the digest of, by name."""
        if names not in self._code:
            reachable = self._reachable(names)
            self._code[names] = {name: self._code_of(path) for name, path in reachable.items()}
        return self._code[names]

    def is_of_plugins(self, module: str, file: str) -> bool:
        """Return whether a module is in a plugin's package, all of which counts, or imported by any plugin."""
        front = getattr(self.modules.get(module.partition(".")[0]), "__file__", None) or ""
        if Path(front).name == "__init__.py" and Path(file).is_relative_to(Path(front).parent):
            return True  # without reading all plugins
        return module in self.code(*sorted(plugin.__name__ for plugin in self.modules.values()))

    def source_file(self, file: Path) -> Mapping[str, tuple[Path, ModuleCode]]:
        """Return a Python file, under the name "", and the modules of its folder that it imports, directly or not.

        `file`: an absolute path. As they were when first asked for. Raises OSError where it can't be read.
        """
        if file not in self._source_files:
            found = self._imported_from_folder(file)
            self._source_files[file] = {name: (path, self._code_of(path)) for name, path in found.items()}
        return self._source_files[file]

    def digest_of_file(self, file: Path, *, by_bytes: bool = False) -> str:
        """Return the digest of what `source_file` returns, which is the same wherever the folder is.

        `by_bytes`: comments and layout count, too.
        """
        modules = self.source_file(file).items()
        parts = sorted((name, code.sha256 if by_bytes else code.digest) for name, (_, code) in modules)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def imports_of_file(self, file: Path) -> set[str]:
        """Return the names that the modules of `source_file` import, from anywhere."""
        modules = ((name, path) for name, (path, _) in self.source_file(file).items())
        return {imported for name, path in modules for imported in self._names_imported(name, path)}

    def find(self, module: str) -> Path | None:
        """Return the file of a module, given by name; by path (`/...`, `./...`) where it can't be imported by name."""
        if "/" in module:
            path = Path(module).absolute()
        else:
            found = self._finder.find(module)
            path = Path(found.file if found else "")
        return path if path.is_absolute() and is_file(path) else None

    def can_import(self, name: str, file: str) -> bool:
        """Return whether a module's name stands for this file; if that is missing, whether it was looked for there."""
        found = self.find(name)
        return found.resolve() == Path(file).resolve() if found else self._finder.searches(name, file)

    def digest(self, module: str) -> ModuleCode | None:
        """Return the code of a module as it is now, given as for `find`; None where it is missing."""
        path = self.find(module)
        return self._code_of(path) if path else None

    def save(self) -> None:
        """Write the cache. Where that fails, the next start is slower, nothing else."""
        if self._changed and self.cache_path is not None:
            with contextlib.suppress(OSError):
                write_document(self.cache_path, json.dumps({"made_by": _MADE_BY, "files": self._files}))

    def _reachable(self, roots: tuple[str, ...]) -> dict[str, Path]:
        found: dict[str, Path] = {}
        seen = {name for root in roots for name in _with_packages(root)}
        waiting = sorted(seen)
        while waiting:
            name = waiting.pop()
            for module, path in self._files_of(name, is_root=name in roots):
                if module in found:
                    continue
                found[module] = path
                new = self._imported(module, path) - seen
                seen |= new
                waiting += new
        return found

    def _files_of(self, name: str, is_root: bool) -> Iterator[tuple[str, Path]]:
        """Yield the modules that count where this one is imported: all of a plugin's package, else itself alone."""
        if name in self.modules or is_root:
            yield from self._plugin_files(name.partition(".")[0])
        module = self._finder.find(name)
        file = module.file if module else ""
        if is_root and not file:  # a plugin in one file has a name that can't be imported
            file = getattr(sys.modules.get(name), "__file__", None) or ""
        if file and (is_root or is_own_code(file)):
            yield name, Path(file)

    def _plugin_files(self, top: str) -> Iterator[tuple[str, Path]]:
        plugin = self.modules.get(top)
        # A plugin may be a module inside a package: then the whole package is the code behind it.
        module = plugin if plugin is None or plugin.__name__ == top else sys.modules.get(top, plugin)
        if module is not None and module.__file__ is None:  # a namespace package
            module = plugin
        if module is None or module.__file__ is None:
            return
        path, package = Path(module.__file__), module.__name__
        if path.name != "__init__.py":
            if "." not in package:
                yield package, path
                return
            package = package.rpartition(".")[0]
        for file in sorted(path.parent.rglob("*")):
            if file.suffix in _CODE_SUFFIXES and file.is_file():  # editors leave links to nothing
                *folders, name = file.relative_to(path.parent).parts
                own_name = file.stem if file.suffix == ".py" else name.partition(".")[0]
                yield ".".join((package, *folders, own_name)).removesuffix(".__init__"), file

    def _imported(self, module: str, path: Path) -> set[str]:
        """Return the absolute names of what a module imports and of the packages around it, where they may count."""
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names: set[str] = set()
        for written in self._file(path)["imports"]:
            name = _absolute(written, package)
            top = name.partition(".")[0]
            found = self._finder.find(top) if top and top not in self.modules else None
            if top in self.modules or (found is not None and (not found.file or is_own_code(found.file))):
                names |= _with_packages(name)
        return names

    def _names_imported(self, module: str, path: Path) -> set[str]:
        """Return the absolute names of what a module imports, and of the packages around it."""
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        written = self._file(path)["imports"]
        return {part for item in written for part in _with_packages(_absolute(item, package))}

    def _imported_from_folder(self, file: Path) -> dict[str, Path]:
        finder, found, waiting = ModuleFinder((str(file.parent),), only=True), {"": file}, [""]
        while waiting:
            name = waiting.pop()
            for wanted in sorted(self._names_imported(name, found[name])):
                module = finder.find(wanted) if wanted and wanted not in found else None
                if module and module.file:
                    found[wanted] = Path(module.file)
                    waiting.append(wanted)
        return found

    def _code_of(self, path: Path) -> ModuleCode:
        file = self._file(path)
        return ModuleCode(file["digest"], file["sha256"])

    def _file(self, path: Path) -> dict[str, Any]:
        status = path.stat()
        # ctime too: unlike mtime it can't be set, so a file with a restored mtime is noticed.
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._files.get(str(path))
        if known is None or known["stamp"] != stamp:
            is_library = str(path).startswith(self.libraries) or is_installed(str(path))
            known = {"stamp": stamp, **_facts_of(path, is_library, *stamp)}
            self._files[str(path)] = known
            self._changed = True
        return known


def _is_usable(cached: Mapping[str, Any]) -> bool:
    """Return whether a cache was written by this version of ptpipe and of Python."""
    files = cached.get("files")
    records = files.values() if isinstance(files, dict) else [None]
    fits = all(isinstance(record, dict) and record.keys() == _RECORD for record in records)
    return fits and cached.get("made_by") == _MADE_BY


def _with_packages(name: str) -> set[str]:
    """Return a module's name and those of the packages that it is in: importing it executes them, too."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def _absolute(written: str, package: str) -> str:
    """Return an import's absolute name: `..x` in the package `a.b` is `a.x`."""
    name = written.lstrip(".")
    level = len(written) - len(name)
    if not level:
        return name
    parts = package.split(".") if package else []
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


@functools.lru_cache(maxsize=4096)
def _facts_of(path: Path, is_library: bool, *stamp: int) -> dict[str, Any]:
    """Return what is kept of a file besides its stamp. A process that runs several manifests reads each file once.

    Libraries are not parsed, which takes a second for the built-in plugins: they count by their bytes.
    """
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if is_library:
        found = possible_imports(content) if path.suffix == ".py" else ()
        return {"digest": sha256, "sha256": sha256, "imports": sorted(found)}
    try:
        with warnings.catch_warnings(action="ignore"):  # Python gives a SyntaxWarning when it compiles the code
            tree = ast.parse(content)
        digest, imports = _read(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a library, or what only looks like Python
        return {"digest": sha256, "sha256": sha256, "imports": []}
    return {"digest": digest, "sha256": sha256, "imports": sorted(imports)}


def _read(tree: ast.AST) -> tuple[str, set[str]]:
    """Return the digest of a syntax tree, positions aside, and the names that it imports.

    A node is written as its type, followed by its fields; a list as its length, followed by its members. This takes
    half the time of `ast.dump` and `ast.walk`, for hundreds of files at the start of a run.
    """
    written: list[str] = []
    imports: set[str] = set()
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, str):  # most are
            written.append(repr(value))
        elif isinstance(value, ast.AST):
            written.append(value.__class__.__name__)
            waiting += map(vars(value).get, value._fields)
            if isinstance(value, _IMPORTING):
                imports.update(_names_in(value))
        elif isinstance(value, list):
            written.append(f"[{len(value)}")
            waiting += value
        else:
            written.append(repr(value))
    return hashlib.sha256("\n".join(written).encode()).hexdigest(), imports


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node imports; relative ones with their dots.

    `from a import b` is `a.b`, because b may be a module; `import_module("a.b")` counts where the name is written out.
    """
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            base = "." * node.level + (node.module or "")
            dot = "." if node.module else ""
            yield from (base if alias.name == "*" else f"{base}{dot}{alias.name}" for alias in node.names)
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


def possible_imports(content: bytes) -> set[str]:
    """Return the names that `_names_in` yields for a module, and others that its text could be taken for.

    `content`: the module's source, or anything else.
    """
    text = _LINE_END.sub("\n", content.decode("utf-8-sig", "replace")).replace("\\\n", " ")
    found = set(_IMPORT_CALL.findall(text))
    for match in filter(_starts_statement, _IMPORT.finditer(text)):
        found |= set(_imported_names(match[1]))
    for match in filter(_starts_statement, _FROM_IMPORT.finditer(text)):
        base = "".join(match[1].split()) + match[2]
        dot = "." if match[2] else ""
        found |= {base if name == "*" else f"{base}{dot}{name}" for name in _imported_names(match[3])}
    return found


def _starts_statement(match: re.Match[str]) -> bool:
    before = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()].rstrip()
    return not before or before.endswith((":", ";"))


def _imported_names(text: str) -> Iterator[str]:
    """Yield `a` and `b.c` of `(a as x,  # comment` and `b.c)`."""
    for part in _COMMENT.sub("", text).strip("()").split(","):
        yield from part.split()[:1]
