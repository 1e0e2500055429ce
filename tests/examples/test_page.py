"""`plugins/README.md` shows nothing that isn't tested: its blocks stand in the examples, word for word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "plugins" / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCES = {"python": "*.py", "yaml": "*.yaml", "toml": "*.toml"}

BLOCKS = BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def test_the_page_shows_code_of_every_kind():
    assert {language for language, _ in BLOCKS} == set(SOURCES)
    assert sum(language == "python" for language, _ in BLOCKS) >= 4


@pytest.mark.parametrize(("language", "block"), BLOCKS, ids=[block.strip().partition("\n")[0] for _, block in BLOCKS])
def test_a_block_stands_in_an_example(language, block):
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob(SOURCES[language])]
    assert any(block in source for source in sources)


def test_every_path_it_names_is_there():
    named = set(re.findall(r"`(?:[\w ]*\s)?((?:examples|plugins)/[\w./-]+)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) >= 4
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_name_it_uses_of_the_context_the_bench_and_the_model_exists():
    import dataclasses

    from ptpipe import Context, Decision
    from ptpipe.testing import Bench
    from ptpipe_torch import Model

    known = {
        "ctx": {field.name for field in dataclasses.fields(Context)} | set(dir(Context)),
        "bench": set(dir(Bench)) | {"seed", "metrics", "notices", "events"},
        "model": set(dir(Model)) | {"recipe"},
        "Decision": set(dir(Decision)),
    }
    used = re.findall(r"\b(ctx|bench|model|Decision)\.([A-Za-z_]+)\b(?!`?:)", PAGE.read_text(encoding="utf-8"))
    kinds = {"python", "small_cnn", "tiny_resnet"}  # model.small_cnn is a kind
    assert [f"{owner}.{name}" for owner, name in used if name not in known[owner] | kinds] == []


@pytest.mark.thorough
def test_its_command_for_the_tests_works_from_the_root_of_the_repository():
    assert "Run `pytest examples/one_file`" in PAGE.read_text(encoding="utf-8")
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/one_file"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
