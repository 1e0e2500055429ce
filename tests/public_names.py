"""The public modules and their names, as the documentation and the rules of the house know them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar

ROOT = Path(__file__).parent.parent


def public_modules() -> set[str]:
    """Return what the import contract of the built-in plugins leaves them, which strangers may use as well."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        each for each in project["tool"]["importlinter"]["contracts"] if each["name"].startswith("built-in plugins use")
    )
    files = (ROOT / "pipeline" / "ptpipe").glob("*")
    modules = {f"ptpipe.{path.stem}" for path in files if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return {"ptpipe", "ptpipe_torch"} | (modules - {*contract["forbidden_modules"], "ptpipe.__init__"})


def public_names(module: ModuleType) -> list[str]:
    """Return `__all__`, or the functions and classes that the module defines."""
    members = {name: value for name, value in vars(module).items() if not isinstance(value, TypeVar | ParamSpec)}
    defined = [name for name, value in members.items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in defined if not name.startswith("_")])
