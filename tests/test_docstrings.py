"""Public docstrings say what each parameter is."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

from ptpipe import Plan, hookspecs

from .public_names import public_modules, public_names

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
NO_WORDS_NEEDED = {"self", "cls", "ctx", "config"}
"""The receiver, and what every stage function and hook of a stage takes."""


def callables(owner: Any) -> Iterator[tuple[str, Callable[..., Any], list[str]]]:
    """Yield each function of a public name, with the docstrings that may explain its parameters."""
    if inspect.isfunction(inspect.unwrap(owner)) and not is_fixture(owner) and owner.__module__.startswith("ptpipe"):
        yield owner.__qualname__, owner, [inspect.getdoc(owner) or ""]
    if not inspect.isclass(owner):
        return
    bases = [base for base in owner.__mro__ if base.__module__.startswith("ptpipe")]
    for name in dict.fromkeys(name for base in bases for name in vars(base)):
        function = inspect.getattr_static(owner, name)
        function = function.__func__ if isinstance(function, classmethod | staticmethod) else function
        is_public = not name.startswith("_") or name == "__call__" or (name == "__init__" and not is_dataclass(owner))
        if is_public and inspect.isfunction(function) and function.__module__.startswith("ptpipe"):
            overridden = [vars(base)[name] for base in (*bases, hookspecs) if name in vars(base)]
            docstrings = [inspect.getdoc(each) or "" for each in (*overridden, *bases)]
            yield f"{owner.__qualname__}.{name}", function, docstrings


def is_fixture(value: Any) -> bool:
    """Whether pytest passes the parameters: an object since pytest 8.4, before a function with a mark."""
    return type(value).__module__.startswith("_pytest") or hasattr(value, "_pytestfixturefunction")


def is_clear_by_itself(parameter: inspect.Parameter) -> bool:
    """Whether its annotation is a class of the same name (`group: WorkerGroup`) or another function's parameters."""
    annotation = str(parameter.annotation).removesuffix(" | None").rpartition(".")[2]
    words = "_" + "_".join(WORD.findall(annotation)).lower()
    is_class = annotation.isidentifier() and annotation[0].isupper()
    return (is_class and words.endswith(f"_{parameter.name}")) or str(parameter.annotation) in ("P.args", "P.kwargs")


def unexplained(function: Callable[..., Any], docstrings: list[str]) -> list[str]:
    """Return the parameters that no docstring has in backticks."""
    code = " ".join(quoted for text in docstrings for quoted in re.findall(r"`([^`]+)`", text))
    explained = set(re.findall(r"\w+", code))
    parameters = [each for each in inspect.signature(function).parameters.values() if not is_clear_by_itself(each)]
    return [each.name for each in parameters if each.name not in explained | NO_WORDS_NEEDED]


def unexplained_in(module: str) -> list[str]:
    loaded = importlib.import_module(module)
    return [
        f"{function.__module__}: {name}({', '.join(missing)})"
        for public in public_names(loaded)
        for name, function, docstrings in callables(getattr(loaded, public))
        if (missing := unexplained(function, docstrings))
    ]


@pytest.mark.parametrize("module", [*sorted(public_modules()), "ptpipe.hookspecs"])
def test_every_parameter_is_explained(module):
    found = sorted(set(unexplained_in(module)))
    assert not found, "\n".join(["not in backticks in the docstring:", *found])


def test_a_parameter_is_explained_in_backticks_by_itself_or_by_its_base_or_class():
    class Base:
        """`path`: the file."""

        def read(self, path: str, size: int, plan: Plan, *, label: str) -> None:
            """Read `size` bytes, with a label."""

    Base.__module__ = Base.read.__module__ = "ptpipe"

    class Derived(Base):
        def read(self, path: str, size: int, plan: Plan, *, label: str) -> None: ...

    Derived.__module__ = Derived.read.__module__ = "ptpipe"
    for owner in (Base, Derived):
        ((name, function, docstrings),) = callables(owner)
        assert name.endswith("read")
        assert unexplained(function, docstrings) == ["label"]
