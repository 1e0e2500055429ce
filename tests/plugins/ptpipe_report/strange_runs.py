"""Runs with any text in any place, of any outcome, for Hypothesis."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from ptpipe import Decision, ExitCode, Location, Outcome
from ptpipe.events import RunFinished, RunStarted, StageFinished

TEXT = st.text(st.sampled_from("]]>&<\"'%:,{}[](\n\r\t\x00\x1b\u2028\ufffe\ud800a"), max_size=12) | st.text(
    st.characters(categories=None), max_size=12
)
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.just("\udcff"), max_size=9)
NUMBERS = st.floats() | st.integers()
FACTS = st.dictionaries(TEXT, NUMBERS | TEXT | st.lists(NUMBERS, max_size=2) | st.none() | st.booleans(), max_size=3)
VERDICTS = st.fixed_dictionaries(
    {"decision": st.sampled_from([str(each) for each in Decision]), "reason": TEXT, "fail_undecided": st.booleans()}
)


@st.composite
def stages(draw: st.DrawFn, stage_id: str) -> StageFinished:
    outcome = draw(st.sampled_from(Outcome))
    summary = draw(FACTS) | (draw(VERDICTS) if draw(st.booleans()) else {})
    outputs = {draw(TEXT): {"type": draw(TEXT), "digest": "d" * 64, "size_bytes": 1, "summary": summary}}
    return StageFinished(
        stage_id,
        draw(TEXT),
        outcome,
        draw(st.floats(0, 1e9)),
        draw(TEXT),
        outputs={} if outcome in (Outcome.FAILED, Outcome.SKIPPED) else outputs,
        message=draw(TEXT),
        frames=tuple(draw(st.lists(TEXT, max_size=2))),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunStarted, RunFinished]:
    """The start and the end of a run without deliverables."""
    ids = draw(st.lists(TEXT, max_size=3, unique=True))
    finished = tuple(draw(stages(stage_id)) for stage_id in ids)
    path, name = draw(PATHS), draw(TEXT)
    places = tuple(draw(st.none() | st.just(Location(path, draw(st.integers(1, 99)), 3))) for _ in ids)
    started = RunStarted(
        draw(TEXT), name, path, Path(), tuple(ids), 7, tuple(draw(st.lists(TEXT, max_size=2))), locations=places
    )
    code = draw(st.sampled_from(ExitCode))
    return started, RunFinished(started.run_id, name, Path(), int(code), 1.5, finished, draw(st.booleans()))
