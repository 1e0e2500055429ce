"""Digests of plugins' code: what counts as a change, and what is remembered."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe.plan import source_digest
from ptpipe.plan.source_digest import SourceDigests
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe.store.documents import read_document, write_document

CODE = "import helper\n\ndef f(x):\n    return x + 1\n"


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


class Stub:
    def __init__(self, name, file):
        self.__name__, self.__file__ = name, str(file)


@pytest.fixture
def digest(tmp_path):
    """The digest of a one-file plugin `net.py` with a `helper.py` beside it, worked out anew each time."""
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "helper.py").write_text("A = 1\n")

    def compute(cache=None, libraries=()):
        modules = {"ptpipe_file_net": Stub("ptpipe_file_net", tmp_path / "net.py")}
        sources = SourceDigests(cache, modules, libraries)
        value = sources.of("ptpipe_file_net")
        sources.save()
        return value

    return compute


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        CODE.replace("x + 1", "x + 1  # more"),
        CODE.replace("\n\n", "\n\n\n# a comment\n\n"),
        CODE.replace("x + 1", "(x\n  + 1)"),
        CODE.replace("    return", "\treturn"),
        CODE.replace("\n", "\r\n"),
    ],
)
def test_comments_and_layout_do_not_count(tmp_path, digest, text):
    before = digest()
    (tmp_path / "net.py").write_text(text, newline="")
    assert digest() == before


@pytest.mark.parametrize(
    "text",
    [
        CODE.replace("1", "2"),
        CODE.replace("1", "1.0"),
        CODE.replace("1", "True"),
        CODE.replace("1", "'1'"),
        CODE.replace("x + 1", "x, 1"),
        CODE.replace("x + 1", "x + 1,"),
        CODE.replace("    return", "    return x\n    return"),
        CODE.replace("x", "y"),
        CODE + "B = 1\n",
        CODE.replace("def f", "async def f"),
        "",
    ],
)
def test_code_counts(tmp_path, digest, text):
    before = digest()
    (tmp_path / "net.py").write_text(text)
    assert digest() != before


def test_libraries_count_by_their_bytes(tmp_path, digest):
    libraries = (f"{tmp_path}/",)
    before, parsed = digest(libraries=libraries), digest()
    (tmp_path / "net.py").write_text(f"# a comment\n{CODE}")
    assert digest(libraries=libraries) != before and digest() == parsed
    (tmp_path / "net.py").write_text(CODE)
    assert digest(libraries=libraries) == before
    (tmp_path / "helper.py").write_text("A = 2\n")
    assert digest(libraries=libraries) != before, "what they import counts, too"


def test_files_beside_a_plugin_count_where_it_imports_them(tmp_path, digest):
    before = digest()
    (tmp_path / "other.py").write_text("B = 1\n")
    assert digest() == before, "nobody imports it"
    (tmp_path / "helper.py").write_text("A = 2\n")
    changed = digest()
    assert changed != before
    (tmp_path / "helper.py").write_text("def f():\n    import other\n")
    deep = digest()
    (tmp_path / "other.py").write_text("B = 2\n")
    assert digest() != deep, "through a helper, inside a function"


def test_a_package_counts_whole(tmp_path):
    folder = tmp_path / "acme_room"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "deep" / "thing.py").write_text("A = 1\n")
    sys.path.append(str(tmp_path))
    modules = {"acme_room": importlib.import_module("acme_room")}
    before = SourceDigests(None, modules).of("acme_room")
    assert SourceDigests(None, modules).of("acme_room.deep.thing") == before
    (folder / "deep" / "thing.py").write_text("A = 2\n")
    assert SourceDigests(None, modules).of("acme_room") != before


def test_installed_code_counts_by_its_bytes_with_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.setattr("ast.parse", lambda *_: pytest.fail("parsed"))
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "acme_wheel.py").write_text("from acme_lib import (  # the (best)\n    one,\n)\n")
    (installed / "acme_lib.py").write_text("one = 1\n")
    sys.path.append(str(installed))
    modules = {name: importlib.import_module(name) for name in ("acme_wheel", "acme_lib")}
    digests = [SourceDigests(None, modules).of("acme_wheel")]
    assert SourceDigests(None, modules).of("acme_wheel") == digests[0]
    for name, text in (("acme_lib", "one = 1  # or two\n"), ("acme_wheel", "import acme_lib\n")):
        (installed / f"{name}.py").write_text(text)
        digests.append(SourceDigests(None, modules).of("acme_wheel"))
    assert len(set(digests)) == 3


FOLDERS = [Path(json.__file__).parents[1], Path(__file__).parents[3]]


@pytest.mark.parametrize("folder", FOLDERS, ids=["standard library", "project"])
def test_no_import_is_missed_where_code_is_not_parsed(folder):
    files = [*folder.glob("*.py"), *folder.glob("p*/**/*.py")]
    for file in random.Random(0).sample(files, min(len(files), 300)):
        content = file.read_bytes()
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(content)
        assert source_digest._read(tree)[1] <= source_digest.possible_imports(content), file


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a, b.c as d; import e", {"a", "b.c", "e"}),
        ("import a, \\\n    b", {"a", "b"}),
        ("from a import b; from .. import c", {"a.b", "..c"}),
        ("from .a.b import *", {".a.b"}),
        ("from . a import b", {".a.b"}),
        ("from a import (b as c,  # (not d)\r\n  e, f\r\n)", {"a.b", "a.e", "a.f"}),
        ("if x: import a\nelse: from b import c", {"a", "b.c"}),
        ("m = import_module('a.b'); n = __import__(\n  \"c\")", {"a.b", "c"}),
        ("\ufeffimport größe", {"größe"}),
        ("x = 1\rimport a\rfrom b import c", {"a", "b.c"}),
        ("how to import a, or from b import c\nimportant = 1\nfromage = 2", set()),
    ],
)
def test_imports_that_are_found_without_parsing(text, names):
    assert source_digest.possible_imports(text.encode()) == names


@given(st.binary() | st.text("import from.,()#as \\\n\t\"'*b").map(str.encode))
def test_anything_may_be_installed(content):
    assert all(isinstance(name, str) for name in source_digest.possible_imports(content))


@pytest.mark.parametrize("is_package", [True, False], ids=["package", "namespace"])
def test_a_plugin_inside_a_package_counts_with_what_is_around_it(tmp_path, is_package):
    folder = tmp_path / f"acme_{is_package}"
    folder.mkdir()
    (folder / "stages.py").write_text("from . import net\n")
    (folder / "net.py").write_text("A = 1\n")
    if is_package:
        (folder / "__init__.py").write_text("")
    sys.path.append(str(tmp_path))
    name = f"acme_{is_package}"
    modules = {name: importlib.import_module(f"{name}.stages")}
    before = SourceDigests(None, modules).of(f"{name}.stages")
    (folder / "net.py").write_text("A = 2\n")
    assert SourceDigests(None, modules).of(f"{name}.stages") != before


def test_other_plugins_count_where_they_are_imported(tmp_path):
    for name in ("acme_words", "acme_user", "acme_stranger"):
        (tmp_path / f"{name}.py").write_text("import acme_words\n" if name == "acme_user" else "A = 1\n")
    sys.path.append(str(tmp_path))
    modules = {name: importlib.import_module(name) for name in ("acme_words", "acme_user", "acme_stranger")}
    before = {name: SourceDigests(None, modules).of(name) for name in modules}
    (tmp_path / "acme_words.py").write_text("A = 2\n")
    after = {name: SourceDigests(None, modules).of(name) for name in modules}
    assert [name for name in modules if before[name] != after[name]] == ["acme_words", "acme_user"]


def test_modules_of_a_plugins_package_are_known_without_reading_them(tmp_path, monkeypatch):
    (tmp_path / "acme_front").mkdir()
    (tmp_path / "acme_front" / "__init__.py").write_text("import acme_imported\n")
    for name in ("acme_front/inner", "acme_imported", "acme_other", "elsewhere"):
        (tmp_path / f"{name}.py").write_text("A = 1\n")
    sys.path.append(str(tmp_path))
    sources = SourceDigests(None, {"acme_front": importlib.import_module("acme_front")})
    with monkeypatch.context() as patch:
        patch.setattr("ast.parse", lambda *_: pytest.fail("read"))
        assert sources.is_of_plugins("acme_front.inner", str(tmp_path / "acme_front" / "inner.py"))
    assert sources.is_of_plugins("acme_imported", str(tmp_path / "acme_imported.py"))
    assert not sources.is_of_plugins("acme_other", str(tmp_path / "acme_other.py"))
    assert not sources.is_of_plugins("acme_front.elsewhere", str(tmp_path / "elsewhere.py"))


def test_what_is_no_python_counts_by_its_bytes(tmp_path, digest):
    (tmp_path / "helper.py").write_bytes(b"print 'of another age'\n")
    before = digest()
    (tmp_path / "helper.py").write_bytes(b"print 'of another time'\n")
    assert digest() != before


@pytest.mark.parametrize("text", ["(" * 5000 + ")" * 5000, "-" * 50_000 + "1", "a" + ".b" * 3000, "x = '\\ud800'"])
def test_code_that_is_too_deep_to_parse_counts(tmp_path, digest, text):
    (tmp_path / "helper.py").write_text(text)
    before = digest()
    (tmp_path / "helper.py").write_text(f"{text}\n1")
    assert digest() != before


def test_a_sound_memory_of_another_layout_is_forgotten(tmp_path, digest):
    cache = tmp_path / "sources.cache"
    before = digest(cache)
    members = read_document(cache)
    for files in ([], {"x": 1}, {str(tmp_path / "net.py"): {"stamp": []}}, None):
        write_document(cache, json.dumps({**members, "files": files}))
        assert digest(cache) == before


def test_digests_are_remembered(tmp_path, digest, monkeypatch):
    cache = tmp_path / "sources.cache"
    before = digest(cache)
    monkeypatch.setattr("ast.parse", lambda *_: pytest.fail("read again"))
    assert digest(cache) == before


def test_a_change_that_hides_its_time_is_seen(tmp_path, digest):
    cache = tmp_path / "sources.cache"
    before = digest(cache)
    status = (tmp_path / "net.py").stat()
    (tmp_path / "net.py").write_text(CODE.replace("1", "2"))
    os.utime(tmp_path / "net.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(cache) != before


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"made_by": [1, 2, 7], "files": {"x": 1}}', "{", "\ud800"])
def test_a_damaged_memory_is_forgotten(tmp_path, digest, damage):
    cache = tmp_path / "sources.cache"
    before = digest(cache)
    cache.write_text(damage, errors="surrogatepass")
    assert digest(cache) == before
    assert json.loads(cache.read_text())["files"], "and written anew"


def test_any_flipped_bit_of_the_memory_is_noticed(tmp_path, digest):
    cache = tmp_path / "sources.cache"
    before, intact = digest(cache), cache.read_bytes()
    for position in range(0, len(intact) * 8, 41):
        damaged = bytearray(intact)
        damaged[position // 8] ^= 1 << position % 8
        cache.write_bytes(damaged)
        assert digest(cache) == before
        assert cache.read_bytes() == intact, "written anew"


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, digest):
    assert digest(tmp_path / "not" / "there") == digest()


def test_a_plugin_file_as_it_is_loaded(project):
    vocabulary = load_vocabulary(["./toy.py"], project.folder)
    modules = {plugin.module.__name__: plugin.module for plugin in vocabulary.plugins}
    before = SourceDigests(None, modules).of("ptpipe_file_toy")
    project.edit("return Number(a.value + b.value)", "return Number(b.value + a.value)")
    assert SourceDigests(None, modules).of("ptpipe_file_toy") != before
