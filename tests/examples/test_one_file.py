"""The plugin in one file, named by a manifest."""

from __future__ import annotations

import pytest

MANIFEST = """\
version: 1
name: planned
plugins: [./prune.py]
stages:
  data:   {uses: data.digits}
  net:    {uses: model.small_cnn}
  pruned: {uses: prune.magnitude, with: {amount: 0.5}}
"""


def test_it_passes_its_own_tests(stranger):
    stranger("one_file").passes_tests("one_file")


def test_its_kind_is_there_for_the_manifest_that_names_it(stranger):
    someone = stranger("one_file")
    (someone.folder / "one_file" / "planned.yaml").write_text(MANIFEST)
    planned = someone.ptpipe("plan", "one_file/planned.yaml", "--artifacts", "artifacts")
    assert [stage["kind"] for stage in planned["stages"]] == ["data.digits", "model.small_cnn", "prune.magnitude"]


def test_its_source_enters_the_key_of_its_stage_alone(stranger):
    someone = stranger("one_file")
    (someone.folder / "one_file" / "planned.yaml").write_text(MANIFEST)
    plugin = someone.folder / "one_file" / "prune.py"

    def keys() -> dict[str, str]:
        planned = someone.ptpipe("plan", "one_file/planned.yaml", "--artifacts", "artifacts")
        return {stage["id"]: stage["key"] for stage in planned["stages"]}

    before = keys()
    plugin.write_text("# a comment changes nothing\n" + plugin.read_text())
    assert keys() == before
    plugin.write_text(plugin.read_text().replace("largest=False", "largest=True"))
    after = keys()
    assert {name for name in after if after[name] != before[name]} == {"pruned"}


MORE = """\
version: 1
name: more
plugins: [./label_counts.py, ./timings.py, ./own_process.py]
stages:
  data:   {uses: data.digits}
  counts: {uses: data.label_counts, with: {workers: WORKERS, min_count: 100}}
"""


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_reporter_a_launcher_and_a_stage_of_several_workers(stranger, workers):
    someone = stranger("one_file")
    (someone.folder / "one_file" / "more.yaml").write_text(MORE.replace("WORKERS", workers))
    run = someone.ptpipe("run", "one_file/more.yaml", "--artifacts", "artifacts")
    stages = {stage["stage_id"]: stage for stage in run["stages"]}
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    counts = stages["counts"]["metrics"]
    assert 100 < counts["min_count"] <= counts["max_count"] < 200, "reported by the process of rank 0"
    (folder,) = (someone.folder / "artifacts" / "runs").iterdir()
    lines = (folder / "timings.csv").read_text().splitlines()
    assert [line.rpartition(",")[0] for line in lines] == ["stage,outcome", "data,done", "counts,done"]
    own = [line.split()[1] for line in (folder / "log.txt").read_text().splitlines() if "runs in process" in line]
    assert own == (["data", "counts"] if workers == "1" else ["data"])
    refused = someone.python(
        "-m", "ptpipe", "run", "one_file/more.yaml", "--artifacts", "artifacts", "-s", "counts.min_count=200"
    )
    assert refused.returncode == 3, refused.stderr


@pytest.mark.slow
def test_its_manifest_runs(stranger):
    someone = stranger("one_file")
    run = someone.ptpipe("run", "one_file/prune.yaml", "--artifacts", "artifacts")
    stages = {stage["stage_id"]: stage for stage in run["stages"]}
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    metrics = stages["pruned"]["metrics"]
    assert metrics["num_zeros"] / metrics["num_weights"] == pytest.approx(0.4, abs=0.001)
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    accuracy = {row["name"]: row["accuracy"] for row in table["rows"]}
    assert accuracy["trained"] > 0.95
    assert accuracy["pruned"] > accuracy["trained"] - 0.05
    again = someone.ptpipe("run", "one_file/prune.yaml", "--artifacts", "artifacts")
    assert {stage["outcome"] for stage in again["stages"]} == {"cached"}
