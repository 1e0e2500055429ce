"""From training to the gates of an int8 model in OpenVINO's format, through the command line."""

from __future__ import annotations

from typing import Any

import pytest

from ptpipe import ExitCode

from ..conftest import CommandLine
from .conftest import ForkedCommandLine

pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'ptpipe[openvino]'")
pytestmark = pytest.mark.slow

MANIFEST = """\
version: 1
name: vino
seed: 7
stages:
  data:       {uses: data.synthetic}
  net:        {uses: model.small_cnn}
  pretrain:   {uses: train.supervised, with: {epochs: 1, lr: 0.05}}
  observed:   {uses: quant.prepare, needs: {model: pretrain}, with: {backend: fbgemm}}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  static:     {uses: quant.convert, needs: {model: calibrated}}
  onnx:       {uses: export.onnx, needs: {model: static}}
  vino:       {uses: export.openvino, needs: {model: onnx}}
  examined:   {uses: eval.predict, needs: {model: vino}}
  compare:
    uses: eval.compare
    needs: {models: [pretrain, static, onnx, vino]}
    with: {baseline: pretrain, batch_sizes: [1], threads: [one], budget_s: 1}
  accuracy:   {uses: gate.accuracy, needs: {comparison: compare}, with: {candidate: vino, max_drop: 0.05}}
  size:       {uses: gate.size, needs: {comparison: compare}, with: {candidate: vino, max_ratio: 0.6}}
"""


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> ForkedCommandLine:
    folder = tmp_path_factory.mktemp("vino")
    (folder / "vino.yaml").write_text(MANIFEST, encoding="utf-8")
    return ForkedCommandLine(folder)


@pytest.fixture(scope="module")
def stages(cli: ForkedCommandLine) -> dict[str, Any]:
    """Of a first run, by id."""
    ended = cli("run", "vino.yaml", "--artifacts", "artifacts", "--json")
    assert ended.code == ExitCode.DONE, ended.err
    return {stage["stage_id"]: stage for stage in ended.json["stages"]}


def test_it_computes_in_integers_what_the_onnx_file_does(stages) -> None:
    assert {stage["outcome"] for stage in stages.values()} == {"done"}
    metrics = stages["vino"]["metrics"]
    assert metrics["top1_agreement"] >= 0.99 and metrics["num_int8_operators"] >= 4


def test_the_comparison_and_the_evaluation_measure_it(stages) -> None:
    (table,) = (output["summary"] for output in stages["compare"]["outputs"].values())
    rows = {row["name"]: row for row in table["rows"]}
    assert {name: row["format"] for name, row in rows.items()}["vino"] == "openvino int8"
    assert rows["vino"]["accuracy"] > 0.9
    assert rows["vino"]["accuracy"] == pytest.approx(rows["onnx"]["accuracy"], abs=0.01)
    assert stages["examined"]["metrics"]["accuracy"] == rows["vino"]["accuracy"]
    assert rows["vino"]["size_bytes"] == stages["vino"]["metrics"]["size_bytes"]


def test_a_gate_judges_it_from_the_stored_comparison(cli: ForkedCommandLine, stages) -> None:
    """The same comparison, and a limit that the model exceeds."""
    limit = ("-s", "size.max_ratio=0.01")
    ended = CommandLine(cli.folder)("run", "vino.yaml", "--artifacts", "artifacts", "--json", *limit)  # no fork
    assert ended.code == ExitCode.REFUSED, ended.err
    outcomes = {stage["stage_id"]: stage["outcome"] for stage in ended.json["stages"]}
    assert outcomes.pop("size") == "refused" and set(outcomes.values()) == {"cached"}


def test_the_delivered_files_are_a_model_of_openvinos(cli: ForkedCommandLine, stages) -> None:
    import openvino

    assert stages["vino"]["deliverables"] == ["vino/model.xml", "vino/model.bin"]
    assert cli("get", "last", "vino", "out", "--artifacts", "artifacts").code == ExitCode.DONE
    model = openvino.Core().compile_model(str(cli.folder / "out" / "model.xml"), "CPU")
    sizes = [value.get_partial_shape().to_string() for value in (*model.inputs, *model.outputs)]
    assert [value.get_any_name() for value in (*model.inputs, *model.outputs)] == ["images", "logits"]
    assert all(size.startswith("[?,") for size in sizes), "batches of any size"
