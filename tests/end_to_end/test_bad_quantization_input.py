"""Inputs that can't be quantized, through the command line: stage, cause and remedy are named, and nothing is left."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ..conftest import environment
from ..forks import Fork, run_ptpipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]

NETWORKS = """\
import torch
from torch import nn


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        if x.sum() > 0:
            x = -x
        return self.linear(x)


class Colour(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 8)

    def forward(self, x):
        return self.conv(x).flatten(1)


class Bessel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        return torch.special.bessel_j0(self.linear(x.flatten(1)))
"""
DIGITS = "data: {uses: data.digits}"
ONE_SAMPLE = "data: {uses: data.digits, with: {calibration_size: 1}}"
MLP = "net: {uses: model.mlp}"
PREPARED = "prepared: {uses: quant.prepare, needs: {model: net}, with: {backend: fbgemm}}"
CALIBRATED = "calibrated: {uses: quant.calibrate, needs: {model: prepared}}"
EXPORTED = "file: {uses: export.onnx, needs: {model: net}}"
INT8 = "int8: {uses: quant.onnx, needs: {model: net}}"


def arrays(name: str, images: str) -> str:
    options = f"path: {name}.npz, inputs: [pixels], images: {images}, target: labels, task: classification"
    return f"data: {{uses: data.arrays, with: {{{options}}}}}"


def own(network: str) -> str:
    return f"net: {{uses: model.python, with: {{file: networks.py, function: {network}}}}}"


def file(name: str) -> str:
    return f"net: {{uses: model.onnx, with: {{file: {name}.onnx}}}}"


class Case(NamedTuple):
    """A manifest that must fail."""

    stages: Sequence[str]
    fails: str
    """The stage's name."""
    message: str
    """With the cause, then the remedy."""
    code: int = 1
    missing: str = ""
    """A package that is not installed."""


ON_VALUES = r"it depends on the values of a tensor.* torch\.where"
CASES = {
    "a branch on values": Case(
        [DIGITS, own("Branch"), PREPARED], "prepared", rf"networks\.py:12: `if x\.sum\(\) > 0:` .*{ON_VALUES}"
    ),
    "a branch on values, by torch.export": Case(
        [DIGITS, own("Branch"), PREPARED.replace("backend: fbgemm", "route: export")],
        "prepared",
        rf"networks\.py:12: `if x\.sum\(\) > 0:` .*{ON_VALUES}",
    ),
    "a branch on values, to ONNX": Case(
        [DIGITS, own("Branch"), EXPORTED],
        "file",
        r"depends on values of tensors \(\S*networks\.py:12: .*\)\. .*torch\.where",
    ),
    "a network of another shape": Case(
        [DIGITS, own("Colour"), PREPARED],
        "net",
        r"images \(2, 1, 8, 8\) float32.* to have 3 channels, but got 1 .*\): let it take such inputs, in ",
    ),
    "a file of another shape": Case(
        [DIGITS, file("large"), INT8], "net", r"large\.onnx: images has the shape \(\?, 1, 28, 28\).*: choose a file"
    ),
    "NaN": Case(
        [arrays("nan", "[]"), MLP, PREPARED, CALIBRATED], "data", r"row 5 of pixels is not finite.*: mend it, or leave"
    ),
    "a constant": Case(
        [arrays("constant", "[pixels]"), MLP, PREPARED, CALIBRATED],
        "calibrated",
        r"all 46 samples of calibration are the same \(pixels is 9 throughout\): calibrate on real ones",
    ),
    "one sample": Case(
        [ONE_SAMPLE, MLP, PREPARED, CALIBRATED], "calibrated", r"calibration has 1 sample.* a larger calibration_size"
    ),
    "one sample for a file": Case(
        [ONE_SAMPLE, file("linear"), INT8], "int8", r"calibration has 1 sample.* a larger calibration_size"
    ),
    "an opset too old to export": Case(
        [DIGITS, MLP, EXPORTED[:-1] + ", with: {opset: 11}}"], "file", r"opset: should be .* 18, not 11", 2
    ),
    "an opset too old to quantize": Case(
        [DIGITS, file("old"), INT8], "int8", r"has opset 7, and can't be converted to 13: export it with a later one"
    ),
    "no such backend": Case(
        [DIGITS, MLP, PREPARED.replace("fbgemm", "tensorrt")],
        "prepared",
        r"backend: should be 'auto', 'fbgemm', .* not .tensorrt",
        2,
    ),
    "no such extra": Case(
        [DIGITS, MLP, EXPORTED, "vino: {uses: export.openvino, needs: {model: file}}"],
        "vino",
        r"OpenVINO is not installed: pip install 'ptpipe\[openvino\]'",
        2,
        "openvino",
    ),
    "tensors outside of the file's folder": Case(
        [DIGITS, file("folder/outside"), INT8], "net", r"outside\.onnx .* leads out of the folder \(put all", 2
    ),
    "an operator without an ONNX form": Case(
        [DIGITS, own("Bessel"), EXPORTED], "file", r"bessel_j0 has no ONNX form .*networks\.py:\d+: .*\. Write it"
    ),
    "nothing to quantize": Case(
        [DIGITS, file("means"), INT8[:-1] + ", with: {mode: dynamic}}"],
        "int8",
        "no node that mode dynamic quantizes: leave the stage out",
    ),
}


