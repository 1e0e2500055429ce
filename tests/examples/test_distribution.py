"""The example distribution, installed as a third party's would be."""

from __future__ import annotations

import json
import shutil

import pytest

PLANNED = """\
version: 1
name: planned
stages:
  data: {uses: data.photo_patches}
  net:  {uses: model.tiny_resnet}
"""
FRONT_DOOR = """
import json, sys
from importlib.metadata import entry_points
points = {point.name: point.value for point in entry_points(group="ptpipe")}
from ptpipe.plan.vocabulary import load_vocabulary
vocabulary = load_vocabulary()
own = {kind: owner.source for kind, owner in vocabulary.owners.items() if owner.name in points}
heavy = [name for name in ("torch", "numpy", "sklearn", "PIL") if name in sys.modules]
print(json.dumps({"points": points, "own": own, "broken": dict(vocabulary.broken), "heavy": heavy}))
"""


def test_its_kinds_are_found_through_its_entry_points_without_anything_heavy(stranger, site):
    finished = stranger("ptpipe-example", site).python("-c", FRONT_DOOR)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {
        "points": {
            "photo_patches": "ptpipe_example.photo_patches",
            "tiny_resnet": "ptpipe_example.tiny_resnet",
        },
        "own": {"data.photo_patches": "entry point", "model.tiny_resnet": "entry point"},
        "broken": {},
        "heavy": [],
    }


def test_nothing_of_it_is_there_where_it_is_not_installed(stranger):
    finished = stranger("ptpipe-example").python("-c", FRONT_DOOR)
    assert json.loads(finished.stdout)["points"] == {}


def test_it_passes_its_own_tests(stranger, site):
    stranger("ptpipe-example", site).passes_tests("ptpipe-example/tests")


def test_its_options_are_checked_and_explained_like_a_built_in_kinds(stranger, site):
    someone = stranger("ptpipe-example", site)
    manifest = someone.folder / "wrong.yaml"
    manifest.write_text(
        "version: 1\nname: wrong\nstages:\n"
        "  data: {uses: data.photo_patches, with: {sise: 16}}\n"
        "  net: {uses: model.tiny_resnett}\n"
    )
    finished = someone.python("-m", "ptpipe", "validate", manifest)
    assert finished.returncode == 2
    assert "unknown option 'sise' of data.photo_patches (did you mean 'size'?)" in finished.stderr
    assert "unknown stage kind 'model.tiny_resnett' (did you mean 'model.tiny_resnet'?)" in finished.stderr
    assert "edge of a patch in pixels" in someone.python("-m", "ptpipe", "stages", "data.photo_patches").stdout


def test_its_command_prints_what_a_run_took(stranger, site):
    someone = stranger("ptpipe-example", site)
    manifest = someone.folder / "short.yaml"
    manifest.write_text("version: 1\nname: short\nstages:\n  data: {uses: data.synthetic}\n")
    assert someone.python("-m", "ptpipe", "run", manifest).returncode == 0
    printed = someone.python("-m", "ptpipe", "stage-times", "--json")
    assert printed.returncode == 0, printed.stderr
    (stage_id, time_s), *others = json.loads(printed.stdout).items()
    assert (stage_id, others) == ("data", []) and 0 < time_s < 60
    assert someone.python("-m", "ptpipe", "stage-times").stdout.splitlines()[0].split() == ["stage", "seconds"]
    assert "there is no run '7'" in someone.python("-m", "ptpipe", "stage-times", "7").stderr
    help_ = someone.python("-m", "ptpipe", "--help").stdout
    assert "stage-times  Print how long each stage of a run took." in help_


@pytest.mark.parametrize("file", ["photo_patches.py", "tiny_resnet.py"])
def test_the_source_of_each_of_its_files_enters_the_keys(stranger, site, tmp_path, file):
    own_site = tmp_path / "site"
    shutil.copytree(site, own_site)
    someone = stranger("ptpipe-example", own_site)
    (someone.folder / "planned.yaml").write_text(PLANNED)

    def keys() -> dict[str, str]:
        planned = someone.ptpipe("plan", "planned.yaml", "--artifacts", "artifacts")
        return {stage["id"]: stage["key"] for stage in planned["stages"]}

    before = keys()
    source = own_site / "ptpipe_example" / file
    source.write_text(source.read_text() + "\nCHANGED = True\n")
    assert keys()["net"] != before["net"]


@pytest.mark.thorough
@pytest.mark.slow
def test_its_manifest_runs_to_a_quantized_onnx_file(stranger, site):
    someone = stranger("ptpipe-example", site)
    run = someone.ptpipe("run", "ptpipe-example/photos.yaml", "--artifacts", "artifacts")
    stages = {stage["stage_id"]: stage for stage in run["stages"]}
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    rows = {row["name"]: row for row in table["rows"]}
    assert rows["trained"]["accuracy"] > 0.85
    assert rows["onnx"]["accuracy"] > rows["trained"]["accuracy"] - 0.03
    assert rows["onnx"]["size_bytes"] < rows["trained"]["size_bytes"] * 0.4
    again = someone.ptpipe("run", "ptpipe-example/photos.yaml", "--artifacts", "artifacts")
    assert {stage["outcome"] for stage in again["stages"]} == {"cached"}
