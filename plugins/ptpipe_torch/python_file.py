"""Functions in Python files that know nothing of ptpipe: imported and called as their own script would."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.abc import Loader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ptpipe import PtpipeError, ReadLog, StageError, record_import, source_code
from ptpipe_torch.torchvision_compat import is_of_missing_operators, torchvision

if TYPE_CHECKING:
    import torch

_PREFIX = "ptpipe_source"
"""Of the names that files are imported under, which nothing else has."""
_imported: dict[str, tuple[str, ReadLog]] = {}
"""The digest of the bytes that each file, and what it imports from its folder, had when this process imported it, and
the files that were read then."""

_settings: dict[Path, dict[str, Any]] = {}
"""What the code of each file has set for the whole process: working directory, torch's threads and default dtype."""


def load_function(file: Path, name: str) -> Callable[..., Any]:
    """Return a function or a class of a file, or of a module of its folder that it is imported from.

    The file is run, once, as a module: code under `if __name__ == "__main__":` is not. Its folder is where imports are
    searched first, then and whenever the function is called. What the function raises becomes a StageError that names
    the line. Raises StageError where there is no such function, and for what the file raises.
    """
    module = _module(file)
    found = vars(module).get(name)
    # What comes from elsewhere could be anything: `from os import system`.
    folder = [module.__name__, *source_code(file).modules]
    if not (inspect.isfunction(found) or inspect.isclass(found)) or found.__module__ not in folder:
        raise StageError(f"{file}: {name} is not a function or a class that is defined in it or in its folder")
    return _reporting(file, found)


@contextmanager
def own_errors(file: Path, what: str, remedy: str = "") -> Iterator[None]:
    """Make code of the user's find the modules beside it inside the `with`; what it raises becomes a StageError.

    `what`: it is that fails, for the error: `make_net()`. `remedy`: ends the error.
    """
    try:
        with _importable(file.parent), _own_settings(file):
            yield
    except PtpipeError:
        raise
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise StageError(describe_failure(file, what, error) + remedy) from error


def describe_failure(file: Path, what: str, error: BaseException) -> str:
    """Return an error of the user's code in one line, with the line of the file, or of its folder, that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:500]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).parent.is_relative_to(file.parent)]
    # A virtual environment may be in the folder; Debian's name of the folder of packages is another.
    own = [frame for frame in inside if not {"site-packages", "dist-packages"} & {*Path(frame.filename).parts}]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line})" if own else ""
    return f"{file.name}: {what} raised {text}{place}"


def _reporting(file: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with own_errors(file, f"{function.__name__}()"):
            return function(*args, **kwargs)

    return call


def _module(file: Path) -> ModuleType:
    """Return the module of a file: the one imported before, unless it or what it imports has changed since."""
    code = source_code(file)
    place = hashlib.sha256(os.fsencode(file)).hexdigest()[:16]
    name = "_".join((_PREFIX, place, re.sub(r"\W", "_", file.stem)))
    digest, log = _imported.get(name, ("", ReadLog()))
    if name in sys.modules and digest == code.sha256 and log.is_current:
        log.repeat()
        return sys.modules[name]
    _forget(file, name, code.modules)
    _settings.pop(file, None)
    importlib.invalidate_caches()
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise StageError(f"{file} is not a Python file: its name must end in .py")
    sys.modules[name] = module = module_from_spec(spec)
    try:
        with own_errors(file, "importing it"), ReadLog() as log:
            _execute(spec.loader, module)
    except BaseException:
        del sys.modules[name]
        raise
    _imported[name] = code.sha256, log
    for imported in filter(None, map(sys.modules.get, (name, *code.modules))):
        record_import(imported)
    return module


def _forget(file: Path, name: str, beside: Mapping[str, Path]) -> None:
    """Drop what was imported of the file and its folder before it changed.

    Raises StageError where another folder's module has the name of one of these: Python would take that one.
    """
    for module_name, path in beside.items():
        loaded = getattr(sys.modules.get(module_name), "__file__", None) or "one of Python's own"
        if module_name in sys.modules and not _is_same(loaded, path):
            raise StageError(
                f"{file.name} imports {module_name} from its folder, but another module of this name, {loaded}, is "
                f"imported already: rename {path}"
            )
    for module_name in (name, *beside):
        sys.modules.pop(module_name, None)


def _execute(loader: Loader, module: ModuleType) -> None:
    """Run a file; once more if it, or a library that it imports, needs torchvision beside a CPU build of torch."""
    try:
        loader.exec_module(module)
    except RuntimeError as error:
        if not is_of_missing_operators(error):
            raise
        torchvision()
        loader.exec_module(module)


def _is_same(one: str, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Search imports in a folder first inside the `with`, as in a script there; write no bytecode beside it."""
    before = sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        if str(folder) in sys.path:  # the user's code may change the path, too
            sys.path.remove(str(folder))


@contextmanager
def _own_settings(file: Path) -> Iterator[None]:
    """Give the code of a file the settings of the process that it has set before, inside the `with` alone.

    A script may begin with `os.chdir(os.path.dirname(__file__))`: what it opens later is relative to that folder, and
    the paths of a manifest are not.
    """
    import torch

    accessors: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "folder": (Path.cwd, os.chdir),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    }
    before = {name: get() for name, (get, _) in accessors.items()}
    own = _settings.setdefault(file, {})
    for name, value in own.items():
        accessors[name][1](value)
    entered = before | own
    try:
        yield
    finally:
        for name, (get, put) in accessors.items():
            if (now := get()) != entered[name]:
                own[name] = now
            if now != before[name]:
                put(before[name])


@contextmanager
def seeded_everywhere(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the random numbers of torch, NumPy and Python inside the `with`; their states are restored on exit.

    `device`: an accelerator whose stream is seeded too.
    """
    import random

    import numpy as np

    from ptpipe_torch.runtime import seeded

    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with seeded(seed, device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
