"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import ptpipe
from ptpipe import ExitCode, hookspecs

ROOT = Path(__file__).parent.parent
README = ROOT / "pipeline" / "README.md"
SOURCES = sorted(path for root in ("pipeline", "plugins") for path in (ROOT / root).rglob("*.py"))
CORE = [path for path in SOURCES if path.is_relative_to(ROOT / "pipeline")]
BEGIN, END = "<!-- hooks: written by `python tests/test_house.py` -->\n", "<!-- end of hooks -->"


def relative(path):
    return path.relative_to(ROOT).as_posix()


@cache
def syntax_tree(path):
    return ast.parse(path.read_bytes())


@cache
def imports_of(path):
    """Every module name that a file imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def test_who_may_import_whom():
    checked = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_package_ships_its_types():
    packages = {path.parent for path in SOURCES if path.name == "__init__.py" and path.parent.parent.parent == ROOT}
    shipped = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert len(packages) > 10
    assert sorted(path.name for path in packages if f"{path.name}/py.typed" not in shipped) == []


def test_files_are_short():
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length >= 400} == {}


def functions_of(path):
    """Every function with its qualified name, methods and inner functions included."""

    def inner(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    yield name, child
                yield from inner(child, f"{name}.")
            else:
                yield from inner(child, prefix)

    return inner(syntax_tree(path), f"{relative(path)}:")


def num_lines(function):
    """From `def` to the last line; decorators and the docstring are not counted."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def num_parameters(function):
    """What a caller passes; `self` and `cls` are not counted."""
    named = function.args
    names = [arg.arg for arg in (*named.posonlyargs, *named.args, *named.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_functions_are_short():
    lengths = {name: num_lines(function) for path in SOURCES for name, function in functions_of(path)}
    assert len(lengths) > 500
    assert {name: length for name, length in lengths.items() if length > 40} == {}


def may_take_many(path, function):
    """Whether the line of `def` exempts it, with a reason: a command has a parameter for each option."""
    line = path.read_text(encoding="utf-8").splitlines()[function.lineno - 1]
    return re.search(r"# noqa: PLR0913  # \w", line)


def test_functions_take_few_parameters():
    numbers = {
        name: num_parameters(function)
        for path in SOURCES
        for name, function in functions_of(path)
        if not may_take_many(path, function)
    }
    assert {name: number for name, number in numbers.items() if number > 6} == {}


def test_lines_and_parameters_are_counted():
    code = '@decorated\ndef f(self, a, /, b, *c, d=1, **e):\n    """One.\n\n    Two.\n    """\n    return a\n'
    (function,) = ast.parse(code).body
    assert (num_lines(function), num_parameters(function)) == (2, 3)


def test_the_core_does_not_know_torch():
    heavy = {"torch", "torchvision", "numpy", "onnx", "onnxruntime", "sklearn", "safetensors"}
    imported = {relative(path): {name.partition(".")[0] for name in imports_of(path)} for path in CORE}
    assert {name: modules & heavy for name, modules in imported.items() if modules & heavy} == {}


@cache
def attributes_of(path):
    """Every attribute that a file reads, with what stands before it: `os.cpu_count`."""
    return {ast.unparse(node) for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.Attribute)}


CPUS = re.compile(r"\.((process_)?cpu_count|sched_getaffinity)$|^platform\.processor$")


def test_the_processor_is_asked_in_one_file():
    users = {path for path in SOURCES if any(map(CPUS.search, attributes_of(path)))}
    assert users == {ROOT / "pipeline" / "ptpipe" / "host.py"}


EAGER_INT8 = re.compile(
    r"^torch\.(ao|ops\.quantized|ops\.quantized_decomposed|backends\.quantized)\b"
    r"|^torch\.(quint8|qint8|qint32|quint4x2|quint2x4|per_(tensor|channel)_(affine|symmetric)\w*)$"
    r"|\.(q_scale|q_zero_point|q_per_channel_\w+|int_repr|quantize_per_\w+|is_quantized)$"
)


def eager_int8_names(path):
    """What a file uses of torch.ao and of eager quantized tensors."""
    return {name for name in imports_of(path) | attributes_of(path) if EAGER_INT8.search(name)}


def test_onnxruntime_is_imported_without_its_telemetry():
    users = {path for path in SOURCES if "onnxruntime" in imports_of(path)}
    assert users == {ROOT / "plugins" / "ptpipe_torch" / "ort.py"}, "others import it from there"


def test_eager_quantized_tensors_are_used_in_one_package():
    users = {path.parent for path in SOURCES if eager_int8_names(path)}
    assert users == {ROOT / "plugins" / "ptpipe_torch" / "int8"}


def unsafe_words(path):
    """What in a file may run code out of data."""
    text = path.read_text(encoding="utf-8")
    modules = {name.partition(".")[0] for name in imports_of(path)}
    words = modules & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for call in re.finditer(r"\btorch\.load\(", text):
        if "weights_only=True" not in text[call.end() : call.end() + 200].partition(")")[0]:
            words.add("torch.load without weights_only=True")
    return words | {word for word in ("allow_pickle=True", "yaml.load(", "eval(", "exec(") if f" {word}" in text}


def test_data_are_never_code():
    assert {relative(path): words for path in SOURCES if (words := unsafe_words(path))} == {}


def test_public_names_are_sorted_and_there():
    assert ptpipe.__all__ == sorted(ptpipe.__all__)
    assert len(set(ptpipe.__all__)) == len(ptpipe.__all__)
    for name in ptpipe.__all__:
        assert getattr(ptpipe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ptpipe.nothing


@pytest.mark.parametrize("before", ["", "import ptpipe.plan.vocabulary, ptpipe.cli.run, ptpipe.testing; "])
def test_public_names_are_what_they_say_whatever_was_imported_before(before):
    code = (
        "from ptpipe import *; assert all(map(callable, (stage, run, load_plan, hookimpl))); print(StageConfig, Plan)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", before + code], check=True, capture_output=True)


def test_mypy_knows_defaults_without_pydantics_plugin():
    """In what plugin authors copy or construct: it takes a field whose default comes first for a required one."""
    files = [ROOT / "pipeline" / "ptpipe" / "templates" / "plugin.py.txt", *ROOT.glob("examples/**/*.py")]
    files += [path for path in SOURCES if path.is_relative_to(ROOT / "plugins" / "ptpipe_torch")]
    calls = {path: re.findall(r"\bField\(\s*(?:(\w+)=)?", path.read_text(encoding="utf-8")) for path in files}
    assert sum(map(len, calls.values())) > 10
    assert [relative(path) for path, names in calls.items() if "" in names] == []


def test_exit_codes_are_in_the_readme():
    table = README.read_text(encoding="utf-8").partition("## Exit codes")[2]
    named = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    assert named == {int(code) for code in ExitCode}


def test_every_file_of_the_core_is_in_the_readme():
    table = README.read_text(encoding="utf-8").partition("## Where things are")[2].partition("## Exit codes")[0]
    named = set(re.findall(r"`(\w+)/?`", table))
    files = {path.stem for path in CORE if path.parent.name == "ptpipe"} - {"__init__", "__main__"}
    assert files - named == set()


def hooks():
    return {name: value for name, value in vars(hookspecs).items() if name.startswith("ptpipe_")}


def hook_table():
    """The README's table, from the specifications."""
    lines = ["| hook | purpose |", "| --- | --- |"]
    for name, function in hooks().items():
        signature = inspect.signature(function)
        parameters = ", ".join(f"{p.name}: {p.annotation}" for p in signature.parameters.values())
        returns = "" if signature.return_annotation == "None" else f" -> {signature.return_annotation}"
        words = " ".join(inspect.getdoc(function).split())
        code = f"{name}({parameters}){returns}".replace("|", "\\|")  # also in code a pipe would end the cell
        lines.append(f"| `{code}` | {words} |")
    return "\n".join(lines) + "\n"


def with_hook_table(text):
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + hook_table() + END + rest.partition(END)[2]


def test_the_hook_table_is_that_of_the_specifications():
    text = README.read_text(encoding="utf-8")
    assert BEGIN in text
    assert text == with_hook_table(text), "run `python tests/test_house.py`"


PICTURES = re.compile(r"image|pixel|picture|labels|logit|num_classes|class_names|_CHW|_K\b")
OF_PICTURES = {
    "images.py",
    "resizing.py",
    "image_members.py",
    "column_info.py",
    "augment.py",
    "normalization.py",
    "data_folder.py",
}
"""Of ptpipe_torch/data: columns of pictures, and where they are stored."""


def identifiers_of(path):
    for node in ast.walk(syntax_tree(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def test_shared_types_know_neither_pictures_nor_classes():
    shared = [path for path in (ROOT / "plugins/ptpipe_torch").glob("*/*.py") if path.parent.name in ("data", "model")]
    shared += [ROOT / "plugins/ptpipe_torch/task/task.py", ROOT / "plugins/ptpipe_torch/protocols.py"]
    shared += [
        ROOT / f"plugins/ptpipe_train/{name}.py" for name in ("loop", "evaluation", "progress", "state", "steps")
    ]
    shared += [
        ROOT / f"plugins/ptpipe_eval/{name}.py" for name in ("predict", "compare", "comparison", "latency/inputs")
    ]
    found = {
        f"{relative(path)}: {name}"
        for path in shared
        if path.name not in OF_PICTURES
        for name in identifiers_of(path)
        if PICTURES.search(name)
    }
    assert len(shared) > 20 and found == set()


def test_no_stage_asks_which_task_it_is():
    from ptpipe_torch import (
        Classification,
        LanguageModeling,
        MultiLabel,
        Regression,
        Segmentation,
        Task,
        TokenClassification,
    )

    built_in = (Classification, LanguageModeling, MultiLabel, Regression, Segmentation, TokenClassification)
    assert all(issubclass(task, Task) for task in built_in)
    tasks = {task.__name__ for task in built_in} | {"ClassTask"}
    names = ("ptpipe_train", "ptpipe_quant", "ptpipe_onnx", "ptpipe_executorch", "ptpipe_eval", "ptpipe_report")
    rooms = [f"plugins/{name}" for name in names]
    asking = {
        f"{relative(path)}: {name}"
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        for name in identifiers_of(path)
        if name in tasks
    }
    assert asking == set()


if __name__ == "__main__":
    README.write_text(with_hook_table(README.read_text(encoding="utf-8")), encoding="utf-8")
