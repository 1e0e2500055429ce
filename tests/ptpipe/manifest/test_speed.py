"""Checking takes time in proportion to a manifest's size, whatever is wrong with it."""

from __future__ import annotations

import time

import pytest

from ptpipe import ManifestError, load_plan
from ptpipe.errors import MAX_PROBLEMS
from ptpipe.manifest.manifest import load
from ptpipe.manifest.yaml import MAX_BYTES, MAX_DEPTH

HEAD = "version: 1\nplugins: [./toy.py]\nstages:\n"


def make(number):
    return "".join(f" s{place}: {{uses: toy.make}}\n" for place in range(number))


def total(names):
    return f" all: {{uses: toy.total, needs: {{numbers: [{', '.join(names)}]}}}}\n"


LONG = "a_stage_whose_name_differs_from_others_only_at_its_very_end_"
LARGE = {
    "misspelt needs": HEAD + make(3000) + total(f"t{place}" for place in range(3000)),
    "long misspelt needs": HEAD
    + "".join(f" {LONG}{place}: {{uses: toy.make}}\n" for place in range(1300))
    + total(f"{LONG}{place}x" for place in range(1300)),
    "wrong list items": HEAD + f" one: {{uses: toy.total, with: {{a: [{'1, ' * 30_000}]}}}}\n",
    "wrong values of an option": HEAD + f" one: {{uses: toy.make, with: {{value: [{'a, ' * 30_000}]}}}}\n",
    "plugins": f"version: 1\nplugins: [{', '.join(f'./p{place}.py' for place in range(15_000))}]\nstages:\n" + make(1),
    "ambiguous inputs": HEAD + make(3000) + "".join(f" t{place}: {{uses: toy.add}}\n" for place in range(3000)),
    "unknown options": HEAD
    + f" one: {{uses: toy.make, with: {{{', '.join(f'valu{n}: 1' for n in range(12_000))}}}}}\n",
    "unknown options of many stages": HEAD
    + "".join(f" s{n}: {{uses: toy.make, with: {{valu: 1, vale: 2, mod: 3}}}}\n" for n in range(3500)),
    "unknown needs": HEAD + total(f"{place:x}" for place in range(30_000)),
    "equal needs": HEAD + make(1) + total(["s0"] * 45_000),
    "needs below": HEAD + total(f"s{place}" for place in range(5_000)) + make(5_000),
    "unknown kinds": HEAD + "".join(f" s{place}: {{uses: toy.mkae}}\n" for place in range(9_000)),
    "unknown keys": HEAD + " one:\n" + "".join(f"  usess{place}: 1\n" for place in range(12_000)),
    "wrong ids": HEAD + "".join(f" S{place}: {{uses: toy.make}}\n" for place in range(9_000)),
    "repeated keys": HEAD + " s: {}\n" * 20_000,
    "one long need, named often": HEAD + f" s: &x {'y' * 60_000}\n" + total(["*x"] * 20_000),
    "a long stage id with many mistakes": HEAD
    + f" ? {'A' * 100_000}\n : needs: {{{', '.join(f'p{n}: []' for n in range(10_000))}}}\n",
    "one long kind, named often": HEAD + f" s: {{uses: &x {'y' * 60_000}}}\n" + " t: {uses: *x}\n" * 10,
    "a long option with many mistakes": HEAD
    + f" s:\n  uses: toy.make\n  with:\n   ? {'k' * 100_000}\n   : [{'x, ' * 40_000}]\n",
    "blanks in a name": HEAD + f' ? "{" " * 200_000}\\n"\n : {{}}\n',
}


FOUND = {"misspelt needs", "wrong list items", "plugins", "ambiguous inputs", "unknown options", "equal needs"}
"""Those that once took longest; the others are further combinations."""


@pytest.mark.parametrize(
    "text",
    [pytest.param(LARGE[name], id=name, marks=() if name in FOUND else pytest.mark.thorough) for name in LARGE],
)
def test_any_mistake_made_thousands_of_times_is_told_in_seconds(project, text):
    assert len(text) <= MAX_BYTES
    project.manifest.write_text(text)
    start = time.process_time()
    with pytest.raises(ManifestError) as raised:
        load_plan(project.manifest)
    assert time.process_time() - start < 6, "2 s, with room for a slow machine; each took 5 to 50 s"
    assert len(raised.value.problems) <= MAX_PROBLEMS + 2
    assert len(str(raised.value)) < 200_000


@pytest.mark.parametrize("unit", ["*x", "{*x : 1}", "[*x, *x, *x, *x]"])
def test_what_aliases_expand_to_is_capped_in_letters_too(project, unit):
    project.manifest.write_text(f"a: &x {'y' * 100_000}\nb: [{', '.join([unit] * 5_000)}]\n")
    start = time.process_time()
    with pytest.raises(ManifestError, match=r"more than 1000000 letters, aliases expanded$"):
        load(project.manifest)
    assert time.process_time() - start < 3


def test_problems_beyond_the_hundredth_are_counted(project):
    project.manifest.write_text(HEAD + make(1) + total(f"s0{place}" for place in range(3000)))
    with pytest.raises(ManifestError) as raised:
        load_plan(project.manifest)
    *first, last = raised.value.problems
    assert len(first) == MAX_PROBLEMS
    assert str(first[0]).endswith("there is no stage 's00' (did you mean 's0'?)")
    assert str(last) == "... and 2,900 more problems"


def test_at_most_five_candidates_are_named(project):
    project.manifest.write_text(HEAD + make(3000) + " t: {uses: toy.add, needs: {a: s0}}\n")
    with pytest.raises(ManifestError, match=r"fits several stages above: s0, s1, s2, s3, s4 and 2,995 more; name one"):
        load_plan(project.manifest)


def test_ten_thousand_stages_are_checked_in_seconds(project):
    text = "version: 1\nplugins: [./toy.py]\nstages:\n s: {uses: toy.make}\n"
    text += "".join(f" t{place}: {{uses: toy.split}}\n" for place in range(1)).replace("split", "clock")
    text += "".join(f" {place:x}: {{uses: toy.make}}\n".replace(" ", " s", 1) for place in range(9_990))
    project.manifest.write_text(text)
    start = time.process_time()
    assert len(load_plan(project.manifest).stages) > 9_990
    assert time.process_time() - start < 6, "2 s, with room for a slow machine"


def test_many_overrides_of_one_group_take_linear_time(project):
    project.write("one: {uses: toy.make}")
    overrides = {f"one.group.x{number}": number for number in range(20_000)}
    start = time.process_time()
    overridden = load(project.manifest).overridden_by(overrides)
    assert time.process_time() - start < 3
    assert len(overridden.stages[0].options["group"]) == 20_000


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 500, 3_000, 30_000])
def test_an_override_is_as_deep_as_a_manifest_at_most(project, depth):
    project.write("one: {uses: toy.make}")
    name = f"one{'.a' * depth}"
    with pytest.raises(ManifestError) as raised:
        load_plan(project.manifest, {name: 1})
    (problem,) = raised.value.problems
    assert problem.code == 2
    assert problem.message.endswith(f"nested more than {MAX_DEPTH} levels deep")
