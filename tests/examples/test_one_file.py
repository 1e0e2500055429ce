"""The plugin in one file, named by a manifest."""

from __future__ import annotations

import csv

import pytest

MANIFEST = """\
version: 1
name: planned
plugins: [./prune.py]
stages:
  data:   {uses: data.digits}
  net:    {uses: model.small_cnn}
  pruned: {uses: my.prune, with: {amount: 0.5}}
"""


@pytest.mark.thorough
def test_it_passes_its_own_tests(stranger):
    stranger("one_file").passes_tests("one_file")


def test_its_kind_is_there_for_the_manifest_that_names_it(stranger):
    someone = stranger("one_file")
    (someone.folder / "one_file" / "planned.yaml").write_text(MANIFEST)
    planned = someone.ptpipe("plan", "one_file/planned.yaml", "--artifacts", "artifacts")
    assert [stage["kind"] for stage in planned["stages"]] == ["data.digits", "model.small_cnn", "my.prune"]


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


@pytest.mark.thorough
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


@pytest.mark.slow
def test_several_workers_a_launcher_a_reporter_and_a_section_work_together(stranger):
    someone = stranger("one_file")
    run = someone.ptpipe("run", "one_file/together.yaml", "--artifacts", "artifacts")
    stages = {stage["stage_id"]: stage for stage in run["stages"]}
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    (verdict,) = (output["summary"] for output in stages["balance"]["outputs"].values())
    assert verdict["decision"] == "passed"
    assert verdict["fraction"] == pytest.approx(0.0937, abs=1e-4), "the count of one worker alone would be half"
    folder = someone.folder / "artifacts" / "runs" / run["run_id"]
    assert "Samples of each class" in (folder / "report.html").read_text(encoding="utf-8")
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = {(row["stage"], row["metric"]): float(row["value"]) for row in csv.DictReader(file)}
    assert rows["trained", "val_accuracy"] == stages["trained"]["metrics"]["val_accuracy"]
    stricter = ["-s", "balance.workers=1", "-s", "balance.min_fraction=0.5"]
    refused = someone.ptpipe("run", "one_file/together.yaml", "--artifacts", "artifacts", *stricter, code=3)
    assert {stage["outcome"] for stage in refused["stages"]} == {"cached", "refused"}


@pytest.mark.slow
def test_its_own_artifact_is_delivered(stranger):
    someone = stranger("one_file")
    run = someone.ptpipe("run", "one_file/confusion.yaml", "--artifacts", "artifacts", "-s", "trained.epochs=1")
    someone.python("-m", "ptpipe", "get", "last", "confusion", "--artifacts", "artifacts")
    with (someone.folder / "confusion.csv").open(encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    assert names == ["label", *map(str, range(10))] and [row[0] for row in rows] == names[1:]
    stages = {stage["stage_id"]: stage for stage in run["stages"]}
    assert stages["predicted"]["deliverables"] == ["predicted/predictions.csv"]
    num_right = sum(int(row[1:][number]) for number, row in enumerate(rows))
    num_all = sum(int(count) for row in rows for count in row[1:])
    assert num_right / num_all == pytest.approx(stages["predicted"]["metrics"]["accuracy"])


@pytest.mark.slow
def test_a_task_and_a_column_of_ones_own_go_the_whole_way(stranger):
    someone = stranger("one_file")
    quick = ["-s", "compare.budget_s=1", "-s", "compare.threads=[one]"]
    run = someone.ptpipe("run", "one_file/turned.yaml", "--artifacts", "artifacts", *quick)
    stages = {stage["stage_id"]: stage for stage in run["stages"]}
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    rows = {row["name"]: row for row in table["rows"]}
    assert 0 < rows["trained"]["mean_error_degrees"] < 20, "at random: 90"
    assert all(abs(rows[name]["worse_by"]) < 1 for name in ("int8", "onnx"))
    assert stages["trained"]["metrics"]["best_epoch"] <= 12


@pytest.mark.thorough
@pytest.mark.slow
def test_the_launcher_reports_a_stage_that_fails_in_its_process(stranger):
    someone = stranger("one_file")
    manifest = someone.folder / "one_file" / "together.yaml"
    manifest.write_text(manifest.read_text().replace("lr: 0.05", "lr: 1.0e+30"))
    run = someone.ptpipe("run", "one_file/together.yaml", "--artifacts", "artifacts", code=1)
    failed = next(stage for stage in run["stages"] if stage["stage_id"] == "trained")
    assert (failed["outcome"], failed["message"]) == (
        "failed", "trained failed in its own process, with exit code 1"
    )  # fmt: skip
