"""YAML 1.2's core schema, places, and texts that nobody should be able to hurt the reader with."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ptpipe import ManifestError
from ptpipe.manifest.yaml import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read, scalar

# The tables of YAML 1.2.2, chapter 10.3.2, and the words of YAML 1.1 that became plain text.
NUMBERS = {
    "0": 0,
    "-0": 0,
    "+12": 12,
    "012": 12,
    "0o14": 12,
    "0xC": 12,
    "1e3": 1000.0,
    "1e-3": 0.001,
    "12e03": 12000.0,
    "-2E+05": -200000.0,
    "1.": 1.0,
    ".5": 0.5,
    "0.": 0.0,
    "+.5": 0.5,
    "6.8523015e+5": 685230.15,
    ".inf": math.inf,
    "+.Inf": math.inf,
    "-.INF": -math.inf,
}
TEXTS = ["no", "yes", "on", "off", "y", "1_000", "12:30:45", "2001-01-01", "0b1", "-0o7", "+0x1", "0o8", "0x", ".", "-"]
TEXTS += ["nULL", "tRUE", ".iNF", "e3", "1e", "1.2.3", "٣", "1\n", "infinity", "nan", "=", "<<"]


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers(text, value):
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_in_the_core_schema_is_text(text):
    assert scalar(text) == text


def test_null_and_booleans():
    assert [scalar(text) for text in ("", "~", "null", "Null", "NULL")] == [None] * 5
    assert [scalar(text) for text in ("true", "True", "TRUE")] == [True] * 3
    assert [scalar(text) for text in ("false", "False", "FALSE")] == [False] * 3
    assert math.isnan(scalar(".nan"))


@given(st.integers())
def test_integers_are_read_back(number):
    assert scalar(str(number)) == number
    assert scalar(hex(abs(number))) == abs(number)
    assert scalar(oct(abs(number))) == abs(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_back_exactly(number):
    assert scalar(repr(number)) == number


@given(st.text())
@example("9" * 5000)
def test_any_scalar_has_a_value(text):
    assert isinstance(scalar(text), str | int | float | None)


WORDS = st.from_regex("[a-z]+", fullmatch=True)
PLAIN = st.none() | st.booleans() | st.integers()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=20))
def test_json_is_yaml(value):
    assert read(json.dumps(value), "m").value == value


@given(st.text(max_size=80) | st.text("[]{}:,-?*&!|>'\"%@`#~ \n\ta1", max_size=60))
@example("a: !!python/object/apply:os.system [echo]")
@example("%YAML 3.0\n---\na")
@example("&a [*a]")
@example("? [a]\n: b")
@example("*")
@example("a: \x07")
def test_any_text_is_read_or_refused(text):
    try:
        document = read(text, "m.yaml")
    except ManifestError as error:
        assert all(problem.location.path == "m.yaml" for problem in error.problems)
    else:
        assert all(place.line >= 1 and place.column >= 1 for place in document.values.values())


# YAML takes keys of up to 1,024 characters; in JSON, a character may take twelve.
@given(st.text(max_size=80), st.text())
def test_any_text_in_json_is_read(key, text):
    assert read(json.dumps({key: [text]}), "m").value == {key: [text]}


def test_places_of_keys_and_values():
    document = read("version: 1\nstages:\n  net: {uses: model.mlp, with: {width: 3}}\n  list:\n  - a\n  - b\n", "m")
    assert str(document.locate(("stages", "net"), key=True)) == "m:3:3"
    assert str(document.locate(("stages", "net"))) == "m:3:8"
    assert str(document.locate(("stages", "net", "with", "width"))) == "m:3:40"
    assert str(document.locate(("stages", "net", "with", "width"), key=True)) == "m:3:33"
    assert str(document.locate(("stages", "list", 1))) == "m:6:5"
    assert str(document.locate(("stages", "net", "with", "depth"))) == "m:3:32", "its nearest parent"
    assert read("", "m").locate(("anything",)) is None


def problems_of(text):
    try:
        return [str(problem) for problem in read(text, "m").problems]
    except ManifestError as error:
        return [str(problem) for problem in error.problems]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "a: 1\nb: 2\na: 3\nb: 4",
            ["m:3:1: 'a' is given twice; first in line 1", "m:4:1: 'b' is given twice; first in line 2"],
        ),
        ("a: 1\n'a': 2", ["m:2:1: 'a' is given twice; first in line 1"]),
        ("x: {1: a, '1': b}", ["m:1:11: '1' is given twice; first in line 1"]),
        ("[a]: b\n? {c: d}\n: e", ["m:1:1: a key must be a scalar", "m:2:3: a key must be a scalar"]),
        (
            "a: !!int 1\nb: !x y",
            [
                "m:1:4: tags such as tag:yaml.org,2002:int are not allowed here",
                "m:2:4: tags such as !x are not allowed here",
            ],
        ),
        ("a: *b", ["m:1:4: the alias *b is not defined above"]),
        ("a: &a\n  b: [*a]", ["m:2:7: the alias *a contains itself"]),
        ("a: 1\n---\nb: 2", ["m:2:1: a second YAML document; a manifest is one"]),
        ("a:\n\tb: 1", ["m:2:1: not YAML: a tab; YAML is indented with spaces"]),
        ("a: b: c", ["m:1:5: not YAML: a ':' has no place here; is the indentation right, or a text without quotes?"]),
        ("a:\n  b: 1\n c: 2", ["m:3:2: not YAML: this does not fit the lines above; is the indentation right?"]),
        ("é: 1\nb: ok \x07", ["m:2:7: not YAML: it has the character U+0007"]),
        ('a: "\\uD800"', ["m:1:4: half of a surrogate pair is not text"]),
        ("a: [1, 2", ["m:1:9: not YAML: expected ',' or ']', but got '<stream end>' while parsing a flow sequence"]),
    ],
)
def test_problems_have_places(text, problems):
    assert problems_of(text) == problems


def test_aliases_are_expanded_and_may_be_given_anew():
    assert read("a: &x {k: 1}\nb: *x\nc: &x 2\nd: *x", "m").value == {"a": {"k": 1}, "b": {"k": 1}, "c": 2, "d": 2}


MERGING = """
a: &a {x: 1, y: 2}
b: &b
  y: 3
  z: &z {deep: 1}
