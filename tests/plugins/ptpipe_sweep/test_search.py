"""Optuna's choices: reproducible, inside the space, and better than chance."""

from __future__ import annotations

import pytest

pytest.importorskip("optuna", reason="Optuna is not installed (extra `optuna`)")

from ptpipe import ManifestError
from ptpipe_sweep.search import OptunaSearch
from ptpipe_sweep.space import Axis, Range

AXES = [
    Axis("lr", ("a.lr",), Range(1e-4, 1.0, is_log=True)),
    Axis("depth", ("a.depth",), Range(1, 9, is_whole=True)),
    Axis("sizes", ("a.sizes",), ([1, 2], None, "x")),
]


def loss(settings):
    return abs(settings["depth"] - 4) + abs(settings["lr"] - 0.01) + (settings["sizes"] != [1, 2])


def searched(seed, batch=2):
    search, found = OptunaSearch(AXES, seed, higher_is_better=False), []
    for _ in range(20):
        chosen = search.ask(batch)
        search.tell([loss(settings) for settings in chosen])
        found += chosen
    return found


def test_the_same_seed_chooses_the_same_and_finds_the_good():
    found = searched(seed=1)
    assert found == searched(seed=1)
    assert found != searched(seed=2)
    assert all(1e-4 <= each["lr"] <= 1 and 1 <= each["depth"] <= 9 for each in found)
    assert all(each["sizes"] in ([1, 2], None, "x") for each in found)
    assert min(map(loss, found[20:])) < 0.5
    assert sum(map(loss, found[20:])) < sum(map(loss, found[:20]))


def test_a_failed_trial_does_not_end_the_search():
    search = OptunaSearch(AXES, 0, higher_is_better=True)
    first = search.ask(2)
    search.tell([None, 1.0])
    assert search.ask(1)[0] not in first


@pytest.mark.thorough
def test_a_sweep_by_optuna_resumes_from_the_store(swept, record):
    arguments = ("--over", "one.value=0.5..4", "--optuna", "2", "--maximize", "sum.value", "--sweep-seed", "5")
    first = swept(*arguments, "--json")
    values = [trial["settings"]["one.value"] for trial in first.json["trials"]]
    assert len(values) == 2 and all(0.5 <= value <= 4 for value in values)
    again = swept(*arguments, "--json").json["trials"]
    assert [trial["settings"]["one.value"] for trial in again] == values
    assert all(trial["num_cached"] >= 3 for trial in again), "all but gates that refused"
    assert first.json["best"] == 1 + values.index(max(values))


def test_the_ends_of_the_space_are_checked_first(swept, project):
    ended = swept("--over", "one.value=-1..4", "--optuna", "3", "--maximize", "sum.value")
    assert isinstance(ended.error, ManifestError) and "(in the trial one.value=-1)" in str(ended.error)
    assert not project.artifacts.exists()