def write_file(path: Path, nodes: Sequence[onnx.NodeProto], size: int = 8, opset: int = 17, **arrays: Any) -> None:
    """Write a network of images of this size; the arrays are its constants."""
    ends = [("images", ["N", 1, size, size]), ("logits", ["N", 10])]
    first, last = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends)
    weights = [numpy_helper.from_array(np.asarray(values), name) for name, values in arrays.items()]
    graph = helper.make_graph(nodes, "network", [first], [last], weights)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)


def write_files(folder: Path) -> None:
    """Write what the manifests name."""
    random, node = np.random.default_rng(0), helper.make_node
    weight_DK = random.normal(size=(64, 10)).astype(np.float32)
    linear = [node("Flatten", ["x"], ["rows"]), node("MatMul", ["rows", "weight"], ["logits"])]
    start = node("Identity", ["images"], ["x"])
    write_file(folder / "linear.onnx", [start, *linear], weight=weight_DK)
    write_file(folder / "large.onnx", [start, *linear], size=28, weight=np.zeros((784, 10), np.float32))
    # A norm of each pixel, which later opsets don't have.
    names = ("scale", "bias", "mean", "variance")
    norm = node("BatchNormalization", ["images", *names], ["x"], spatial=0)
    ones = dict.fromkeys(names, np.ones((1, 8, 8), np.float32))
    write_file(folder / "old.onnx", [norm, *linear], opset=7, weight=weight_DK, **ones)
    means = [node("ReduceMean", ["images"], ["x"], axes=[1, 3], keepdims=0), node("Concat", ["x", "x"], ["y"], axis=1)]
    taken = node("Gather", ["y", "positions"], ["logits"], axis=1)
    write_file(folder / "means.onnx", [*means, taken], positions=np.arange(10))
    (folder / "folder").mkdir()
    outside = onnx.load(folder / "linear.onnx")
    (tensor,) = outside.graph.initializer
    (folder / "weight.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../weight.bin")
    (folder / "folder" / "outside.onnx").write_bytes(outside.SerializeToString())
    pixels_NHWC, labels_N = np.full((60, 8, 8, 1), 9, np.uint8), np.arange(60) % 10
    np.savez(folder / "constant.npz", pixels=pixels_NHWC, labels=labels_N)
    pixels_ND = random.normal(size=(60, 4)).astype(np.float32)
    pixels_ND[5, 1] = np.nan
    np.savez(folder / "nan.npz", pixels=pixels_ND, labels=labels_N)
    (folder / "networks.py").write_text(NETWORKS, encoding="utf-8")


def run_without(package: str, *arguments: str) -> None:
    """Be the command line on a machine without a package."""
    tempfile.tempdir = None  # what the process that this one was forked from found
    if package:
        sys.modules[package] = None  # type: ignore[assignment]
    run_ptpipe(*arguments)


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_it_is_named_and_nothing_is_left(tmp_path: Path, case: Case) -> None:
    work, artifacts, temporary = (tmp_path / name for name in ("work", "artifacts", "temporary"))
    work.mkdir()
    temporary.mkdir()
    write_files(work)
    lines = ["version: 1", "name: bad", "stages:", *(f"  {stage}" for stage in case.stages)]
    (work / "bad.yaml").write_text("\n".join(lines), encoding="utf-8")
    before = files_in(work)
    arguments = (case.missing, "run", "bad.yaml", "--artifacts", str(artifacts))
    with Fork(run_without, *arguments, environment=environment(TMPDIR=str(temporary)), folder=work) as process:
        out, err = process.communicate(120)
    assert process.returncode == case.code and "Traceback" not in out + err, err
    message = re.compile(rf"\b{case.fails}: .*{case.message}")
    assert message.search(err), err
    assert files_in(work) == before
    # Importing torch's compiler makes it.
    assert [name for name in files_in(temporary) if not name.startswith("torchinductor_")] == []
    if case.code == 2:
        assert not artifacts.exists(), "nothing was begun"
    else:
        check_nothing_is_stored(artifacts, case.fails)


def check_nothing_is_stored(artifacts: Path, failed: str) -> None:
    """Check that the store holds what the stages before the failed one made, and no more."""
    (run,) = (artifacts / "runs").iterdir()
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    stages = {stage["stage_id"]: stage for stage in record["stages"]}
    done = [stage for stage in stages.values() if stage["outcome"] == "done"]
    assert stages[failed]["outcome"] == "failed" and len(done) == list(stages).index(failed)
    digests = {output["digest"] for stage in done for output in stage["outputs"].values()}
    assert {path.name for path in artifacts.glob("objects/*/*")} == digests
    assert {path.stem for path in artifacts.glob("index/*")} == {stage["key"] for stage in done}
    assert {path.name for path in run.iterdir() if path.is_dir()} <= {stage["stage_id"] for stage in done}
    assert files_in(artifacts / "scratch") == set()
    assert [name for name in files_in(artifacts) if Path(name).name.startswith(".")] == []
