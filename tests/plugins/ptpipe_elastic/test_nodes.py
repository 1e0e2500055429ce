"""Node 0 and those that follow it: real plans, a real store, threads in the place of machines."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ptpipe import Event, ExitCode, LogLine, ManifestError, Notice, Problem, RunFinished, StageError, UsageError
from ptpipe.launching import Call, Nodes, StoredInput, exclusive_lock
from ptpipe.plan.bind import Plan
from ptpipe.store.store import Store
from ptpipe_elastic.nodes import Announcement, Follower, Leader, _file, _read, lead, nodes_of_environment

STAGES = """
single: {uses: pair.make}
one: {uses: pair.sum, needs: {a: single, b: single}}
two: {uses: pair.sum, needs: {a: one, b: single}}
fails: {uses: pair.sum, needs: {a: one, b: two}}
"""
LAUNCHER = """
from ptpipe import Context, StageConfig, StageError, hookimpl, stage
from ptpipe_torch import Ranges

calls = []


class Config(StageConfig):
    value: float = 1.0


@stage("pair.make")
def make(config: Config, ctx: Context) -> Ranges:
    '''Make.'''
    return Ranges({}, 0)


@stage("pair.sum", workers=lambda config: 2)
def pair(config: Config, ctx: Context, a: Ranges, b: Ranges) -> Ranges:
    '''Add.'''
    return a


@hookimpl
def ptpipe_stages():
    return [make, pair]


@hookimpl
def ptpipe_launch(call, tell):
    calls.append(call)
    if call.stage_id == "fails":
        raise StageError("a worker here was killed")
    return {}
