"""Any manifest and any `-s` end in a clear line: exit code 0, 2 or 6, soon, in little memory, with nothing written.

300 inputs; with PTPIPE_THOROUGH=1 20,000.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from ptpipe import cli
from ptpipe.manifest.yaml import MAX_BYTES, read

ROOT = Path(__file__).parents[3]
MANIFESTS = sorted(path for path in (ROOT / "manifests").glob("*.yaml"))
NUM_INPUTS = 300 if os.environ.get("PTPIPE_THOROUGH", "0") == "0" else 20_000
MAX_CPU_S, MAX_MEMORY_KB = 2.0, 200_000
PLACED = re.compile(r"m\.yaml:(\d+):(\d+): .|-s .|\.\.\. and [\d,]+ more problems$")
GOOD = re.compile(r"m\.yaml: \d+ stages?, no problems(, \d+ notes?)?$|m\.yaml:\d+:\d+: .* is not checked: ")
TOY = "version: 1\nplugins: [./toy.py]\nstages:\n"

pytestmark = [pytest.mark.plugins, pytest.mark.slow, pytest.mark.timeout(1800)]


def sampled(share):
    """Settings for a share of all inputs."""
    return settings(
        max_examples=int(NUM_INPUTS * share),
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )


def memory_kb(field):
    """This process's resident memory now (VmRSS), or at most since the last reset (VmHWM)."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


class Invoked:
    """One command line in this process, measured."""

    def __init__(self, arguments):
        out, err = io.StringIO(), io.StringIO()
        argv, sys.argv = sys.argv, ["ptpipe", *arguments]
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before_kb, start = memory_kb("VmRSS"), time.process_time()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                self.code = cli._exit_code()
        finally:
            sys.argv = argv
        self.cpu_s = time.process_time() - start
        self.memory_kb = memory_kb("VmHWM") - before_kb
        self.out, self.err = out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the toy plugin, which is the working and the home directory."""
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copy(ROOT / "tests" / "ptpipe" / "toy.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "pycache_prefix", None)
        Invoked(["validate", str(MANIFESTS[0])])  # imports
        yield folder


def check(folder, content, *arguments):
    """Validate a manifest in every way, and judge what is said."""
    manifest = folder / "m.yaml"
    manifest.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    before = sorted(folder.rglob("*"))
    num_lines = len(manifest.read_bytes().splitlines()) + 1
    for options in ([], ["--no-plugins"], ["--json"]):
        ended = Invoked(["validate", "m.yaml", *options, *arguments])
        assert ended.code in (0, 2, 6), ended.err
        assert ended.cpu_s < MAX_CPU_S
        assert ended.memory_kb < MAX_MEMORY_KB
        assert len(ended.out + ended.err) < 500_000
        lines = [*ended.out.split("\n"), *ended.err.split("\n")]
        assert all(map(str.isprintable, lines)), lines
        if options == ["--json"]:
            assert bool(json.loads(ended.out)["problems"]) == (ended.code != 0)
            continue
        assert all(map(GOOD.match if ended.code == 0 else PLACED.match, filter(None, lines))), lines
        places = (PLACED.match(line) for line in filter(None, lines) if ended.code)
        assert all(int(place[1] or 1) <= num_lines + 1 for place in places), lines
    assert sorted(folder.rglob("*")) == before
    return ended.code


ANY_TEXT = st.text(st.characters(categories=None), max_size=200)


@sampled(0.25)
@given(st.binary(max_size=300) | ANY_TEXT | ANY_TEXT.map(lambda text: f"{TOY}  one: {{uses: toy.make}}\n{text}"))
@example('name: "\\UFFFFFFFF"')
@example(b"\xff\xfe\0v")
@example("a: |\n" + " \n" * 100_000)
@example("#" * (MAX_BYTES - 1))
def test_any_text(folder, content):
    check(folder, content)


TOKENS = [": ", "- ", "? ", "{", "}", "[", "]", ", ", "&a ", "*a", "!x ", "!!int ", "|", ">", "'", '"', "#", "%TAG ! x"]
TOKENS += [
    "%YAML 1.2",
    "---",
    "...",
    "\n",
    "\n  ",
    "\n    ",
    "\t",
    "\\",
    "\\U",
    "\\x1b",
    "\x85",
    "\u2028",
    "\ufeff",
    "<<",
]
TOKENS += [
    "version: 1",
    "stages:",
    "plugins: ",
    "name: ",
    "seed: ",
    "uses: ",
    "needs: ",
    "with: ",
    "one",
    "two",
    "a",
    "b",
]
TOKENS += ["toy.make", "toy.add", "./toy.py", "./tyo.py", "..", "/dev/null", "1", "-1", ".nan", "9" * 5000, "true", "~"]
TOKENS += ["FFFFFFFF", "@", "`", "=", "\U000e0041", "e\u0301", "x" * 1000, "a.a", "value", "mode"]


@sampled(0.25)
@given(st.lists(st.sampled_from(TOKENS), max_size=40), st.sampled_from(["", TOY, f"{TOY}  one: "]), st.integers(0, 9))
@example(["{a: "], "", 3)
def test_any_tokens(folder, tokens, start, power):
    repeated = "".join(tokens) * 4 ** max(0, power - 3)  # most inputs are short, some as long as may be
    check(folder, f"{start}{repeated}"[: MAX_BYTES // 3])


ESCAPES = ["\x1b]0;PWNED\x07", "\x9b2J", "\u202egnp.exe", "\u200b", "\ue000", "\ud800", "a\nb", "\0"]
VALUES = [None, True, 0, -1, 2**64, 1e308, float("nan"), "", "x" * 10_000, "data", "net.model", "pretrain", "fbgemm"]
VALUES += [[], {}, [[]], {"": {}}, ["data"] * 3, [1] * 2000, {"a": {"b": {"c": 1}}}, "./toy.py", "./none.py", *ESCAPES]


def places_in(value, path=()):
    """Every path in a nested value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places_in(inner, (*path, key))


