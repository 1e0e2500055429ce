"""The files to ship: in the run's folder by stage name, for as long as the run is kept."""

from __future__ import annotations

import json

import pytest

from ptpipe import ExitCode
from ptpipe.execution.gc import collect_garbage
from ptpipe.store.store import Store

DELIVERS = """

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        {body}

    def summary(self) -> dict[str, object]:
        return {{"value": self.value}}
"""


def deliver(project, body='return ("number.json",)'):
    """Let the toy's numbers be deliverables."""
    source = project.plugin.read_text()
    summary = """
    def summary(self) -> dict[str, object]:
        return {"value": self.value}
"""
    assert source.count(summary) == 1
    project.plugin.write_text(source.replace(summary, DELIVERS.format(body=body)))


def placed(result):
    folders = [path for path in result.folder.iterdir() if path.is_dir()]
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sorted(p.relative_to(result.folder).as_posix() for p in files if p.suffixes[-2:] != [".intoto", ".json"])


def record_of(result):
    return json.loads((result.folder / "record.json").read_text())


def test_a_run_holds_its_deliverables_by_stage(project):
    deliver(project)
    project.write("one: {uses: toy.make, with: {value: 3}}\ntext: {uses: toy.total}\nbad: {uses: toy.fail}")
    for outcome in ("done", "cached"):
        result = project.run()
        assert project.outcomes(result) == {"one": outcome, "text": outcome, "bad": "failed"}
        assert placed(result) == ["one/number.json"]
        (path,) = result.stages["one"].deliverables
        assert path == result.folder / "one" / "number.json"
        assert path.read_text() == "3.0"
        assert result.stages["text"].deliverables == ()
        assert [stage["deliverables"] for stage in record_of(result)["stages"]] == [["one/number.json"], [], []]


def test_links_take_no_space(project):
    deliver(project)
    project.write("one: {uses: toy.make}")
    result = project.run()
    (path,) = result.stages["one"].deliverables
    assert path.samefile(result.store.files(result.stages["one"].outputs["output"]["digest"]) / "number.json")
    assert not path.is_symlink()


@pytest.mark.parametrize("number", [1, 18])  # not permitted; another device
def test_without_hard_links_they_are_copied(project, monkeypatch, number):
    def link(source, target):
        raise OSError(number, "no links here")

    monkeypatch.setattr("ptpipe.execution.deliverables.os.link", link)
    deliver(project)
    project.write("one: {uses: toy.make}")
    result = project.run()
    (path,) = result.stages["one"].deliverables
    assert (path.read_text(), path.stat().st_nlink, path.is_symlink()) == ("1.0", 1, False)
    assert placed(result) == ["one/number.json"]


def test_outputs_with_files_of_one_name_have_subfolders(project):
    deliver(project)
    project.write("one: {uses: toy.make}\ntwo: {uses: toy.split}")
    assert placed(project.run()) == ["one/number.json", "two/high/number.json", "two/low/number.json"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            'return ("../../record.json",)',
            "ValueError: Number.deliverables names '../../record.json', which it did not",
        ),
        ('return ("other.json",)', "ValueError: Number.deliverables names 'other.json', which it did not save"),
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_delivered_is_a_notice(project, body, reason):
    deliver(project, body)
    project.write("one: {uses: toy.make}")
    for _ in range(2):
        result = project.run()
        assert result.exit_code == ExitCode.DONE
        (notice,) = result.stages["one"].notices
        assert notice.startswith(f"the deliverables could not be placed in {result.folder / 'one'}: {reason}")
        assert placed(result) == []


def test_a_full_disk_is_a_notice(project, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ptpipe.execution.deliverables.os.link", full)
    monkeypatch.setattr("ptpipe.execution.deliverables.shutil.copyfile", full)
    deliver(project)
    project.write("one: {uses: toy.make}")
    result = project.run()
    assert result.exit_code == ExitCode.DONE
    assert "the disk is full" in result.stages["one"].notices[0]
    assert placed(result) == []


def test_what_is_rerun_is_delivered_again(project):
    deliver(project)
    project.write("one: {uses: toy.make, with: {value: 3}}\nsum: {uses: toy.add, needs: {a: one, b: one}}")
    first = project.run()
    (path,) = first.stages["one"].deliverables
    path.chmod(0o644)
    path.write_text("7.0")  # through the link: the stored object too
    second = project.run(options=fresh("sum"))
    assert second.artifact("sum").value == 6
    assert (second.folder / "one" / "number.json").read_text() == "3.0"


@pytest.mark.parametrize("way", ["through the link", "in the store", "deleted"])
def test_an_altered_deliverable_of_a_cached_stage_is_rebuilt(project, way):
    deliver(project)
    project.write("one: {uses: toy.make, with: {value: 3}}\nsum: {uses: toy.add, needs: {a: one, b: one}}")
    first = project.run()
    (path,) = first.stages["one"].deliverables
    digest = first.stages["one"].outputs["output"]["digest"]
    if way != "through the link":
        path = first.store.files(digest) / "number.json"
    path.chmod(0o644)
    path.write_text("7.0")
    if way == "deleted":
        path.unlink()
    second = project.run()
    assert project.outcomes(second) == {"one": "done", "sum": "cached"}
    assert second.stages["one"].notices[0].startswith(f"object {digest[:12]} was altered: number.json; moved to ")
    (path,) = second.stages["one"].deliverables
    assert path.read_text() == "3.0"
    assert project.outcomes(project.run()) == {"one": "cached", "sum": "cached"}


def fresh(*stages):
    from ptpipe.execution.engine import RunOptions

    return RunOptions(fresh=stages)


# Collecting garbage


def test_gc_keeps_them_with_the_run(project):
    deliver(project)
    project.write("one: {uses: toy.make}")
    old, new = project.run({"one.value": 2}), project.run()
    collect_garbage(Store(project.artifacts), 1)
    assert not old.folder.exists()
    assert placed(new) == ["one/number.json"]
    collect_garbage(Store(project.artifacts), 0)
    assert not new.folder.exists()


def test_gc_counts_linked_bytes_once_and_only_where_they_become_free(project):
    deliver(project, 'return ("number.json", "large")')
    project.edit(
        '(folder / "number.json").write_text',
        '(folder / "large").write_bytes(bytes(10**6)); (folder / "number.json").write_text',
    )
    project.write("one: {uses: toy.make}")
    project.run()
    project.run()
    store = Store(project.artifacts)
    assert collect_garbage(store, 1, dry_run=True).size_bytes < 10**5, "the object stays"
    assert 10**6 < collect_garbage(store, 0, dry_run=True).size_bytes < 1.1 * 10**6
