"""The shape of a manifest, and overrides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import ManifestError
from ptpipe.manifest.manifest import MAX_SEED, StageEntry, load, parse, parse_override

WHOLE = """\
version: 1
name: whole
seed: 7
plugins: [./a.py, b]
stages:
  data: {uses: data.mnist, with: {fallback: digits}}
  net:
    uses: model.mlp
    needs: {data: data, others: [data, data.x]}
  bare: {uses: a.b, needs: , with: }
"""


def test_a_whole_manifest():
    manifest = parse(WHOLE, Path("m.yaml"))
    assert (manifest.name, manifest.seed, manifest.plugins) == ("whole", 7, ("./a.py", "b"))
    assert manifest.stages == (
        StageEntry("data", "data.mnist", {}, {"fallback": "digits"}),
        StageEntry("net", "model.mlp", {"data": ("data",), "others": ("data", "data.x")}),
        StageEntry("bare", "a.b"),
    )


@pytest.mark.parametrize(("file", "name"), [("mnist_qat.yaml", "mnist_qat"), ("Übung 3.yaml", "unnamed")])
def test_the_file_gives_the_name(file, name):
    manifest = parse("version: 1\nstages: {a: {uses: b.c}}", Path(file))
    assert (manifest.name, manifest.seed) == (name, 0)


HEAD = "version: 1\nstages:\n"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["m:1:1: the manifest is empty; `ptpipe init` writes one to start from"]),
        ("# only this", ["m:1:1: the manifest is empty; `ptpipe init` writes one to start from"]),
        ("- a", ["m:1:1: a manifest is a mapping with `stages`, not a list"]),
        ("just words", ["m:1:1: a manifest is a mapping with `stages`, not a text"]),
        ("name: x", ["m:1:1: `version: 1` is missing", "m:1:1: stages: must be a mapping from stage ids to stages"]),
        ("version: 2\nstages: {a: {uses: b.c}}", ["m:1:10: version: this ptpipe reads version 1, not 2"]),
        ("version: true\nstages: {a: {uses: b.c}}", ["m:1:10: version: this ptpipe reads version 1, not true"]),
        ("version: 1.0\nstages: {a: {uses: b.c}}", ["m:1:10: version: this ptpipe reads version 1, not 1.0"]),
        ("version: '1'\nstages: {a: {uses: b.c}}", ['m:1:10: version: this ptpipe reads version 1, not "1"']),
        ("version: 1\nstages: []", ["m:2:9: stages: must be a mapping from stage ids to stages"]),
        ("version: 1\nstages:", ["m:2:8: stages: must be a mapping from stage ids to stages"]),
        ("version: 1\nstages: {}", ["m:2:9: stages: must be a mapping from stage ids to stages"]),
        (
            "verison: 1\nstage: {}",
            [
                "m:1:1: unknown key 'verison' (did you mean 'version'?)",
                "m:2:1: unknown key 'stage' (did you mean 'stages'?)",
            ],
        ),
        (f"seed: -1\n{HEAD}  a: {{uses: b.c}}", [f"m:1:7: seed: must be a whole number from 0 to {MAX_SEED}"]),
        (f"seed: 1.5\n{HEAD}  a: {{uses: b.c}}", [f"m:1:7: seed: must be a whole number from 0 to {MAX_SEED}"]),
        (f"seed: true\n{HEAD}  a: {{uses: b.c}}", [f"m:1:7: seed: must be a whole number from 0 to {MAX_SEED}"]),
        (
            f"seed: {MAX_SEED + 1}\n{HEAD}  a: {{uses: b.c}}",
            [f"m:1:7: seed: must be a whole number from 0 to {MAX_SEED}"],
        ),
        (
            f"name: a b\n{HEAD}  a: {{uses: b.c}}",
            ["m:1:7: name: letters, digits, '_', '-' and '.', at most 64, are allowed"],
        ),
        (
            f"name: ../x\n{HEAD}  a: {{uses: b.c}}",
            ["m:1:7: name: letters, digits, '_', '-' and '.', at most 64, are allowed"],
        ),
        (
            f"name: 7\n{HEAD}  a: {{uses: b.c}}",
            ["m:1:7: name: letters, digits, '_', '-' and '.', at most 64, are allowed"],
        ),
        (
            f"plugins: ./a.py\n{HEAD}  a: {{uses: b.c}}",
            ["m:1:10: plugins: must be a list of files (./prune.py) or module names"],
        ),
        (f"{HEAD}  A b: {{uses: b.c}}", ["m:3:3: stage id 'A b': lower-case letters, digits, '_' and '-' are allowed"]),
        (f"{HEAD}  a: b.c", ["m:3:6: a: must be a mapping with `uses`, not a text"]),
        (f"{HEAD}  a:", ["m:3:5: a: must be a mapping with `uses`, not nothing"]),
        (f"{HEAD}  a: {{with: {{x: 1}}}}", ["m:3:6: a: `uses: family.thing` is missing"]),
        (f"{HEAD}  a: {{use: b.c}}", ["m:3:7: unknown key 'use' in stage a (did you mean 'uses'?)"]),
        (f"{HEAD}  a: {{uses: 3}}", ["m:3:13: a: `uses: family.thing` is missing"]),
        (f"{HEAD}  a: {{uses: b.c, wiht: {{}}}}", ["m:3:18: unknown key 'wiht' in stage a (did you mean 'with'?)"]),
        (f"{HEAD}  a: {{uses: b.c, with: [x]}}", ["m:3:24: a: `with` holds options by name, not a list"]),
        (
            f"{HEAD}  a: {{uses: b.c, needs: x}}",
            [
                "m:3:25: a: `needs` holds stages by input name, not a text: `needs: {INPUT: x}`; `ptpipe stages b.c` "
                "lists the inputs"
            ],
        ),
        (
            f"{HEAD}  a: {{uses: b.c, needs: [x, y]}}",
            [
                "m:3:25: a: `needs` holds stages by input name, not a list: `needs: {INPUT: [x, y]}`; "
                "`ptpipe stages b.c` lists the inputs"
            ],
        ),
        (f"{HEAD}  a: {{uses: b.c, needs: 3}}", ["m:3:25: a: `needs` holds stages by input name, not a number"]),
        (
            "version: 1\nstages:\n- a: {uses: b.c}",
            [
                "m:3:1: stages: must be a mapping from stage ids to stages, not a list: each is `ID: {uses: KIND}`, "
                "without a dash"
            ],
        ),
        (f"{HEAD}  a: {{uses: b.c, needs: {{x: 3}}}}", ["m:3:29: a: x needs a stage id or a list of them"]),
        (f"{HEAD}  a: {{uses: b.c, needs: {{x: []}}}}", ["m:3:29: a: x needs a stage id or a list of them"]),
        (f"{HEAD}  a: {{uses: b.c, needs: {{x: [y, 3]}}}}", ["m:3:29: a: x needs a stage id or a list of them"]),
    ],
)
def test_every_wrong_shape_is_told_with_its_place(text, problems):
    with pytest.raises(ManifestError) as raised:
        parse(text, Path("m"))
    assert [str(problem) for problem in raised.value.problems] == problems


@given(st.text(max_size=200))
def test_any_text_is_a_manifest_or_refused(text):
    try:
        parse(text, Path("m"))
    except ManifestError as error:
        assert error.problems


STRUCTURED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["a", "b.c", "a.x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["version", "stages", "uses", "needs", "with", "plugins", "a", "B"]), inner)
    ),
    max_leaves=30,
)


@given(STRUCTURED)
def test_any_structure_is_a_manifest_or_refused(value):
    text = json.dumps(value).replace("NaN", ".nan").replace("Infinity", ".inf")
    try:
        manifest = parse(text, Path("m"))
    except ManifestError as error:
        assert error.problems
    else:
        assert manifest.stages


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ManifestError, match=r"cannot read .*absent\.yaml: No such file or directory"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(ManifestError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(ManifestError, match="null"):
        load(tmp_path / "a\0b")


def test_a_file_that_never_ends_is_not_read_to_its_end():
    with pytest.raises(ManifestError, match="larger than 256 kB"):
        load(Path("/dev/zero"))


def test_bytes_that_are_not_utf_8_have_a_place(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_bytes("version: 1\nname: é".encode() + b"\xe9t\n")
    with pytest.raises(ManifestError) as raised:
        load(path)
    assert str(raised.value) == f"{path}:2:8: not UTF-8 text: byte 0xe9"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + WHOLE.replace("\n", "\r\n").encode())
    assert load(path).stages == parse(WHOLE, path).stages


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("net.lr=1e-3", "net.lr", 0.001),
        ("net.word=no", "net.word", "no"),
        ("net.flag=true", "net.flag", True),
        ("net.list=[1, a]", "net.list", [1, "a"]),
        ("net.group={a: 1}", "net.group", {"a": 1}),
        ("net.none=", "net.none", None),
        ("net.text='1'", "net.text", "1"),
        ("net.path=a=b", "net.path", "a=b"),
        (" net.lr = 2", "net.lr", 2),
        ("net.text=a#b", "net.text", "a#b"),
        ('net.text="#a"', "net.text", "#a"),
        ("net.list=[1, ' #b']", "net.list", [1, " #b"]),
    ],
)
def test_overrides_are_typed_as_yaml(text, name, value):
    assert parse_override(text) == (name, value)


@pytest.mark.parametrize("text", ["net.lr", "=3", "net.lr=[1", "net.lr={a: 1, a: 2}", "net.lr=!x 1"])
def test_a_bad_override_is_named(text):
    with pytest.raises(ManifestError) as raised:
        parse_override(text)
    assert str(raised.value).startswith(f"-s {text}: ")


@pytest.mark.parametrize("value", ["#ff0000", "red #1", "red #1\n", "'red' # why", "[1] #", " #"])
def test_an_override_that_yaml_would_cut_is_refused(value):
    """A comment is never meant there: the option would get another value, silently."""
    with pytest.raises(ManifestError) as raised:
        parse_override(f"net.color={value}")
    assert (
        str(raised.value)
        == f"-s net.color={value.replace(chr(10), ' ')}: '#' begins a comment in YAML: put the text into quotes"
    )


def test_overrides_replace_options():
    manifest = parse(WHOLE, Path("m"))
    changed = manifest.overridden_by({"data.fallback": None, "net.group.deep": 3, "net.group.more": 4, "seed": 9})
    assert changed.stages[0].options == {"fallback": None}
    assert changed.stages[1].options == {"group": {"deep": 3, "more": 4}}
    assert changed.seed == 9
    assert changed.overrides == {"data.fallback": None, "net.group.deep": 3, "net.group.more": 4, "seed": 9}
    assert manifest.stages[0].options == {"fallback": "digits"}, "the manifest itself is left alone"


def test_an_override_keeps_the_rest_of_its_group():
    manifest = parse(f"{HEAD}  a: {{uses: b.c, with: {{group: {{x: 1, y: 2}}}}}}", Path("m"))
    assert manifest.overridden_by({"a.group.x": 3}).stages[0].options == {"group": {"x": 3, "y": 2}}


def test_every_wrong_override_is_told():
    with pytest.raises(ManifestError) as raised:
        parse(WHOLE, Path("m")).overridden_by({"nett.lr": 1, "net": 2, "seed": "x", "lr": 3})
    assert [str(problem) for problem in raised.value.problems] == [
        "-s nett.lr: there is no stage 'nett' (did you mean 'net'?)",
        "-s net: name one of its options: net.OPTION=VALUE",
        f"-s seed=x: a seed is a whole number from 0 to {MAX_SEED}",
        "-s lr: there is no stage 'lr'",
    ]
