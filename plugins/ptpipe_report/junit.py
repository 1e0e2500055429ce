"""`junit.xml`: a run as test results, which CI services show: a test case for each gate.

The file fits both schemas in use: that of Ant's JUnit task (`JUnit.xsd`), and that of Jenkins (`junit-10.xsd`), which
pytest follows too. These have no place for a machine's name to be left out; it is given as `localhost`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from ptpipe import Decision, ExitCode, Outcome, RunFinished, RunStarted, StageFinished, one_line
from ptpipe_report import run_summary
from ptpipe_report.json_lines import to_json

_FAILED = ("failure", "error")


def junit_xml(started: RunStarted, finished: RunFinished, at: datetime) -> bytes:
    """Return the file: gates, failed stages and skipped stages as test cases; `at`: when the run ended."""
    root = Element("testsuites")
    suite = SubElement(root, "testsuite")
    properties = SubElement(suite, "properties")
    for name, value in _facts(started, finished).items():
        SubElement(properties, "property", name=name, value=_text(value))
    counts: Counter[str] = Counter()
    for case in _cases(started, finished):
        suite.append(case)
        counts.update(["tests", *(child.tag for child in case)])
    SubElement(suite, "system-out").text = _summary(finished)
    SubElement(suite, "system-err").text = ""
    started_at = datetime.fromisoformat(started.started_at) if started.started_at else at
    suite.attrib |= {
        "id": "0",
        "name": _text(finished.name),
        "package": _text(finished.name),
        "timestamp": f"{started_at.astimezone(UTC):%Y-%m-%dT%H:%M:%S}",
        "hostname": "localhost",
        "tests": str(counts["tests"]),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": str(counts["skipped"]),
        "time": f"{finished.seconds:.3f}",
    }
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return content + b"\n"


def _facts(started: RunStarted, finished: RunFinished) -> Mapping[str, str]:
    return {
        "run": finished.run_id,
        "manifest": started.manifest_path,
        "overrides": " ".join(started.overrides),
        "seed": str(started.seed),
        "exit code": str(finished.exit_code),
    }


def _cases(started: RunStarted, finished: RunFinished) -> list[Element]:
    """Return a test case for each verdict and for each stage that failed or was skipped.

    A run that ended with an exit code of its own, without any such stage, is a case too: it must not look passed.
    """
    cases = [case for stage in finished.stages for case in _stage_cases(stage, started, finished)]
    if finished.exit_code != ExitCode.DONE and not any(case.find(tag) is not None for case in cases for tag in _FAILED):
        case = Element("testcase", classname=_text(finished.name), name="run", time=f"{finished.seconds:.3f}")
        ending = run_summary.ending(finished)
        SubElement(case, "error", type=ExitCode(finished.exit_code).name.lower(), message=ending).text = ending
        cases.append(case)
    return cases


def _stage_cases(stage: StageFinished, started: RunStarted, finished: RunFinished) -> Iterator[Element]:
    gates = run_summary.gates([stage])
    for gate in gates:
        case = _case(finished, stage, f"{stage.stage_id}.{gate.output}" if len(gates) > 1 else stage.stage_id)
        _add_decision(case, gate, str(run_summary.locations(started)[stage.stage_id]))
        yield case
    message = _text(stage.message)
    if stage.outcome in (Outcome.FAILED, Outcome.INTERRUPTED):
        case = _case(finished, stage, stage.stage_id)
        SubElement(case, "error", type=str(stage.outcome), message=message).text = _lines(stage.message, *stage.frames)
        yield case
    elif stage.outcome is Outcome.SKIPPED:
        case = _case(finished, stage, stage.stage_id)
        SubElement(case, "skipped", message=message)
        yield case


def _case(finished: RunFinished, stage: StageFinished, name: str) -> Element:
    classname = f"{finished.name}.{stage.kind}"
    return Element("testcase", classname=_text(classname), name=_text(name), time=f"{stage.seconds:.3f}")


def _add_decision(case: Element, gate: run_summary.Gate, place: str) -> None:
    if gate.fails_run:
        facts = (f"{name}: {json.dumps(to_json(value))}" for name, value in gate.facts.items())
        failure = SubElement(case, "failure", type=_text(gate.decision), message=_text(gate.reason))
        failure.text = _lines(gate.reason, f"at {place}", *facts)
    elif gate.decision != Decision.PASSED:
        SubElement(case, "skipped", message=_text(f"{gate.decision}: {gate.reason}"))


def _summary(finished: RunFinished) -> str:
    """Return the reasons of all gates, as a passed case has no place for it, and the files to ship."""
    gates = (f"{gate.stage_id} {gate.decision}: {gate.reason}" for gate in run_summary.gates(finished.stages))
    files = (f"deliverable: {path.as_posix()}" for path in run_summary.deliverables(finished))
    return _lines(*gates, *files)


def _lines(*lines: str) -> str:
    return "\n".join(map(_text, lines))


def _text(text: str) -> str:
    """Return the text on one line, which XML 1.0 can hold: all that it can't is escaped, as no reader could see it."""
    return one_line(text)