"""
KEY, DIGEST = "a5" * 32, "d9" * 32
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "4"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),  # in a batch script, and no step of it
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, None),
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        (SLURM, Nodes(8, 3, started=True)),
        (TORCHRUN, Nodes(4, 2, started=True)),
        ({**SLURM, **TORCHRUN}, Nodes(4, 2, started=True)),  # torchrun, started by srun on each machine
    ],
)
def test_nodes_that_others_started(variables: dict[str, str], nodes: Nodes | None) -> None:
    assert nodes_of_environment(variables) == nodes


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID is set, but RANK is missing, not a number"),
        ({**TORCHRUN, "RANK": ""}, "RANK is '', not"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1', not"),
        ({**TORCHRUN, "RANK": "1_0"}, "RANK is '1_0', not"),
        ({**TORCHRUN, "RANK": "\u0662"}, "RANK is "),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9999"),
        ({**TORCHRUN, "RANK": "4"}, "process 4 of 4; ranks are 0 to 3"),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, "process 0 of 0"),
        ({**SLURM, "SLURM_NTASKS": "two"}, "SLURM_STEP_ID is set, but SLURM_NTASKS is 'two', not a number"),
        ({**SLURM, "SLURM_NTASKS": ""}, "SLURM_NTASKS is '', not a number"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is missing"),
    ],
)
def test_ranks_that_make_no_sense_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        nodes_of_environment(variables)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 200


@dataclass
class Following:
    """A node that follows, in a thread."""

    follower: Follower
    events: list[Event]
    ending: list[ExitCode | Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        try:
            self.ending.append(self.follower.follow())
        except Exception as error:  # noqa: BLE001  # told to the test
            self.ending.append(error)

    def end(self) -> ExitCode | Exception:
        self.thread.join(60)
        (ending,) = self.ending
        return ending

    def waits_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert self.thread.is_alive(), self.ending
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)

    def has_said(self, words: str) -> Callable[[], bool]:
        return lambda: any(words in event.text for event in self.events if isinstance(event, LogLine | Notice))


@dataclass
class Cluster:
    """Two nodes with a manifest each, and the folder that they share."""

    plan: Plan
    store: Store
    project: object

    def leader(self) -> Leader:
        return Leader(self.plan, self.store)

    def follow(self, rank: int = 1, fresh: tuple[str, ...] = ()) -> Following:
        """Start a node; it waits for node 0 when this returns."""
        events: list[Event] = []
        nodes = Nodes(2, rank, "localhost:1")
        plan = self.project.plan()  # type: ignore[attr-defined]
        following = Following(Follower(plan, self.store, nodes, events.append, fresh), events)
        following.waits_for(following.has_said("is waiting for node 0"))
        return following

    def calls(self, following: Following) -> list[Call]:
        """What the launcher of that node was asked to do."""
        (module,) = (p.module for p in following.follower.plan.vocabulary.plugins if hasattr(p.module, "calls"))
        return module.calls

    def call(self, stage_id: str) -> Call:
        """A call as node 0 has it, with its own paths."""
        inputs = {
            port: tuple(StoredInput("?", "?", DIGEST, "?") for _ in references)
            for port, references in self.plan[stage_id].wiring.items()
        }
        return Call(stage_id, "?", {}, 9, KEY, inputs, "/elsewhere", ("evil.py",), "/elsewhere", 2, Nodes(2, 0))

    @property
    def file(self) -> Path:
        return _file(self.plan, self.store)


@pytest.fixture
def cluster(project, tmp_path) -> Cluster:
    (tmp_path / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    project.write(STAGES, head="name: toy\nplugins: [./launcher.py]")
    store = Store(project.artifacts)
    store.open_for_writing()
    return Cluster(project.plan(), store, project)


def end(leader: Leader, following: Following, code: ExitCode = ExitCode.DONE) -> None:
    leader.end(code)
    assert following.end() == code


def test_followers_take_part_in_each_announced_call_once(cluster: Cluster) -> None:
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading():
        for number, stage_id in enumerate(("one", "two", "one"), start=1):
            with leader.announced(cluster.call(stage_id)):
                following.waits_for(lambda number=number: len(cluster.calls(following)) == number)
        time.sleep(0.5)  # two more looks at what was done already
        end(leader, following)
    calls = cluster.calls(following)
    assert [call.stage_id for call in calls] == ["one", "two", "one"]
    for call in calls:  # this node's own place, and where things are for it
        assert call.nodes == Nodes(2, 1, "localhost:1")
        assert call.artifacts == str(cluster.store.root)
        assert call.folder == str(cluster.plan.manifest.path.parent.absolute())
        assert (call.kind, call.key, call.workers) == ("pair.sum", KEY, 2)
        assert (call.plugins, call.seed, call.options) == (("./launcher.py",), 0, {"value": 1.0})
    assert calls[0].inputs["a"] == (StoredInput("pair.make", "output", DIGEST, "single"),)
    said = [event.text for event in following.events if isinstance(event, LogLine)]
    assert said == [
        "node 1 is waiting for node 0",
        "node 1 takes part in one",
        "node 1 takes part in two",
        "node 1 takes part in one",
        "node 1 ends: node 0 ended with exit code 0",
    ]


def test_several_follow_one(cluster: Cluster) -> None:
    leader, nodes = cluster.leader(), [cluster.follow(rank) for rank in (1, 2)]
    with leader.leading():
        with leader.announced(cluster.call("one")):
            for following in nodes:
                following.waits_for(lambda following=following: len(cluster.calls(following)) == 1)
        leader.end(ExitCode.REFUSED)
        assert [following.end() for following in nodes] == [ExitCode.REFUSED] * 2
    assert [cluster.calls(following)[0].nodes.rank for following in nodes] == [1, 2]


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.REFUSED, ExitCode.INTERRUPTED])
def test_they_end_as_node_0_does(cluster: Cluster, code: ExitCode) -> None:
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading():
        leader.end(code)  # gone so fast that perhaps nobody saw it lead
    assert following.end() is code
    assert cluster.calls(following) == []


def test_a_late_comer_takes_part_in_what_goes_on(cluster: Cluster) -> None:
    leader = cluster.leader()
    with leader.leading():
        with leader.announced(cluster.call("one")):
            following = cluster.follow()
            following.waits_for(lambda: len(cluster.calls(following)) == 1)
        end(leader, following)


def test_but_not_in_what_is_over(cluster: Cluster) -> None:
    """It was killed, and comes back between two stages."""
    leader = cluster.leader()
    with leader.leading():
        with leader.announced(cluster.call("one")):
            pass
        following = cluster.follow()
        time.sleep(0.5)
        with leader.announced(cluster.call("two")):
            following.waits_for(lambda: len(cluster.calls(following)) == 1)
        end(leader, following)
    assert [call.stage_id for call in cluster.calls(following)] == ["two"]


def test_a_failure_here_is_told_and_node_0_decides(cluster: Cluster) -> None:
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading():
        with leader.announced(cluster.call("fails")):
            following.waits_for(following.has_said("a worker here was killed"))
        with leader.announced(cluster.call("one")):
            following.waits_for(lambda: len(cluster.calls(following)) == 2)
        end(leader, following, ExitCode.FAILED)
    assert Notice("fails", "a worker here was killed") in following.events


def test_how_an_earlier_run_ended_counts_for_nothing(cluster: Cluster) -> None:
    earlier = cluster.leader()
    with earlier.leading():
        earlier.end(ExitCode.FAILED)
    os.utime(cluster.file, (time.time() - 60,) * 2)
    following, leader = cluster.follow(), cluster.leader()
    time.sleep(0.5)
    assert following.thread.is_alive()
    with leader.leading():
        end(leader, following)


def test_how_an_earlier_run_ended_counts_for_nothing_before_node_0_announces(cluster: Cluster) -> None:
    """It leads as soon as it holds the lock, and a slow disk or NFS shows its first announcement later."""
    earlier, leader = cluster.leader(), cluster.leader()
    with earlier.leading():
        earlier.end(ExitCode.FAILED)
    following = cluster.follow()
    with exclusive_lock(cluster.file.with_suffix(".lock")):
        time.sleep(1)
        assert following.thread.is_alive(), following.ending
        with leader.announced(cluster.call("one")):
            following.waits_for(lambda: len(cluster.calls(following)) == 1)
        end(leader, following)


def test_a_clock_that_is_set_back_hides_no_node_0(cluster: Cluster) -> None:
    """It came and went between two looks, an hour before this node began by the shared folder's clock."""
    cluster.file.write_text(Announcement(calls=0).model_dump_json(), encoding="utf-8")
    following = cluster.follow()
    written = cluster.file.with_name("written")
    written.write_text(Announcement(state="ended", calls=0).model_dump_json(), encoding="utf-8")
    os.utime(written, (time.time() - 3600,) * 2)
    written.rename(cluster.file)
    assert following.end() is ExitCode.DONE


