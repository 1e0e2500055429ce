from __future__ import annotations

import json
import re

import pytest
import torch
from onnx import TensorProto

from ptpipe import IntegrityError, ManifestError, Outcome, UsageError, run

from .conftest import write_linear

QUICK = ("--no-latency", "-q", "--json")


def names(ended):
    return [row["name"] for row in ended.json["comparison"]["rows"]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_onnx_files_that_ptpipe_never_made(place, call, tmp_path):
    """Nothing but the files and a data stage: other names, a symbolic and a fixed batch axis, two exporters."""
    by_hand = write_linear(tmp_path / "By hand 1.onnx", batch=7)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    exported = tmp_path / "2.onnx"
    batch = {0: "N"}
    torch.onnx.export(
        network, (torch.zeros(1, 1, 8, 8),), exported, dynamo=False, opset_version=17,
        input_names=["pixels"], output_names=["out"], dynamic_axes={"pixels": batch, "out": batch},
    )  # fmt: skip
    ended = call(by_hand, exported, "--data", f"{place.manifest}:digits", *QUICK)
    assert (ended.code, names(ended)) == (0, ["by-hand-1", "model-2"])
    first, second = ended.json["comparison"]["rows"]
    assert (first["format"], first["drop"], ended.json["comparison"]["baseline"]) == ("onnx float32", 0, "by-hand-1")
    assert second["drop_low"] < second["drop"] < second["drop_high"] and second["num_flips"] > 0

    folder = place.artifacts / "runs" / ended.json["run_id"]
    record = json.loads((folder / "record.json").read_text())
    assert record["stages"][0]["outcome"] == Outcome.CACHED  # the data set of the manifest's own runs
    assert record["stages"][1]["notices"][0].startswith("By hand 1.onnx takes batches of 7 alone")
    assert "by-hand-1 (baseline)" in (folder / "report.md").read_text()
    again = run(folder / "manifest.yaml", artifacts=place.artifacts)
    assert {event.outcome for event in again.stages.values()} == {Outcome.CACHED}
    assert call(by_hand, exported, "--data", place.manifest, "--no-latency", "-q", "--md").out.startswith("# compare")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"batch": "N", "classes": 9}, r"scores has the shape \(\?, 9\); the data set needs logits \(batch, 10\)"),
        ({"batch": "N", "dtype": TensorProto.INT64}, r"x is int64, the data set's images .* float32 is not"),
    ],
)
def test_a_file_that_does_not_fit(place, call, tmp_path, file, message):
    path = write_linear(tmp_path / "a.onnx", **file)
    assert call(path, "--data", place.manifest, *QUICK).code == 1
    newest = max(place.artifacts.glob("runs/*-compare-*"), key=lambda folder: folder.name.rpartition("-")[2])
    record = json.loads((newest / "record.json").read_text())
    (failed,) = [stage for stage in record["stages"] if stage["outcome"] == "failed"]
    assert re.search(message, failed["message"])


def test_runs_stages_digests_and_folders(place, call, tmp_path):
    """Models of two runs with functions of the user's own, a stored artifact, and what `ptpipe get` writes."""
    run_id, own = place.first.run_id, place.second.stages["own"].outputs["output"]
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    for file in place.first.stages["dynamic"].deliverables:
        (shipped / file.name).write_bytes(file.read_bytes())
    assert not (shipped / "tensors.safetensors").exists()
    key = place.second.stages["net"].key[:12]
    arguments = (run_id, key, own["digest"][:12], shipped)
    ended = call(*arguments, "--baseline", shipped, "--data", place.manifest, "-s", "compare.split=val", *QUICK)
    number = run_id.rpartition("-")[2]
    other = place.second.run_id.rpartition("-")[2]
    # The models that the run compared, its baseline first; where two have a name, the runs' numbers tell them apart.
    assert names(ended) == [f"net-{number}", "dynamic", f"own-{number}", f"net-{other}", f"own-{other}", "shipped"]
    rows = {row["name"]: row for row in ended.json["comparison"]["rows"]}
    assert (ended.json["comparison"]["baseline"], ended.json["comparison"]["split"]) == ("shipped", "val")
    assert rows["dynamic"]["num_flips"] == 0 == rows["dynamic"]["drop"]
    assert rows["dynamic"]["size_bytes"] == rows["shipped"]["size_bytes"]
    assert rows[f"own-{number}"]["metrics"] == rows[f"own-{other}"]["metrics"]