def mutate(value, random):
    """Remove, replace, rename, repeat or wrap something in the value, unless it is large by now."""
    paths = [path for path in places_in(value) if path]
    if not 0 < len(paths) < 3000:
        return
    *above, key = random.choice(paths)
    group = value
    for step in above:
        group = group[step]
    match random.randrange(6):
        case 0:
            del group[key]
        case 1 if isinstance(group, dict):
            name = random.choice([*ESCAPES, f"{key}x", str(key)[1:], "x" * 200, "needs", "seed"])
            items = [(name if other == key else other, inner) for other, inner in group.items()]
            group.clear()
            group.update(items)
        case 2:
            other = random.choice(list(places_in(value)))
            found = value
            for step in other:
                found = found[step]
            group[key] = json.loads(json.dumps(found))
        case 3:
            group[key] = [group[key]] * random.choice([1, 2, 30])
        case _:
            group[key] = deepcopy(random.choice(VALUES))


DOCUMENTS = [json.dumps(read(path.read_text(), "m").value) for path in MANIFESTS]


@sampled(0.3)
@given(st.sampled_from(DOCUMENTS), st.integers(0, 2**32), st.integers(1, 5))
def test_real_manifests_changed(folder, document, seed, number):
    value, rng = json.loads(document), random.Random(seed)
    for _ in range(number):
        mutate(value, rng)
    text = json.dumps(value, indent=1).replace("NaN", ".nan")
    if len(text) < MAX_BYTES:
        check(folder, text)


NAMES = ["pretrain", "pretrain.lr", "data.path", "seed", "one.value", "pretrain.schedule.name", "", ".", "a=", *ESCAPES]
NAMES += ["pretrain.parallel.mode", f"net{'.a' * 40}", f"net{'.a' * 3000}", "net" * 5000, "compare.baseline", "net..a"]
TEXTS = [
    "1",
    "fast",
    "[",
    "{a: 1}",
    "~",
    "",
    "=",
    "'x",
    '"\\UFFFFFFFF"',
    "!!int 1",
    "*a",
    "[" * 500,
    "9" * 5000,
    *ESCAPES,
]


@sampled(0.2)
@given(
    st.sampled_from(MANIFESTS),
    st.lists(
        st.tuples(st.sampled_from(NAMES) | ANY_TEXT, st.sampled_from(TEXTS) | ANY_TEXT).map("=".join) | ANY_TEXT,
        min_size=1,
        max_size=5,
    ),
)
def test_any_override(folder, manifest, overrides):
    # A command line holds no NUL, and of lone surrogates those of undecodable bytes.
    words = [re.sub("[\0\ud800-\udc7f\udd00-\udfff]", "", text) for text in overrides]
    check(folder, manifest.read_bytes(), *(word for text in words for word in ("-s", text)))


@pytest.mark.parametrize(
    "text", [f"{TOY}  \x1b[2J: 1\n", f'{TOY}  "\\e]52;c;eA==\\a": {{uses: "\\u202e"}}\n', "a: b: c"]
)
def test_a_process_says_the_same(folder, run_cli, text):
    shutil.copy(folder / "toy.py", run_cli.folder)
    (run_cli.folder / "m.yaml").write_text(text)
    (folder / "m.yaml").write_text(text)
    ended, here = run_cli("validate", "m.yaml"), Invoked(["validate", "m.yaml"])
    assert (ended.code, ended.out, ended.err) == (here.code, here.out, here.err)