def test_what_an_earlier_run_announced_counts_for_nothing(cluster: Cluster) -> None:
    earlier = cluster.leader()
    with earlier.leading(), earlier.announced(cluster.call("one")):
        left = cluster.file.read_bytes()
    cluster.file.write_bytes(left)  # it was killed
    following = cluster.follow()
    time.sleep(0.5)
    assert following.thread.is_alive()
    end(cluster.leader(), following)
    assert cluster.calls(following) == []


def test_a_node_0_that_vanishes_is_missed(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr("ptpipe_elastic.nodes._SEEN_LATE_S", 0.5)
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading(), leader.announced(cluster.call("one")):
        following.waits_for(lambda: len(cluster.calls(following)) == 1)
    ending = following.end()
    assert isinstance(ending, StageError)
    assert str(ending) == ("node 0 disappeared; start all nodes again to resume from the last checkpoint")


def test_how_an_earlier_run_ended_may_be_seen_while_node_0_leads(cluster: Cluster) -> None:
    with cluster.leader().leading():
        cluster.leader().end(ExitCode.FAILED)
    earlier, leader = cluster.file.read_bytes(), cluster.leader()
    with leader.leading():
        cluster.file.write_bytes(earlier)
        following = cluster.follow()
        time.sleep(1)
        assert following.thread.is_alive()
        with leader.announced(cluster.call("one")):
            following.waits_for(lambda: len(cluster.calls(following)) == 1)
        leader.end(ExitCode.DONE)
    assert following.end() == ExitCode.DONE


def test_a_node_0_that_vanishes_before_it_announces_anything_is_missed(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr("ptpipe_elastic.nodes._SEEN_LATE_S", 0.5)
    with cluster.leader().leading():
        cluster.leader().end(ExitCode.DONE)
    following = cluster.follow()
    with exclusive_lock(cluster.file.with_suffix(".lock")):
        time.sleep(1)
    assert isinstance(following.end(), StageError)


def test_the_first_call_of_another_node_0_is_a_new_one(cluster: Cluster) -> None:
    """What one that was killed in its third call has left is seen while the next one leads already."""
    killed = cluster.leader()
    killed._calls = 2
    with killed.leading(), killed.announced(cluster.call("two")):
        left = cluster.file.read_bytes()
    cluster.file.write_bytes(left)
    leader = cluster.leader()
    with exclusive_lock(cluster.file.with_suffix(".lock")):
        following = cluster.follow()
        following.waits_for(lambda: [call.stage_id for call in cluster.calls(following)] == ["two"])
        with leader.announced(cluster.call("one")):
            following.waits_for(lambda: [call.stage_id for call in cluster.calls(following)] == ["two", "one"])
        end(leader, following)


def test_an_announcement_that_can_not_be_read_once_is_none_of_an_earlier_run(cluster: Cluster, monkeypatch) -> None:
    """As over NFS, where it was just replaced."""
    failures = [None]

    def read(*args, **kwargs):
        return failures.pop() if failures else _read(*args, **kwargs)

    monkeypatch.setattr("ptpipe_elastic.nodes._read", read)
    leader = cluster.leader()
    with leader.leading():
        with leader.announced(cluster.call("one")):
            following = cluster.follow()
            following.waits_for(lambda: len(cluster.calls(following)) == 1)
        end(leader, following)


def test_how_node_0_ended_may_be_seen_after_its_lock_is_free(cluster: Cluster) -> None:
    """As on GlusterFS and NFS, where another node sees a released lock at once, but a replaced file late."""
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading(), leader.announced(cluster.call("one")):
        following.waits_for(lambda: len(cluster.calls(following)) == 1)
    time.sleep(1)
    end(leader, following, ExitCode.REFUSED)


def test_a_node_0_that_never_comes_is_not_waited_for_for_ever(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr("ptpipe_elastic.nodes.WAIT_FOR_LEADER_S", 0.5)
    begin_s = time.monotonic()
    ending = cluster.follow().end()
    assert isinstance(ending, StageError)
    assert str(ending).startswith("node 0 did not start within 0.5 s; do both nodes have the same manifest, ")
    assert time.monotonic() - begin_s >= 0.5


@pytest.fixture
def are_cached(cluster: Cluster, monkeypatch) -> dict[str, bool]:
    """Which stages are cached: all with several workers, unless a test changes it. Waiting is short."""
    monkeypatch.setattr("ptpipe_elastic.nodes.WAIT_WITHOUT_WORK_S", 0.1)
    monkeypatch.setattr("ptpipe_elastic.nodes.WAIT_FOR_LEADER_S", 1.0)
    are_cached = {"single": False, "one": True, "two": True, "fails": True}

    def cache_status(plan, artifacts, fresh):
        assert artifacts == cluster.store.root
        return [SimpleNamespace(stage_id=id_, is_cached=are_cached[id_] and id_ not in fresh) for id_ in are_cached]

    monkeypatch.setattr("ptpipe_elastic.nodes.cache_status", cache_status)
    return are_cached


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.REFUSED])
def test_a_node_that_is_not_needed_ends_as_the_node_0_that_has_ended(cluster: Cluster, are_cached, code) -> None:
    """It found everything cached, and ended before this node began."""
    leader = cluster.leader()
    with leader.leading():
        leader.end(code)
    following = cluster.follow()
    assert following.end() is code, "what has one worker is node 0's own"
    assert following.has_said(f"is not needed and ends: node 0 ended before with exit code {code}")()


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.INTERRUPTED])
def test_a_node_0_that_did_not_come_to_its_end_is_waited_for(cluster: Cluster, are_cached, code) -> None:
    leader = cluster.leader()
    with leader.leading():
        leader.end(code)
    ending = cluster.follow().end()
    assert isinstance(ending, StageError)
    assert str(ending).startswith("node 0 did not start within")


