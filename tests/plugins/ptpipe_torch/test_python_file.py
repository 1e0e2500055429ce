"""Functions of files that know nothing of ptpipe: where they find their modules, and what an error shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ptpipe import StageError
from ptpipe_torch.python_file import load_function
from ptpipe_torch.runtime import torch_threads

from ...forks import Fork

MINE = """
import sys
from parts_of_mine import double
from os import system

PATH = list(sys.path)
count = 0

def answer(number=1):
    from later_part import three
    return double(number) + three

def fails(): return answer(None)
def leaves(): sys.exit(4)
class Answer: pass
constant = 3
shorthand = lambda: 4

if __name__ == "__main__":
    raise SystemExit("it was run as a program")
"""


@pytest.fixture
def mine(tmp_path: Path, modules_forgotten: None) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "parts_of_mine.py").write_text("def double(number):\n    return 2 * number\n")
    (tmp_path / "later_part.py").write_text("three = 3\n")
    return tmp_path / "mine.py"


def test_it_finds_the_modules_beside_it_when_imported_and_when_called(mine: Path) -> None:
    before = list(sys.path)
    assert load_function(mine, "answer")(number=4) == 11
    assert sys.path == before
    assert load_function(mine, "Answer")().__class__.__name__ == "Answer"
    assert load_function(mine, "shorthand")() == 4
    assert not list(mine.parent.rglob("__pycache__")), "a stranger's folder stays as it was"


def test_a_file_is_run_once_until_it_changes(mine: Path) -> None:
    first = load_function(mine, "answer").__wrapped__
    assert load_function(mine, "answer").__wrapped__ is first
    mine.write_text(mine.read_text() + "# a comment\n")
    assert load_function(mine, "answer").__wrapped__ is not first
    (mine.parent / "parts_of_mine.py").write_text("def double(number):\n    return 5 * number\n")
    assert load_function(mine, "answer")(number=4) == 23, "what it imports is imported again, too"


def test_two_files_of_one_name_are_two_modules(mine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text("def answer(): return 'other'\n")
    assert load_function(mine, "answer")(0) == 3
    assert load_function(other, "answer")() == "other"
    assert load_function(mine, "answer")(0) == 3


def test_modules_of_one_name_in_two_folders_are_refused(mine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    (other.parent / "parts_of_mine.py").write_text("")
    other.write_text("import parts_of_mine\ndef answer(): return 1\n")
    load_function(mine, "answer")
    with pytest.raises(StageError, match=r"mine.py imports parts_of_mine from its folder, but another .*: rename /"):
        load_function(other, "answer")
    (other.parent / "json.py").write_text("")
    other.write_text("import json\ndef answer(): return 1\n")
    with pytest.raises(StageError, match=r"another module of this name, .*/json/__init__.py, is imported already"):
        load_function(other, "answer")


@pytest.mark.parametrize("name", ["system", "sys", "constant", "nothing", "double.x", "__builtins__", "__loader__"])
def test_only_functions_of_its_own_folder_are_returned(mine: Path, name: str) -> None:
    with pytest.raises(StageError, match="is not a function or a class that is defined in it or in its folder"):
        load_function(mine, name)
    assert load_function(mine, "double")(2) == 4, "from the module beside it"


def test_errors_name_the_line(mine: Path) -> None:
    with pytest.raises(StageError) as raised:
        load_function(mine, "fails")()
    assert str(raised.value) == (
        "mine.py: fails() raised TypeError: unsupported operand type(s) for *: 'int' and 'NoneType' "
        "(parts_of_mine.py:2: return 2 * number)"
    )
    assert isinstance(raised.value.__cause__, TypeError)
    with pytest.raises(StageError, match=r"mine.py: leaves\(\) raised SystemExit: 4 \(mine.py:14"):
        load_function(mine, "leaves")()


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_library_in_the_folder_is_not_the_users_code(
    mine: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    library = mine.parent / ".venv" / folder / f"library_of_mine_in_{folder[:4]}.py"
    library.parent.mkdir(parents=True)
    library.write_text("def work():\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(str(library.parent))
    mine.write_text(f"import {library.stem} as library\ndef calls(): return library.work()\n")
    with pytest.raises(StageError, match=r"ZeroDivisionError: division by zero \(mine.py:2: def calls"):
        load_function(mine, "calls")()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"mine.py: importing it raised ZeroDivisionError: division by zero \(mine.py:1: 1 / 0\)"),
        ("def f(:", r"mine.py:1: SyntaxError: invalid syntax"),
        (
            "import no_such_module",
            r"mine.py: importing it raised ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("from .parts_of_mine import double", r"importing it raised ImportError: attempted relative import"),
        ("raise SystemExit('usage: ...')", r"mine.py: importing it raised SystemExit: usage: ..."),
    ],
)
def test_a_file_that_cannot_be_imported(mine: Path, text: str, message: str) -> None:
    mine.write_text(text)
    before = set(sys.modules)
    with pytest.raises(StageError, match=message):
        load_function(mine, "f")
    assert not [name for name in set(sys.modules) - before if name.startswith("ptpipe_source")]


def test_ctrl_c_is_no_error_of_the_function(mine: Path) -> None:
    mine.write_text("def stop(): raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_function(mine, "stop")()


def print_name(file: Path) -> None:
    assert "torchvision" not in sys.modules
    print(load_function(file, "name")())


@pytest.mark.usefixtures("fork_server")
def test_torchvision_is_found_as_ptpipe_finds_it(tmp_path: Path) -> None:
    """In a process without it: with a CPU build of torch, the file's own import would fail."""
    (tmp_path / "mine.py").write_text("from torchvision import transforms\ndef name(): return transforms.__name__\n")
    with Fork(print_name, tmp_path / "mine.py") as fork:
        out, err = fork.communicate(timeout=120)
    assert out == "torchvision.transforms\n", err


