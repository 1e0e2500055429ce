from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ptpipe import IntegrityError
from ptpipe_torch import FunctionRef, builder, transform


@builder
def linear(size: int, sizes: list[int] | None = None) -> nn.Module:
    return nn.Linear(size, size)


@transform
def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Answerer:
    """Answers for any attribute, as some objects do."""

    def __getattr__(self, name: str) -> str:
        return "builder"


answerer = Answerer()


def test_a_part_finds_its_function_again():
    reference = FunctionRef.to(linear, size=3)
    assert reference.resolve("builder") is linear
    assert reference.resolve("builder")(**reference.arguments).in_features == 3
    assert FunctionRef.to(frozen).resolve("transform") is frozen


def test_arguments_are_what_json_will_give_back():
    reference = FunctionRef.to(linear, size=3, sizes=(1, 2))
    assert reference.arguments == {"size": 3, "sizes": [1, 2]}
    assert json.loads(json.dumps(reference.arguments)) == reference.arguments


@pytest.mark.parametrize(
    "address",
    [
        "os:system",
        "os.path:join",
        "builtins:eval",
        "subprocess:Popen",
        "torch.hub:load",
        "torch.nn:Linear",
        f"{__name__}:answerer",
        f"{__name__}:missing",
        f"{__name__}:linear.__call__",
        f"{__name__}:",
        __name__,
        "",
        ":",
        ".:linear",
    ],
)
def test_an_address_of_anything_unmarked_is_refused(address):
    with pytest.raises(IntegrityError):
        FunctionRef(address).resolve("builder")


def test_a_part_is_refused_in_the_other_role():
    with pytest.raises(IntegrityError, match="is not a transform"):
        FunctionRef.to(linear).resolve("transform")
    with pytest.raises(IntegrityError, match="is not a builder"):
        FunctionRef.to(frozen).resolve("builder")


@given(st.text(max_size=40))
def test_no_text_raises_anything_but_integrity_error(address):
    with pytest.raises(IntegrityError):
        FunctionRef(address).resolve("builder")


@pytest.mark.parametrize("function", [len, lambda: nn.Identity(), nn.Linear, 3])
def test_only_functions_at_the_top_of_a_module_can_be_marked(function):
    with pytest.raises(TypeError, match="at the top level of a module"):
        builder(function)


def test_a_part_of_an_unmarked_function_or_of_values_that_are_not_json_is_the_plugins_mistake():
    with pytest.raises(TypeError, match="not marked"):
        FunctionRef.to(dedent)
    with pytest.raises(TypeError, match="not JSON serializable"):
        FunctionRef.to(linear, size={1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        FunctionRef.to(linear, size=float("nan"))


def run_in(folder: Path, code: str) -> str:
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A plugin package with a room that is not loaded yet, and a package that is no plugin; each tells when it runs."""
    for name in ("a_plugin", "a_library"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "room.py").write_text(
            "print(__name__, 'runs')\nfrom ptpipe_torch import builder\n@builder\ndef net(): return 'a network'\n"
        )
        (folder / "__main__.py").write_text("print('a program runs')\n")
    front_door = "from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_stages(): return []\n"
    (tmp_path / "a_plugin" / "stages.py").write_text(front_door)
    return tmp_path


def test_a_module_that_imports_on_demand_is_not_asked(monkeypatch):
    def imported(name):
        raise AssertionError(f"{name} would be imported")

    monkeypatch.setattr(sys.modules[__name__], "__getattr__", imported, raising=False)
    with pytest.raises(IntegrityError, match="is not a builder"):
        FunctionRef(f"{__name__}:missing").resolve("builder")


RESOLVE = """
from ptpipe import IntegrityError
from ptpipe_torch import FunctionRef
import {loaded}
try:
    print(FunctionRef({address!r}).resolve("builder")())
except IntegrityError as error:
    print(error)
"""


def test_a_room_of_a_loaded_plugin_is_imported(packages):
    output = run_in(packages, RESOLVE.format(loaded="a_plugin.stages", address="a_plugin.room:net"))
    assert output.splitlines() == ["a_plugin.room runs", "a network"]


@pytest.mark.parametrize(
    ("loaded", "address"),
    [
        ("json", "a_plugin.room:net"),  # its plugin is installed and not loaded
        ("a_library", "a_library.room:net"),  # loaded, and no plugin
        ("a_plugin.stages", "a_plugin.__main__:net"),  # a program
        ("json", "json.tool:main"),
    ],
)
def test_nothing_else_is_even_imported(packages, loaded, address):
    output = run_in(packages, RESOLVE.format(loaded=loaded, address=address))
    assert output == f"{address}: its plugin is not loaded (name it under `plugins:`)"


def test_a_room_that_is_missing_or_broken_is_named(packages):
    missing = run_in(packages, RESOLVE.format(loaded="a_plugin.stages", address="a_plugin.cellar:net"))
    assert missing == "a_plugin.cellar:net: No module named 'a_plugin.cellar'"