def test_a_node_that_is_needed_waits_for_the_next_node_0(cluster: Cluster, are_cached) -> None:
    leader = cluster.leader()
    with leader.leading():
        leader.end(ExitCode.DONE)
    to_run_again = cluster.follow(fresh=("two",))
    assert isinstance(to_run_again.end(), StageError)
    with leader.leading():
        leader.end(ExitCode.DONE)
    are_cached["two"] = False
    assert isinstance(cluster.follow().end(), StageError)


def test_a_node_that_is_not_needed_reports_no_success_of_a_node_0_that_it_has_not_seen(
    cluster: Cluster, are_cached
) -> None:
    assert isinstance(cluster.follow().end(), StageError), "there never was one"
    leader = cluster.leader()
    with leader.leading():
        pass
    assert isinstance(cluster.follow().end(), StageError), "it was killed"
    with leader.leading():
        leader.end(ExitCode.DONE)
    os.utime(cluster.file, (time.time() - 60,) * 2)
    assert isinstance(cluster.follow().end(), StageError), "it was that of an earlier job"


def test_a_node_0_that_works_long_is_waited_for(cluster: Cluster, monkeypatch) -> None:
    """The limit is for its coming only."""
    monkeypatch.setattr("ptpipe_elastic.nodes.WAIT_FOR_LEADER_S", 0.3)
    leader = cluster.leader()
    with leader.leading():
        following = cluster.follow()
        time.sleep(0.8)
        assert following.thread.is_alive()
        end(leader, following)


