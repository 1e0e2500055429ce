"""What `validate` finds in a function that it does not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ptpipe import ManifestError, load_plan

MINE = """
raise SystemExit("validate runs nothing")
import functools, parts
from parts import deep, renamed as alias
from torch import load
def plain(width, depth=2, *, bias, scale=1.0): ...
def any_names(width, **options): ...
def positional(width, /): ...
async def later(): ...
@functools.cache
def decorated(width): ...
class Net(Base):
    def __init__(self, width, depth=2): ...
class Inherits(Net): ...
partial = functools.partial(plain, 1)
if condition:
    def conditional(): ...
else:
    def otherwise(width): ...
try:
    import fast
except ImportError:
    def fast(): ...
"""
PARTS = "from more_parts import deep\ndef renamed(size): ...\n"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "more_parts.py").write_text("def deep(size): ...\n")

    def problems(function: str, **arguments: Any) -> list[str]:
        options = {"file": "mine.py", "function": function, "arguments": arguments}
        stages = {"data": {"uses": "data.digits"}, "net": {"uses": "model.python", "with": options}}
        (tmp_path / "m.yaml").write_text(json.dumps({"version": 1, "name": "m", "stages": stages}, indent=1))
        try:
            load_plan(tmp_path / "m.yaml")
        except ManifestError as error:
            return [str(problem).replace(f"{tmp_path}/", "") for problem in error.problems]
        return []

    return problems


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("plain", {"width": 3, "bias": True}),
        ("plain", {"width": [1, {"a": None}], "depth": 1, "bias": "x", "scale": 0.5}),
        ("any_names", {"width": 1, "whatever": 2}),
        ("decorated", {"who": "knows"}),
        ("Net", {"width": 3}),
        ("Inherits", {"who": "knows"}),
        ("partial", {"depth": 3}),
        ("conditional", {}),
        ("otherwise", {"width": 1}),
        ("alias", {"size": 1}),
        ("deep", {"size": 1}),
        ("fast", {}),
    ],
)
def test_what_fits(check: Any, function: str, arguments: Any) -> None:
    assert check(function, **arguments) == []


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("plian", {}, "net: mine.py has no function or class 'plian' at its top level (did you mean 'plain'?)"),
        ("plain", {"widht": 3, "bias": 1}, "net: plain() has no argument 'widht' (did you mean 'width'?)"),
        ("plain", {"depth": 3}, "net: plain() needs width, bias, too: give values under arguments"),
        ("any_names", {}, "net: any_names() needs width, too: give values under arguments"),
        ("Net", {}, "net: Net() needs width, too: give values under arguments"),
        ("Net", {"width": 1, "self": 2}, "net: Net() has no argument 'self'"),
        ("deep", {"sise": 1}, "net: deep() has no argument 'sise' (did you mean 'size'?)"),
        ("renamed", {}, "net: mine.py has no function or class 'renamed' at its top level"),
        ("load", {}, "net: 'load' is imported into mine.py from elsewhere: define a function that calls it"),
        ("parts", {}, "net: 'parts' is imported into mine.py from elsewhere: define a function that calls it"),
        ("later", {}, "net: later in mine.py is async: it must be a plain function"),
    ],
)
def test_what_does_not_fit(check: Any, function: str, arguments: Any, message: str) -> None:
    (problem,) = check(function, **arguments)
    place, _, text = problem.partition(": ")
    assert text == message and place.startswith("m.yaml:"), problem


def test_errors_are_at_the_option(check: Any, tmp_path: Path) -> None:
    (problem,) = check("plain", width=1, bias=2, depht=3)
    line = int(problem.split(":")[1])
    assert "depht" in (tmp_path / "m.yaml").read_text().splitlines()[line - 1]


def test_an_argument_without_a_name_cannot_be_given(check: Any) -> None:
    problems = [problem.partition(": ")[2] for problem in check("positional", width=1)]
    assert problems == ["net: positional() has no argument 'width'"]


def test_a_file_that_is_no_python(check: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\ndef f(:\n")
    (problem,) = check("f")
    assert problem.endswith("net: mine.py:2 is no Python code: invalid syntax")
    (tmp_path / "mine.py").write_bytes(b"\x00\xff")
    (problem,) = check("f")
    assert "mine.py" in problem and "is no Python code" in problem


def test_a_star_import_may_bring_anything(check: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from parts import *\n")
    assert check("renamed", size=1) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "nets_of_mine"
    (package / "deeper").mkdir(parents=True)
    (package / "__init__.py").write_text("from .small import Small, tiny as smallest\nfrom .deeper import Deep\n")
    (package / "small.py").write_text("class Small:\n    def __init__(self, width): ...\ndef tiny(depth): ...\n")
    (package / "deeper" / "__init__.py").write_text("from .deepest import Deep\n")
    (package / "deeper" / "deepest.py").write_text("from ..small import tiny\ndef Deep(size): ...\n")
    return package


@pytest.mark.parametrize(
    ("line", "function", "argument"),
    [
        ("from nets_of_mine import Small", "Small", "width"),
        ("from nets_of_mine import smallest as it", "it", "depth"),
        ("from nets_of_mine import Deep", "Deep", "size"),
        ("from nets_of_mine.small import Small", "Small", "width"),
        ("from nets_of_mine.deeper.deepest import tiny", "tiny", "depth"),
    ],
)
def test_what_a_package_imports_from_itself(
    check: Any, tmp_path: Path, package: Path, line: str, function: str, argument: str
) -> None:
    (tmp_path / "mine.py").write_text(f"{line}\n")
    assert check(function, **{argument: 1}) == []
    (problem,) = check(function, **{argument: 1, f"{argument}s": 1})
    assert f"has no argument '{argument}s'" in problem


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (
            "Small",
            "try:\n    from small_of_mine import Small\nexcept ImportError:\n    from .small_of_mine import Small\n",
        ),
        ("make", "if TYPE_CHECKING:\n    from .small_of_mine import Other\n"),
    ],
)
def test_an_import_from_a_package_that_may_not_run(check: Any, tmp_path: Path, function: str, lines: str) -> None:
    (tmp_path / "mine.py").write_text(f"{lines}def make(width): ...\n")
    assert check(function, width=1) == []


def test_a_file_inside_of_a_package(check: Any, tmp_path: Path, package: Path) -> None:
    (tmp_path / "mine.py").write_text("from .nets_of_mine import Small\n")
    (problem,) = check("Small", width=1)
    assert problem.endswith(
        f"net: mine.py imports from the package {tmp_path.name} that it is a part of, so it can't be run on its own: "
        f"name a file beside the folder {tmp_path.name}, with `from {tmp_path.name}.mine import Small` in it"
    )