@pytest.mark.usefixtures("fork_server")
def test_torchvision_is_found_by_libraries_that_the_file_imports(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    (library / "networks.py").write_text("from torchvision import models\n")
    text = (
        f"import sys\nsys.path.append({str(library)!r})\nimport networks\ndef name(): return networks.models.__name__\n"
    )
    (tmp_path / "mine.py").write_text(text)
    with Fork(print_name, tmp_path / "mine.py") as fork:
        out, err = fork.communicate(timeout=120)
    assert out == "torchvision.models\n", err


def test_a_torchvision_that_is_missing_is_the_files_error(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    mine.write_text("import torchvision\ndef answer(): pass\n")
    with pytest.raises(StageError, match=r"importing it raised ModuleNotFoundError: .*torchvision.* \(mine.py:1"):
        load_function(mine, "answer")


SETTING = """
import os
import torch

os.chdir(os.path.dirname(os.path.abspath(__file__)))
torch.set_num_threads(3)
torch.set_default_dtype(torch.float64)
import parts_of_mine

def settings(): return os.path.basename(os.getcwd()), torch.get_num_threads(), torch.get_default_dtype()
def moves():
    os.chdir("/")
    raise ValueError("here")
"""


def test_what_it_sets_for_the_process_is_set_for_its_own_code_alone(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings() -> tuple[Path, int, torch.dtype]:
        return Path.cwd(), torch.get_num_threads(), torch.get_default_dtype()

    folder = tmp_path / "scripts"
    folder.mkdir()
    mine.write_text(SETTING)
    for file in tmp_path.glob("*.py"):
        file.rename(folder / file.name)
    monkeypatch.chdir(tmp_path)
    with torch_threads(1):
        before = settings()
        function = load_function(folder / "mine.py", "settings")
        assert settings() == before
        assert function() == ("scripts", 3, torch.float64)
        with pytest.raises(StageError, match="here"):
            load_function(folder / "mine.py", "moves")()
        assert settings() == before
        (folder / "mine.py").write_text("def settings():\n    import os\n    return os.getcwd()\n")
        assert load_function(folder / "mine.py", "settings")() == str(tmp_path)