def test_two_leaders_are_refused(cluster: Cluster) -> None:
    words = "another node 0 is running this manifest in the same artifacts folder"
    with cluster.leader().leading(), pytest.raises(UsageError, match=words), cluster.leader().leading():
        pytest.fail("two lead")
    with cluster.leader().leading():
        pass  # the first has gone


def test_runs_of_another_manifest_do_not_meet(cluster: Cluster, project) -> None:
    other = Leader(project.plan({"single.value": 2.0}), cluster.store)
    with cluster.leader().leading(), other.leading():
        pass
    assert _file(project.plan({"single.value": 2.0}), cluster.store) != cluster.file
    assert _file(project.plan({"single.value": 1.0}), cluster.store) == cluster.file  # as the default is


def test_a_manifest_is_the_same_wherever_it_lies(cluster: Cluster, project) -> None:
    before = cluster.file
    moved = project.folder / "elsewhere"
    moved.mkdir()
    for name in ("m.yaml", "launcher.py"):
        (project.folder / name).rename(moved / name)
    project.manifest = moved / "m.yaml"
    assert _file(project.plan(), cluster.store) == before


def test_leading_announces_what_a_launcher_executes_if_it_has_several_workers(cluster: Cluster) -> None:
    """Whichever launcher it is, this plugin's or another's."""
    following = cluster.follow()
    hook = cluster.plan.vocabulary.manager.hook

    def run() -> RunFinished:
        for stage_id, workers in (("one", 1), ("two", 2)):
            call = replace(cluster.call(stage_id), workers=workers)
            assert hook.ptpipe_launch(call=call, tell=lambda event: None) == {}
            announced = json.loads(cluster.file.read_text())
            assert (announced["calls"], announced["call"] is not None) == (workers - 1, False), (
                "over when the launcher returns"
            )
        return RunFinished("r", "toy", cluster.file.parent, ExitCode.REFUSED, 1.0, ())

    assert lead(cluster.plan, cluster.store, run).exit_code == ExitCode.REFUSED
    assert following.end() is ExitCode.REFUSED
    hook.ptpipe_launch(call=cluster.call("one"), tell=lambda event: None)
    assert json.loads(cluster.file.read_text())["calls"] == 1, "it leads no more"


def test_a_run_that_does_not_begin_ends_the_other_nodes(cluster: Cluster) -> None:
    """A preflight that reports something missing, for example."""
    following = cluster.follow()

    def run() -> RunFinished:
        raise ManifestError([Problem("one: no engine")])

    with pytest.raises(ManifestError, match="no engine"):
        lead(cluster.plan, cluster.store, run)
    assert following.end() is ExitCode.USAGE


