"""What a plugin may import: enough for every hook, all that the built-in plugins use, and light."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ptpipe
from ptpipe import hookspecs

ROOT = Path(__file__).parents[2]
CORE = ROOT / "pipeline" / "ptpipe"
PAGES = ["ptpipe", "ptpipe.launching", "ptpipe.commands", "ptpipe.testing", "ptpipe.host", "ptpipe.sections"]
PYTHONS_OWN = {"Callable", "Iterable", "Mapping", "Path", "None"}


def test_every_type_in_a_hooks_signature_is_public():
    hooks = [value for name, value in vars(hookspecs).items() if name.startswith("ptpipe_")]
    signatures = " ".join(str(annotation) for hook in hooks for annotation in hook.__annotations__.values())
    named = set(re.findall(r"[A-Z]\w+", signatures)) - PYTHONS_OWN
    assert {"Plan", "Call", "Event", "Nodes", "Reporter", "Stage"} <= named
    assert named - set(ptpipe.__all__) == set()


def test_every_event_is_public():
    events = importlib.import_module("ptpipe.events")
    defined = {name for name, value in vars(events).items() if getattr(value, "__module__", "") == "ptpipe.events"}
    launching = importlib.import_module("ptpipe.launching")
    assert {"Progress", "RunFinished"} < defined
    assert (
        defined - set(ptpipe.__all__)
        == {
            "FilesRead",
            "ModulesImported",
            "event_from_json",
            "event_to_json",
        }
        <= set(launching.__all__)
    )


@pytest.mark.parametrize("page", ["ptpipe", "ptpipe.launching", "ptpipe.commands"])
def test_a_page_lists_what_it_has(page):
    module = importlib.import_module(page)
    assert module.__all__ == sorted(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    undocumented = [name for name in module.__all__ if not inspect.getdoc(getattr(module, name))]
    assert set(undocumented) <= {"manifest_argument", "set_option", "artifacts_option", "json_option", "JSON"}


def imported(path: Path) -> set[str]:
    """The modules of the core that a file imports, also under TYPE_CHECKING and inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module == "ptpipe":
            found |= {f"ptpipe.{alias.name}" for alias in node.names if alias.name not in ptpipe.__all__}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("ptpipe.")}


def test_built_in_plugins_and_examples_use_only_what_strangers_can():
    sources = [path for root in ("plugins", "examples") for path in (ROOT / root).rglob("*.py")]
    private = {str(path.relative_to(ROOT)): imported(path) - {*PAGES, "ptpipe.__version__"} for path in sources}
    assert {path: modules for path, modules in private.items() if modules} == {}


def test_the_import_contract_knows_every_private_module():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (each for each in contracts if "strangers" in each["name"])
    modules = {
        f"ptpipe.{path.stem}" for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(contract["forbidden_modules"]) == modules - {*PAGES, "ptpipe.__init__"}


def test_the_core_names_no_cluster():
    words = re.compile(r"torchrun|slurm|torchelastic|\bleader|\bfollower", re.IGNORECASE)
    named = {str(path): words.findall(path.read_text(encoding="utf-8")) for path in CORE.rglob("*.py")}
    assert {path: found for path, found in named.items() if found} == {}


def test_importing_ptpipe_is_light():
    heavy = "{'pydantic', 'pluggy', 'ruamel', 'importlib.metadata', 'rich', 'torch', 'numpy'}"
    code = f"import sys, ptpipe, ptpipe.cli, ptpipe.commands; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_strangers_stage_is_at_most_25_lines():
    """Lines of code: no blank ones, comments or docstrings."""
    tree = ast.parse((ROOT / "examples" / "one_file" / "prune.py").read_bytes())
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt | ast.expr | ast.arg | ast.keyword | ast.alias) and not is_docstring:
            lines |= {node.lineno} if hasattr(node, "body") else set(range(node.lineno, node.end_lineno + 1))
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    assert 15 < len(lines - docstrings) <= 25
