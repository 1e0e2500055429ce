"""What plugins add to reports: gathered once at the end of a run, and no plugin can break the run by it."""

from __future__ import annotations

import re
import textwrap

import pytest

from ptpipe import ExitCode, Outcome, Reporter
from ptpipe.events import Notice

HEAD = "name: toy\nplugins: [./toy.py, ./pictures.py]"
STAGES = """
one: {uses: toy.make, with: {value: 3}}
two: {uses: toy.make, with: {value: 2}}
sum: {uses: toy.add, needs: {a: one, b: two}}
"""
PICTURES = """
    from ptpipe import Section, hookimpl
    from ptpipe.sections import Facts, Text


    @hookimpl
    def ptpipe_report_sections(plan, run, load):
        {body}
"""


class Ear(Reporter):
    def __init__(self):
        self.ends, self.events = [], []

    def run_finished(self, event):
        self.ends.append(event)

    def event(self, event):
        self.events.append(event)

    @property
    def notices(self):
        return [event.text for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def told(project, modules_forgotten):
    """Run with a plugin whose hook has this body; return the run's result and what a reporter was told."""

    def run(body: str, stages: str = STAGES):
        (project.folder / "pictures.py").write_text(
            textwrap.dedent(PICTURES).format(body=textwrap.indent(textwrap.dedent(body), " " * 4).strip()),
            encoding="utf-8",
        )
        project.write(stages, HEAD)
        ear = Ear()
        return project.run(reporters=[ear]), ear

    return run


def test_reporters_get_the_sections_with_the_end(told):
    result, ear = told('return [Section("Sum", (Text(str(load("sum", "output").value)),), stage_id="sum")]')
    ((end,), (section,)) = ear.ends, ear.ends[0].sections
    assert (section.title, section.blocks[0].text) == ("Sum", "5.0")
    assert end.exit_code == result.exit_code == ExitCode.DONE
    again, ear = told('return [Section("Sum", (Text(str(load("sum", "output").value)),), stage_id="sum")]')
    assert {of.outcome for of in again.stages.values()} == {Outcome.CACHED}
    assert ear.ends[0].sections == (section,), "where all was cached too"


def test_it_is_called_once_with_plan_and_outcomes(told):
    body = """
        facts = tuple((of.stage_id, f"{of.outcome} {plan[of.stage_id].kind}") for of in run.stages)
        yield Section("Stages", (Facts(facts),))
    """
    _, ear = told(
        body,
        "one: {uses: toy.make}\nbad: {uses: toy.fail, needs: {a: one}}\nnext: {uses: toy.add, needs: {a: one, b: bad}}",
    )
    (section,) = ear.ends[0].sections
    assert dict(section.blocks[0].facts) == {
        "one": "done toy.make", "bad": "failed toy.fail", "next": "skipped toy.add"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 1 / 0", r"ZeroDivisionError: division by zero \(pictures.py:8\)"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ('yield Section("a", ())\nraise ValueError("later")', "ValueError: later"),
        ('return load("sum", "other")', "KeyError: 'other'"),
        ("return [None]", "returned None, which is no Section"),
        ('return ["<h1>Hello</h1>"]', "returned '<h1>Hello</h1>', which is no Section"),
    ],
)
def test_a_hook_that_fails_is_named_and_changes_nothing_else(told, body, reason):
    result, ear = told(body)
    assert result.exit_code == ExitCode.DONE
    assert {of.outcome for of in result.stages.values()} == {Outcome.DONE}
    assert ear.ends[0].sections == ()
    (notice,) = ear.notices
    assert re.search(rf"plugin ./pictures.py adds nothing to the report: .*{reason}", notice)
    assert notice in (result.folder / "log.txt").read_text(encoding="utf-8")


def test_what_a_hook_prints_does_not_reach_stdout(told, capsys):
    told('print("hello")\nreturn []')
    assert capsys.readouterr().out == ""


def test_an_interrupt_inside_a_hook_leaves_the_run_as_it_ended(told):
    result, ear = told("raise KeyboardInterrupt")
    assert result.exit_code == ExitCode.DONE
    assert ear.ends[0].sections == ()
    assert ear.notices == ["interrupted: the report has nothing that plugins add"]
