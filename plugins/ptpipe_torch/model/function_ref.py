"""References to functions that a stored recipe may call: builders make a network, transforms change one.

A recipe is data and may come from anywhere, so a name in it runs nothing unless its function was marked with
`@builder` or `@transform`. No module is even imported for it, except from a package that contains a loaded plugin.
A builder may also be a function of the user's own, in a file that is no plugin, where the manifest names just that
function of it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ptpipe import JSON, IntegrityError, StageError, source_code

if TYPE_CHECKING:
    from torch import nn

_MARK = "__ptpipe_role__"
_ADDRESS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_FILE_ADDRESS = re.compile(r"[\w-][\w. -]*:[^\W\d]\w*")
_MAX_ADDRESS = 200
_HOOK_MARK = "ptpipe_impl"  # the attribute that pluggy's `hookimpl` sets on a function
F = TypeVar("F", bound=Callable[..., "nn.Module"])


def builder(function: F) -> F:
    """Mark `function`, a module-level `(**arguments) -> nn.Module`, as one that recipes may name.

    Arguments must be JSON values. The same arguments must give the same architecture; weights may be random.
    Raises TypeError for anything but a function at the top level of a module.
    """
    return _marked(function, "builder")


def transform(function: F) -> F:
    """Mark `function`, a module-level `(module: nn.Module, **arguments) -> nn.Module`, as one that recipes may name.

    Raises TypeError for anything but a function at the top level of a module.
    """
    return _marked(function, "transform")


@dataclass(frozen=True)
class FunctionRef:
    """The address of a marked function, `package.module:function`, and its JSON arguments."""

    address: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    source: str | None = None
    """Of a function in a Python file that is no plugin: the digest of the file's code (`ptpipe.source_code`). The
    address is then `mine.py:make_net`, without the folder, which may be another one elsewhere."""
    source_functions: tuple[str, ...] = field(default=(), compare=False)
    """The functions that the manifest in hand names: see `Artifact`. Never stored."""

    @classmethod
    def to(cls, function: Callable[..., Any], **arguments: Any) -> FunctionRef:
        """Return the reference that calls `function` with `arguments`; tuples among these become lists.

        Raises TypeError for an unmarked function or an argument that is not JSON: a mistake of the plugin.
        """
        if _role(function) is None:
            raise TypeError(f"{function} is not marked with @builder or @transform")
        return cls(f"{function.__module__}:{function.__qualname__}", json.loads(json.dumps(arguments, allow_nan=False)))

    @classmethod
    def in_file(cls, file: Path, function: str, arguments: Mapping[str, JSON]) -> FunctionRef:
        """Return the reference to `function` of the user's own, called with `arguments`. `file`: its absolute path."""
        address = f"{file.name}:{function}"
        return cls(address, dict(arguments), source_code(file).digest, (f"{file}:{function}",))

    def resolve(self, role: str) -> Callable[..., nn.Module]:
        """Return the function. `role`: "builder" or "transform"; of a function of the user's, also what it is for.

        Raises IntegrityError where the address names anything but a function so marked in a loaded plugin, StageError
        where it is in a file that the manifest does not name.
        """
        if self.source is not None:
            return self._in_file(role)
        function: Callable[..., nn.Module] | None = loaded_attribute(self.address, role)
        if _role(function) != role:
            raise IntegrityError(f"{self.address} is not a {role}")
        assert function is not None
        return function

    def _in_file(self, role: str) -> Callable[..., nn.Module]:
        """Return a function of the user's own, one of `source_functions`."""
        from ptpipe_torch.python_file import load_function

        if role == "transform" or len(self.address) > _MAX_ADDRESS or not _FILE_ADDRESS.fullmatch(self.address):
            raise IntegrityError(f"{self.address[:_MAX_ADDRESS]!r} is not the address of a {role} in a file")
        name = self.address.rpartition(":")[2]
        files = [file for file, _, named in (each.rpartition(":") for each in self.source_functions) if named == name]
        for file in map(Path, dict.fromkeys(files)):
            if file.is_file() and source_code(file).digest == self.source:
                function: Callable[..., nn.Module] = load_function(file, name)
                return function
        found = f"the code of {', '.join(files)} is another one" if files else "no option above names this function"
        raise StageError(
            f"the stored result needs {self.address}, and {found}: name the same file and function under `with:` of "
            f"the stage that made it (of model.torch: `functions: [{self.address}]`), or rerun that stage"
        )


def loaded_attribute(address: str, role: str) -> Any:
    """Return the attribute that an address, `package.module:name`, names in a loaded plugin; None where it has none.

    `role`: what it should be, for errors. Raises IntegrityError where the module belongs to no loaded plugin.
    """
    if len(address) > _MAX_ADDRESS or not _ADDRESS.fullmatch(address):
        raise IntegrityError(f"{address[:_MAX_ADDRESS]!r} is not the address of a {role}, package.module:name")
    module_name, _, name = address.partition(":")
    # Not getattr: it would run the `__getattr__` of a module that imports others on demand.
    return vars(_module(module_name, address)).get(name)


def _module(name: str, address: str) -> ModuleType:
    # Importing runs a module's top level, so only packages that the user already trusts are imported from,
    # and never a `__main__`, which is a program.
    if isinstance(loaded := sys.modules.get(name), ModuleType):
        return loaded
    root = name.partition(".")[0]
    if "__" in name or not (root == __name__.partition(".")[0] or _has_plugin(root)):
        raise IntegrityError(f"{address}: its plugin is not loaded (name it under `plugins:`)")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise IntegrityError(f"{address}: {error}") from error


def _marked(function: F, role: str) -> F:
    if not inspect.isfunction(function) or "<" in function.__qualname__:
        raise TypeError(f"{function} is not a function at the top level of a module, so no recipe could name it")
    setattr(function, _MARK, role)
    return function


def _role(function: object) -> str | None:
    # Only an attribute of a function itself counts: some objects (mocks, proxies) answer for any attribute.
    return vars(function).get(_MARK) if inspect.isfunction(function) else None


def _has_plugin(package: str) -> bool:
    """Whether this top-level package, or a module in it, is a loaded plugin: it has a hook implementation."""
    return any(
        inspect.isfunction(value) and _HOOK_MARK in vars(value)
        for name, module in list(sys.modules.items())
        if name == package or name.startswith(f"{package}.")
        for value in list(vars(module).values())
    )
