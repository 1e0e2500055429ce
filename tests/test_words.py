"""Words that the project replaced by the field's own do not come back: `retired_words.toml` lists them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from ptpipe.plan.vocabulary import load_vocabulary

ROOT = Path(__file__).parent.parent
RETIRED = tomllib.loads(Path(__file__).with_name("retired_words.toml").read_text(encoding="utf-8"))
SOURCE_ROOTS = ("pipeline", "plugins")
CODE_ROOTS = (*SOURCE_ROOTS, "tests", "examples", "benchmarks")
NAMED = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.alias: "name"}
DEFINED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PATTERNS = {
    phrase: re.compile(r"(?<![\w-])" + r"\s+".join(map(re.escape, phrase.split())) + r"(?![\w-])", re.IGNORECASE)
    for phrase in RETIRED["prose"]
}
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of an identifier: `HTTP`, `Worker`, `group`."""
PARTS = {phrase: new for phrase, new in RETIRED["prose"].items() if phrase.isalpha()} | RETIRED["parts"]
OWNED = [name.rpartition(".")[::2] for name in RETIRED["names"]]
"""Owner, or "" for an identifier anywhere, and identifier."""


def python_files(*roots: str) -> list[Path]:
    found = (path for root in roots for path in (ROOT / root).rglob("*.py"))
    return sorted(path for path in found if path.name != "plain_script.py")  # the yardstick, kept as it was written


def text_files() -> list[Path]:
    """Pages and manifests, but for the changelog, which may name what was."""
    found = [*ROOT.glob("*.md"), *(ROOT / "manifests").glob("*.*"), *(ROOT / "docs").rglob("*.*")]
    beside_code = (path for root in CODE_ROOTS for path in (ROOT / root).rglob("*.*"))
    found += [path for path in beside_code if path.suffix in {".md", ".yaml", ".txt"}]
    return sorted(path for path in found if path.name != "CHANGELOG.md" and path.suffix not in {".png", ".pyc", ".svg"})


# To parse a file takes many times as long as to see that no retired word is in its text: few files are parsed.


def may_have_identifiers(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    words, owners = set(re.findall(r"\w+", text)), {"", path.stem, *re.findall(r"\b(?:class|def)\s+(\w+)", text)}
    return any(name in words and owner in owners for owner, name in OWNED)


def may_have_parts(text: str) -> bool:
    return not PARTS.keys().isdisjoint(map(str.lower, PART.findall(text)))


def may_have_phrases(text: str) -> bool:
    """Its words anywhere: a phrase may go on in the next literal."""
    lower = text.lower()
    return any(all(word in lower for word in phrase.lower().split()) for phrase in PATTERNS)


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each identifier with its line, defined or used."""
    for node in ast.walk(tree):
        if type(node) in NAMED:
            for name in (getattr(node, NAMED[type(node)]), getattr(node, "asname", None)):
                if name:
                    yield node.lineno, name.rpartition(".")[2]
        elif isinstance(node, DEFINED):
            yield node.lineno, node.name


def parts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each retired word of an identifier with its line."""
    for line, name in identifiers(tree):
        yield from ((line, word) for word in map(str.lower, PART.findall(name)) if word in PARTS)


def members(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Yield `Owner.name` for what modules and classes define and what functions take."""
    classes = [(node.name, node.body) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for owner, nodes in [(module, tree.body), *classes]:
        for node in nodes:
            if isinstance(node, DEFINED):
                yield node.lineno, f"{owner}.{node.name}"
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.lineno, f"{owner}.{node.target.id}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from ((node.lineno, f"{node.name}.{arg.arg}") for arg in [*node.args.args, *node.args.kwonlyargs])


def words_in_text(text: str) -> Iterator[tuple[int, str]]:
    """Yield each retired phrase of a text with its line."""
    lower = text.lower()
    for phrase, pattern in PATTERNS.items():
        if phrase.partition(" ")[0].lower() in lower:  # quicker than the pattern
            for match in pattern.finditer(text):
                yield text.count("\n", 0, match.start()) + 1, phrase


def words_in_code(content: str) -> Iterator[tuple[int, str]]:
    """Yield each retired phrase of a file's strings, docstrings and comments."""
    if not may_have_phrases(content):
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno + line - 1, phrase) for line, phrase in words_in_text(node.value))
    if not any(words_in_text(content)):  # a comment is one piece of the text
        return
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], phrase) for _, phrase in words_in_text(token.string))


