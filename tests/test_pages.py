"""Every page of the documentation site: its code blocks, its links, its generated reference."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from ptpipe import load_plan
from ptpipe.cli import cli
from ptpipe.plan.vocabulary import load_vocabulary

from .public_names import public_modules, public_names

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDERS = ("benchmarks/", "docs/", "examples/", "manifests/", "./examples/")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def load_hooks():
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "docs" / "mkdocs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()
BLOCKS = [
    pytest.param(match[1], match[2], id=f"{page}:{text.count(chr(10), 0, match.start()) + 1}")
    for page in HOOKS.pages()
    for text in [(ROOT / page).read_text(encoding="utf-8")]
    for match in BLOCK.finditer(text)
]


def shell_lines(language, block):
    """The command lines of a block; in a transcript, those after `$`."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")] if language == "console" else lines


def check_shell(language, block):
    checked = [check_command(line) for line in shell_lines(language, block)]
    assert any(checked), "no command that can be checked"


def check_command(line):
    """Parse a call of ptpipe or make as these would; the rest of a line may be a comment or another command."""
    line = re.split(r"\s+(?:\|\||&&|\|)\s+|\s+#", line)[0]
    if called := re.search(r"(?:^|-m |exec |srun )ptpipe (.*)", line):
        name, *arguments = shlex.split(os.path.expandvars(called[1]))
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, f"there is no command {name}"
        command.make_context(name, arguments)
    elif called := re.match(r"make (\S+)", line):
        assert re.search(rf"^{called[1]}:", MAKEFILE, re.MULTILINE), f"there is no target {called[1]}"
    else:  # another program's: the files of the repository that it names exist
        paths = [word for word in line.split() if word.startswith(FOLDERS)]
        assert [path for path in paths if not (ROOT / path).exists()] == []
        return bool(paths)
    return True


def check_yaml(language, block):
    """A whole manifest binds; of a piece, the stages name kinds that exist, or a kind of a plugin that it names."""
    (document,) = YAML(typ="safe", pure=True).load_all(block)
    if "version" in document:
        Path("m.yaml").write_text(block, encoding="utf-8")
        assert load_plan("m.yaml").stages
    else:
        stages = document.get("stages", document)
        kinds = {stage["uses"] for stage in stages.values()}
        assert document.get("plugins") or kinds <= load_vocabulary().stages.keys()


def check_python(language, block):
    compile(block, "<block>", "exec")


def check_toml(language, block):
    assert tomllib.loads(block)


def check_json(language, block):
    assert json.loads(block)


def check_text(language, block):
    """A drawing or an output: nothing to copy."""
    assert not re.search(r"^(\$ )?(ptpipe|make|pip) ", block, re.MULTILINE), "commands belong in a block of `sh`"


CHECKS = {
    "sh": check_shell,
    "console": check_shell,
    "yaml": check_yaml,
    "python": check_python,
    "toml": check_toml,
    "json": check_json,
    "text": check_text,
    "": check_text,
}


@pytest.mark.parametrize(("language", "block"), BLOCKS)
def test_a_block_holds(language, block, tmp_path, monkeypatch):
    """README's tour is executed too (test_readme.py), and the first stage's blocks are those of tested files."""
    monkeypatch.chdir(tmp_path)
    for name in ("manifests", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    Path("first.yaml").touch()
    assert language in CHECKS, f"nothing checks blocks of {language}"
    CHECKS[language](language, block)


@pytest.mark.parametrize(
    ("language", "block", "problem"),
    [
        ("sh", "ptpipe fly\n", "no command fly"),
        ("sh", "make nothing\n", "no target nothing"),
        ("sh", "echo\n", "no command that can be checked"),
        ("text", "ptpipe run m.yaml\n", "commands belong"),
    ],
)
def test_a_wrong_block_is_found(language, block, problem):
    with pytest.raises(AssertionError, match=problem):
        CHECKS[language](language, block)


def test_every_page_of_the_repository_is_on_the_site():
    known = {ROOT / page for page in HOOKS.pages()}
    found = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "pipeline").rglob("*.md")}
    assert found - known == set()


def test_the_reference_has_every_stage_and_every_command():
    stages, commands = HOOKS.stages_page(), HOOKS.commands_page()
    assert [kind for kind in load_vocabulary().stages if f"### `{kind}`" not in stages] == []
    assert [name for name in cli.list_commands(click.Context(cli)) if f"## `ptpipe {name}`" not in commands] == []
    assert "| `batch_size` |" in stages
    assert "--artifacts" in commands


def test_the_reference_has_every_public_module():
    assert HOOKS.API.keys() == HOOKS.api().keys() == public_modules()


def test_the_page_of_the_core_lists_every_public_module():
    text = (ROOT / "pipeline" / "README.md").read_text(encoding="utf-8")
    stable = text.partition("## What is stable")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.]+)` \|", stable, re.MULTILINE)) == public_modules()


def test_lists_and_tables_need_no_blank_line_before():
    page = "One:\n- a\n  more\n- b\n\nTwo:\n| c | d |\n| - | - |\n```sh\nls\n- no list\n```\n1. e\n2. f\n"
    read = "One:\n\n- a\n  more\n- b\n\nTwo:\n\n| c | d |\n| - | - |\n```sh\nls\n- no list\n```\n\n1. e\n\n2. f\n"
    assert HOOKS.with_blank_lines(page) == read


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as `make docs` builds it; `.ci/run` names the one that it has built."""
    if built := os.environ.get("PTPIPE_SITE"):
        return Path(built)
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra `docs`)")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site):
    loads = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+href=\"?https?:|@import|url\(https?:")
    pages = [*site.rglob("*.html"), site / "docs" / "site.css"]
    assert len(pages) > 10
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("name", HOOKS.API)
def test_the_site_has_every_public_name(site, name):
    text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
    shown = {anchor.rpartition(".")[2] for anchor in re.findall(r'id="([\w.]+)"', text)}
    public = public_names(importlib.import_module(name))
    assert len(public) > 5
    assert [each for each in public if each not in shown] == []


def test_the_site_has_every_field_of_a_public_class(site):
    text = (site / "reference" / "ptpipe_torch.html").read_text(encoding="utf-8")
    module = importlib.import_module("ptpipe_torch")
    models = {name: each for name in public_names(module) if hasattr(each := getattr(module, name), "model_fields")}
    bases = {name: [base.__name__ for base in model.__mro__] for name, model in models.items()}
    fields = [(name, field) for name, model in models.items() for field in model.model_fields]
    assert ("Classification", "class_names") in fields
    shown = [(name, field) for name, field in fields if any(f'"ptpipe_torch.{b}.{field}"' in text for b in bases[name])]
    assert sorted({*fields} - {*shown}) == []