one:
  w: 0
  <<: *a
  y: 4
several: {<<: [*b, *a]}
chain: &chain {<<: *b, x: 5}
far: {<<: *chain}
quoted: {"<<": 1}
"""


def test_mappings_are_merged():
    document = read(MERGING, "m")
    value = document.value
    assert (document.problems, value["quoted"]) == ((), {"<<": 1})
    assert list(value["one"].items()) == [("w", 0), ("x", 1), ("y", 4)]
    assert value["several"] == {"x": 1, "y": 3, "z": {"deep": 1}}
    assert value["far"] == {"x": 5, "y": 3, "z": {"deep": 1}}
    assert (document.locate(("one", "x")).line, document.locate(("far", "z", "deep")).line) == (2, 5)
    assert document.locate(("one", "y"), key=True).line == 9


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\n<<: 3", 2, "<< is given once, with a mapping (`<<: *a`) or a list of them"),
        ("a: 1\n<<: []", 2, "<< is given once, with a mapping (`<<: *a`) or a list of them"),
        ("a: &a {x: 1}\n<<: *a\n<<: *a", 3, "<< is given once, with a mapping (`<<: *a`) or a list of them"),
        ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}", 2, "'y' is given twice; first in line 2"),
    ],
)
def test_what_is_no_merge(text, line, message):
    (problem,) = read(text, "m").problems
    assert (problem.location.line, problem.message) == (line, message)


def test_what_merges_expand_to_is_capped():
    chain = "\n".join(f"a{n}: &a{n} {{<<: *a{n - 1}}}" for n in range(1, MAX_DEPTH + 3))
    with pytest.raises(ManifestError, match="levels deep, aliases expanded"):
        read(f"a0: &a0 {{x: 1}}\n{chain}", "m")
    doubled = "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9))
    with pytest.raises(ManifestError, match="values, aliases expanded"):
        read(f"a0: &a0 {{x: 1}}\n{doubled}", "m")


def test_what_other_tools_write():
    assert read("a: 1\r\nb: 2\r\n", "m").value == {"a": 1, "b": 2}
    assert read("%YAML 1.1\n---\na: no\n...\n", "m").value == {"a": "no"}
    assert read("# nothing\n", "m").value is None


@pytest.mark.parametrize("bracket", ["[", "{a: ", "- "])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_depth_is_capped(bracket, depth):
    (problem,) = problems_of(bracket * depth)
    assert problem.endswith(f"nested more than {MAX_DEPTH} levels deep")
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH, "m").value is not None


def bomb(num_levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, num_levels)]
    return "\n".join(lines)


def test_what_aliases_expand_to_is_capped():
    start = time.perf_counter()
    (problem,) = problems_of(bomb(30))
    assert problem.endswith(f"more than {MAX_VALUES} values, aliases expanded")
    assert time.perf_counter() - start < 5
    deep = "a0: &a0 x\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, MAX_DEPTH + 9))
    assert problems_of(deep)[0].endswith(f"nested more than {MAX_DEPTH} levels deep, aliases expanded")


def test_the_largest_text_is_read_in_seconds():
    text = "".join(f"k{n}: {{uses: a.b, with: [{n}]}}\n" for n in range(MAX_BYTES // 30))[:MAX_BYTES].rpartition("\n")[
        0
    ]
    start = time.perf_counter()
    read(text, "m")
    assert time.perf_counter() - start < 30, "a cap that does not protect"