def test_what_is_not_there(place, call, tmp_path):
    data = ("--data", place.manifest)
    first = place.first.run_id
    cases = {
        (f"{first}:dinamic", *data): r"has no model 'dinamic' \(did you mean 'dynamic'\?\)",
        (f"{first}:digits", *data): "has no model 'digits'",
        (
            first[:-1] + "9",
            *data,
        ): r"is no file, no folder and no artifact's digest, and there is no run .*did you mean",
        (tmp_path / "gone.onnx", *data): "there is no file .*gone.onnx",
        (tmp_path, *data): "is no model's folder: it has no .onnx files, and no recipe.json",
        (place.manifest, *data): "digits.yaml is no .onnx file, and no folder of a model",
        (first, "--data", f"{place.manifest}:digit"): r"has no data stage 'digit' \(did you mean 'digits'\?\)",
        (first, *data, "--baseline", "ent"): r"--baseline ent is none of the models \(did you mean 'net'\?\)",
        (first, *data, "--batch-sizes", "1,x"): "--batch-sizes 1,x: expected numbers separated by commas",
        (first, *data, "--latency-only", "--no-latency"): "leave nothing to measure",
        (first, *data, "--no-latency", "--budget", 3): "leave out --batch-sizes",
        (first, *data, "--sort", "run"): "--sort is for recorded results",
        (first, "--budget", "3"): "--budget is for measuring: name the data to measure on",
        (first, "-s", "a.b=3"): "-s is for measuring",
        (f"{first}:net",): "is no run: to measure models, name the data",
        (
            place.first.stages["digits"].outputs["output"]["digest"][:9],
            *data,
        ): "is a Data, of digits of run .*: no model",
    }
    for arguments, message in cases.items():
        with pytest.raises(UsageError, match=message):
            call(*arguments)
    with pytest.raises(ManifestError, match="there is no stage 'nte'"):
        call(first, *data, "-s", "nte.x=3")
    with pytest.raises(ManifestError, match="threads"):
        call(first, *data, "--threads", "three")


def test_a_damaged_artifact_is_found_before_it_is_measured(place, call):
    digest = place.second.stages["net"].outputs["output"]["digest"]
    file = place.second.store.files(digest) / "tensors.safetensors"
    content = file.read_bytes()
    try:
        file.chmod(0o644)
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(IntegrityError, match="was altered"):
            call(f"{place.second.run_id}:net", "--data", place.manifest, *QUICK)
    finally:
        file.write_bytes(content)


def test_recorded_results_side_by_side(place, call):
    rows = call(place.first.run_id, place.second.run_id, "--json", "--sort", "model").json
    assert [row["model"] for row in rows] == ["dynamic", "dynamic", "net", "net", "own", "own"]
    assert [row["net.hidden"] for row in rows[:2]] in ([[16], [24]], [[24], [16]])
    assert [row.get("gate verdict") for row in rows] == ["passed", "passed", None, None, None, None]
    shown = call(place.first.run_id, place.second.run_id).out
    head, *_, same = shown.splitlines()
    assert head.split("  ")[0] == "run" and "net.hidden" in head and "accuracy" in head
    assert "manifest digits" in same and "data digits test" in same
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        call(place.first.run_id, "--sort", "acuracy")
    assert call(place.first.run_id, "--html").out.startswith("<!DOCTYPE html>")
