"""Print requirements derived from pyproject.toml: `core` for an environment without torch, `lowest` as constraints.

Only the standard library: CI runs this before anything is installed.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What the tests need beside the core and the reporters themselves.
TEST_TOOLS = {"hypothesis", "jsonschema", "psutil", "pytest", "pytest-timeout", "pytest-xdist"}


def project() -> dict:
    """Return the `[project]` table."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def name_of(requirement: str) -> str:
    """Return the distribution's name: `ruamel.yaml` of `ruamel.yaml>=0.18.6`."""
    return re.match(r"[\w.-]+", requirement)[0]


def imported_modules(folder: Path) -> set[str]:
    """Return the top-level modules that a folder's files import, anywhere in them."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def core() -> Iterator[str]:
    """Yield the package's dependencies that the core and the reporters import, and what their tests need."""
    modules = imported_modules(ROOT / "pipeline") | imported_modules(ROOT / "plugins" / "ptpipe_report")
    for requirement in project()["dependencies"]:
        if re.split(r"[.-]", name_of(requirement))[0].lower() in modules:
            yield requirement
    yield from (tool for tool in project()["optional-dependencies"]["dev"] if name_of(tool) in TEST_TOOLS)


def lowest() -> Iterator[str]:
    """Yield a pin to the lower bound of every direct dependency of the package, and of the reader of tables.

    The newest pyarrow does not import beside the oldest NumPy, and does not say so in its metadata.
    """
    for requirement in (*project()["dependencies"], *project()["optional-dependencies"]["table"]):
        bound = re.search(r">=([\w.]+)", requirement)
        if not bound:
            raise SystemExit(f"pyproject.toml: {requirement!r} has no lower bound")
        yield f"{name_of(requirement)}=={bound[1]}"


if __name__ == "__main__":
    print("\n".join({"core": core, "lowest": lowest}[sys.argv[1]]()))