def test_nothing_is_left_behind_but_the_word_and_its_lock(cluster: Cluster) -> None:
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading():
        end(leader, following)
    assert sorted(path.name for path in cluster.file.parent.iterdir()) == [
        "in-use",
        cluster.file.name,
        cluster.file.with_suffix(".lock").name,
    ]


def announced_text(**changes: object) -> str:
    call = {"stage_id": "one", "key": KEY, "inputs": {"a": [DIGEST], "b": [DIGEST]}}
    return json.dumps({"state": "running", "calls": 1, "call": call | changes})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("garbage", "is no announcement of node 0 (content: Invalid JSON"),
        ("[]", "is no announcement"),
        ("", "is no announcement"),
        ("\x00\xff", "is no announcement"),
        ("[" * 100_000, "is no announcement"),
        (" " * (2 << 20), "is no announcement"),
        ('{"state": "running", "calls": "1"}', "(calls: "),
        ('{"state": "ended", "calls": 1, "exit_code": 9}', "(exit_code: "),
        ('{"state": "over", "calls": 1}', "(state: "),
        (announced_text(plugins=["evil.py"]), "(call.plugins: Extra inputs are not permitted)"),
        (announced_text(kind="evil.kind"), "(call.kind: Extra inputs"),
        (announced_text(key="../../../../tmp"), "(call.key: "),
        (announced_text(key=KEY + "\n"), "(call.key: "),
        (announced_text(inputs={"a": [7]}), "(call.inputs.a.0: "),
        (announced_text(inputs={"a": ["../" * 21 + "x"], "b": [DIGEST]}), "(call.inputs.a.0: "),
        (announced_text(inputs={"a": [DIGEST]}), "announced a stage 'one' that this node's manifest does not have"),
        (announced_text(inputs={"a": [DIGEST] * 2, "b": [DIGEST]}), "announced a stage 'one' that"),
        (announced_text(stage_id="single", inputs={}), "announced a stage 'single' that"),  # none with several workers
        (announced_text(stage_id="\x1b]0;x\x07"), r"announced a stage '\x1b]0;x\x07' that"),
    ],
)
def test_what_another_wrote_into_the_announcement_is_one_clear_error(
    cluster: Cluster, content: str, words: str
) -> None:
    follower = Follower(cluster.plan, cluster.store, Nodes(2, 1, "localhost:1"), lambda event: None)
    cluster.file.write_bytes(content.encode("latin-1"))
    with pytest.raises(StageError) as raised:
        follower._call(_read(cluster.file, newer_than_ns=0).call)
    assert words in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


def test_it_ends_the_node_and_nothing_is_executed(cluster: Cluster) -> None:
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading():
        cluster.file.write_text(announced_text(plugins=["evil.py"]), encoding="utf-8")
        ending = following.end()
    assert "is no announcement" in str(ending)
    assert cluster.calls(following) == []


def test_links_in_the_shared_folder_are_not_followed(cluster: Cluster, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious", encoding="utf-8")
    for rank in (1, 2):  # predictable names of old
        cluster.file.with_suffix(f".node-{rank}").symlink_to(target)
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading():
        cluster.file.unlink()
        cluster.file.symlink_to(target)
        ending = following.end()
    assert isinstance(ending, StageError)
    assert "is a link" in str(ending)
    assert target.read_text(encoding="utf-8") == "precious"


def test_a_pipe_in_place_of_the_announcement_does_not_block(cluster: Cluster) -> None:
    following, leader = cluster.follow(), cluster.leader()
    with leader.leading():
        cluster.file.unlink()
        os.mkfifo(cluster.file)
        assert "is no announcement" in str(following.end())


def test_a_malformed_environment_is_a_mistake_of_the_command_line(run_cli) -> None:
    (run_cli.folder / "m.yaml").write_text(
        "version: 1\nname: n\nstages:\n  data: {uses: data.synthetic}\n", encoding="utf-8"
    )
    ended = run_cli("run", "m.yaml", SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_NTASKS="two")
    assert ended.code == 2
    words = "SLURM_STEP_ID is set, but SLURM_NTASKS is 'two', not a number; unset SLURM_STEP_ID outside a cluster"
    assert ended.err == f"ptpipe: {words}\n"