def offences(path: Path, found: Iterable[tuple[int, str]], retired: Mapping[str, str]) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    places = sorted(place for place in found if place[1] in retired)
    return [f"{name}:{line}: {word} (now: {retired[word]})" for line, word in places]


def listed(found: Iterable[str]) -> str:
    return "\n".join(["retired words:", *found])


def test_identifiers():
    found = [
        offence
        for path in python_files(*CODE_ROOTS)
        if may_have_identifiers(path)
        for tree in [ast.parse(path.read_bytes())]
        for offence in offences(path, {*identifiers(tree), *members(tree, path.stem)}, RETIRED["names"])
    ]
    assert not found, listed(found)


def test_parts_of_identifiers():
    """Not of tests, whose names are sentences."""
    found = [
        offence
        for path in python_files(*SOURCE_ROOTS, "examples", "benchmarks")
        if not path.name.startswith("test_") and may_have_parts(path.read_text(encoding="utf-8"))
        for offence in offences(path, set(parts(ast.parse(path.read_bytes()))), PARTS)
    ]
    assert not found, listed(found)


def test_files():
    found = [
        f"{path.relative_to(ROOT).as_posix()} (now: {new})"
        for old, new in RETIRED["files"].items()
        for path in ROOT.glob(old)
    ]
    assert not found, listed(found)


def test_options():
    stages = load_vocabulary().stages
    options = {
        (kind, name) for kind, each in stages.items() for name in option_names(each.config_type.model_json_schema())
    }
    found = [
        f"{kind}: {name} (now: {RETIRED['options'][name]})" for kind, name in options if name in RETIRED["options"]
    ]
    assert options
    assert not found, listed(sorted(found))


def option_names(schema: object) -> Iterator[str]:
    """Yield the names of all properties, nested ones too."""
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        for value in schema.values():
            yield from option_names(value)


def test_comments_and_messages():
    found = [
        offence
        for path in python_files(*SOURCE_ROOTS, "examples", "benchmarks")
        for offence in offences(path, set(words_in_code(path.read_text(encoding="utf-8"))), RETIRED["prose"])
    ]
    assert not found, listed(found)


def test_pages():
    found = [
        offence
        for path in text_files()
        for offence in offences(path, set(words_in_text(path.read_text(encoding="utf-8"))), RETIRED["prose"])
    ]
    assert not found, listed(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Nobody said so", ["nobody", "said"]),
        ("the newsletter, newspapers", []),
        ("what was made\n    again", ["made again"]),
        ("Dear, by itself.", ["by itself", "dear"]),
    ],
)
def test_phrases_are_whole_words_in_any_case(text, found):
    assert sorted(phrase for _, phrase in words_in_text(text)) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("find_lacks", ["lacks"]),
        ("LackReport", ["lack"]),
        ("_TOLD", ["told"]),
        ("HTTPVerb2", ["verb"]),
        ("black_newsletter, steam", []),
    ],
)
def test_parts_of_identifiers_are_whole_words(name, found):
    assert [word for _, word in parts(ast.parse(name))] == found


def test_no_file_with_a_retired_word_is_passed_over(tmp_path):
    path = tmp_path / "stage.py"
    path.write_text("def f(*, reads): ...\n", encoding="utf-8")
    assert may_have_identifiers(path), "`stage.reads`: the module is an owner, too"
    path.write_text("def f(*, read): ...\n", encoding="utf-8")
    assert not may_have_identifiers(path)
    assert may_have_parts("LackReport()") and not may_have_parts("black")
    code = 'x = "what was made "  # anew\ny = "made " "again"\n'
    assert sorted(words_in_code(code)) == [(1, "anew"), (2, "made again")]


def test_every_kind_of_identifier_is_searched():
    code = "class Team: pass\ndef f(share_done): ...\nx.unite_ranges(max_share=1)\nfrom a import Cut as News\nUnite()"
    found = {name for _, name in identifiers(ast.parse(code))} & RETIRED["names"].keys()
    assert found == {"Team", "share_done", "unite_ranges", "max_share", "Cut", "News", "Unite"}
    owned = "class Store:\n    def alone(self): ...\nclass Data:\n    facts: int\n"
    owned += "def stage(kind, *, reads): ...\ndef walk(): ..."
    found = {name for _, name in members(ast.parse(owned), "engine")} & RETIRED["names"].keys()
    assert found == {"Store.alone", "Data.facts", "stage.reads", "engine.walk"}
