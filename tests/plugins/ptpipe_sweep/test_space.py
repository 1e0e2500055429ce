"""What `--over` means, and that each mistake in it is found and named."""

from __future__ import annotations

import pytest

from ptpipe import ManifestError
from ptpipe_sweep.space import Axis, Range, parse_axes

from .conftest import STAGES


@pytest.fixture
def plan(project):
    project.write(STAGES)
    return project.plan({"other.value": 4})


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("one.value=1,2.5", Axis("one.value", ("one.value",), (1, 2.5))),
        ("one.value=1e-3, 1e-2", Axis("one.value", ("one.value",), (0.001, 0.01))),
        ("mode=plain,loud", Axis("mode", ("one.mode", "other.mode"), ("plain", "loud"))),
        ("seed=1,2", Axis("seed", ("seed",), (1, 2))),
        ("one.note='a,b',[1, 2],{c: 1}", Axis("one.note", ("one.note",), ("a,b", [1, 2], {"c": 1}))),
        ("one.value=1e-4..1e-2:log", Axis("one.value", ("one.value",), Range(0.0001, 0.01, is_log=True))),
        ("one.value=2..8", Axis("one.value", ("one.value",), Range(2, 8, is_whole=True))),
        ("one.value=-.5..8", Axis("one.value", ("one.value",), Range(-0.5, 8))),
        ("gate.unsure_at=null,1", Axis("gate.unsure_at", ("gate.unsure_at",), (None, 1))),
    ],
)
def test_an_axis_is_read(plan, text, axis):
    assert parse_axes([text], plan) == (axis,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("one.value", "not of the form STAGE.OPTION=VALUE,VALUE"),
        ("one=1,2", "name one of its options: one.OPTION=VALUE,VALUE"),
        ("noe.value=1,2", "there is no stage 'noe'.*did you mean 'one'"),
        ("valeu=1,2", "no stage has an option 'valeu' .did you mean 'value'"),
        ("one.value=1", "give several values"),
        ("one.value=[1,2]", "give several values"),
        ("one.value=", "give several values"),
        ("one.value=1,2,1", "1 is named twice"),
        ("one.value=[1", "not YAML"),
        ("one.value=2..1", "a range begins with the smaller number"),
        ("one.value=0..1:log", "a logarithmic range begins above 0"),
        ("other.value=1,2", "other.value is set by -s too"),
        ("value=1,2", "other.value is set by -s too"),
    ],
)
def test_a_mistake_is_named(plan, text, problem):
    with pytest.raises(ManifestError, match=problem) as raised:
        parse_axes([text], plan)
    assert str(raised.value).startswith(f"--over {text.partition('=')[0]}")


def test_an_option_and_a_part_of_it_overlap(plan):
    """The one that is set last would win, whatever the table says."""
    problem = "--over {0}: {0} is set by --over {1} too with {1}"
    for names in (("one.value.part", "one.value"), ("one.value", "one.value.part")):
        with pytest.raises(ManifestError) as raised:
            parse_axes([f"{name}=1,2" for name in reversed(names)], plan)
        assert [found.message for found in raised.value.problems] == [problem.format(*names)]
    assert len(parse_axes(["one.value=1,2", "one.values=1,2"], plan)) == 2


def test_every_mistake_is_named_at_once(plan):
    with pytest.raises(ManifestError) as raised:
        parse_axes(["noe.value=1,2", "one.value=1", "one.mode=a,b", "mode=a,b"], plan)
    problems = [problem.message for problem in raised.value.problems]
    assert len(problems) == 3
    assert problems[2] == "--over mode: one.mode is set by --over one.mode too"
