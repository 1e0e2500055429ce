"""Digests of plugins' source code by its syntax tree: comments and layout do not count."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

_PYTHON = [1, *sys.version_info[:2]]


@dataclass
class SourceDigests:
    """Digests of the code behind stages, cached by file in `cache_path` between processes.

    The code behind a stage is its plugin's package (or file, with the files beside it that it imports) and the
    other plugins' packages that these import. Libraries enter a key by version, through `packages`.
    """

    cache_path: Path | None
    modules: Mapping[str, ModuleType]
    """The loaded plugins by the top-level name of their module."""
    _files: dict[str, dict[str, Any]] = field(default_factory=dict)
    _by_module: dict[str, str] = field(default_factory=dict)
    _changed: bool = False

    def __post_init__(self) -> None:
        if self.cache_path is not None and self.cache_path.exists():
            with contextlib.suppress(OSError, ValueError):
                cached = json.loads(self.cache_path.read_text(encoding="utf-8"))
                self._files = cached["files"] if _is_compatible(cached) else {}

    def of(self, module_name: str) -> str:
        """Return the digest of the code behind a function that was defined in this module."""
        top = module_name.partition(".")[0]
        if top not in self._by_module:
            parts = sorted((str(name), str(self._file(path)["digest"])) for name, path in self._reachable(top))
            self._by_module[top] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return self._by_module[top]

    def save(self) -> None:
        """Write the cache. Where that fails, the next start is slower, nothing else."""
        if not self._changed or self.cache_path is None:
            return
        from ptpipe.store.files import write_atomically

        try:
            content = {"made_by": _PYTHON, "files": self._files}
            write_atomically(self.cache_path, json.dumps(content).encode())
        except OSError:
            return

    def _reachable(self, top: str) -> Iterator[tuple[str, Path]]:
        waiting, seen = [top], {top}
        while waiting:
            name = waiting.pop()
            for relative, path in self._files_of(name, top):
                yield relative, path
                for other in self._file(path)["imports"]:
                    if other not in seen and (other in self.modules or self._beside(top, other)):
                        seen.add(other)
                        waiting.append(other)

    def _files_of(self, name: str, top: str) -> list[tuple[str, Path]]:
        plugin = self.modules.get(name)
        # A plugin may be a module inside a package: then the whole package is the code behind it.
        module = plugin if plugin is not None and plugin.__name__ == name else sys.modules.get(name, plugin)
        file = getattr(module, "__file__", None) or getattr(plugin, "__file__", None)
        path = Path(file) if file else self._beside(top, name)
        if path is None:
            return []
        if path.name != "__init__.py" and "." not in getattr(plugin, "__name__", name):
            return [(name, path)]
        folder = path.parent
        return [(f"{name}/{file.relative_to(folder).as_posix()}", file) for file in sorted(folder.rglob("*.py"))]

    def _beside(self, top: str, name: str) -> Path | None:
        """Return the file of a module beside a one-file plugin; None where there is none."""
        plugin = Path(getattr(self.modules.get(top), "__file__", None) or "")
        if plugin.name in ("", "__init__.py"):
            return None
        choices = (plugin.parent / f"{name}.py", plugin.parent / name / "__init__.py")
        return next((choice for choice in choices if choice.is_file()), None)

    def _file(self, path: Path) -> dict[str, Any]:
        status = path.stat()
        # ctime too: unlike mtime it can't be set, so a file with a restored mtime is noticed.
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._files.get(str(path))
        if known is None or known["stamp"] != stamp:
            known = {"stamp": stamp, **_digest(path.read_bytes())}
            self._files[str(path)] = known
            self._changed = True
        return known


def _digest(content: bytes) -> dict[str, Any]:
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # SyntaxWarning and the like: Python gives them when it compiles the code
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):  # a template that only looks like Python
        return {"digest": hashlib.sha256(content).hexdigest(), "imports": []}
    return {"digest": hashlib.sha256(ast.dump(tree).encode()).hexdigest(), "imports": sorted(_imports(tree))}


def _is_compatible(cached: object) -> bool:
    """Return whether a cache was written by this version of Python: others have other syntax trees."""
    return isinstance(cached, dict) and cached.get("made_by") == _PYTHON and "files" in cached


def _imports(tree: ast.AST) -> set[str]:
    """Return the top-level names that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
