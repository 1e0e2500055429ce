"""A real model from run to shipped file: verified anywhere, reproduced elsewhere."""

from __future__ import annotations

import shutil

import pytest

from ptpipe import ExitCode

pytestmark = [pytest.mark.plugins, pytest.mark.slow]

MANIFEST = """
version: 1
name: shipped
seed: 3
plugins: [./halve.py]
stages:
  data:  {uses: data.digits, with: {batch_size: 32, train_size: 320}}
  net:   {uses: model.small_cnn, with: {width: 8}}
  train: {uses: train.supervised, with: {epochs: 1, lr: 0.05, num_threads: 1}}
  half:  {uses: prune.halve, needs: {model: train}}
  onnx:  {uses: export.onnx, needs: {model: half}}
"""
PLUGIN = """
from ptpipe import Context, StageConfig, stage
from ptpipe_torch import Model


@stage("prune.halve")
def halve(config: StageConfig, ctx: Context, model: Model) -> Model:
    \"\"\"Halve every weight.\"\"\"
    network = model.build()
    for parameter in network.parameters():
        parameter.data *= 0.5
    return model.with_state_dict_of(network)
"""


def test_from_run_to_reproduction(run_cli, forked_cli, tmp_path):
    """Of the run and its reproduction, each has an interpreter of its own: forks would share their strings' hashes."""
    (tmp_path / "m.yaml").write_text(MANIFEST)
    (tmp_path / "halve.py").write_text(PLUGIN)
    ran = run_cli("run", "m.yaml", timeout_s=240)
    assert ran.code == 0, ran.err
    assert forked_cli("get", "last", "onnx", "ship").out.splitlines()[1] == "wrote ship/model.onnx.intoto.json"
    file = tmp_path / "ship" / "model.onnx"
    assert forked_cli("verify").code == 0
    assert forked_cli("verify", "ship/model.onnx", "--artifacts", "none").code == 0

    content = file.read_bytes()
    file.write_bytes(content[:999] + bytes([content[999] ^ 1]) + content[1000:])
    altered = forked_cli("verify", "ship/model.onnx")
    assert (altered.code, "its bytes are not those of its statement" in altered.out) == (ExitCode.INTEGRITY, True)
    file.write_bytes(content)

    elsewhere = tmp_path / "elsewhere"
    shutil.move(tmp_path / "ship", elsewhere)
    shutil.copy(tmp_path / "halve.py", elsewhere)
    options = ("--folder", "elsewhere", "--artifacts", "none")
    again = run_cli("reproduce", "elsewhere/model.onnx", *options, timeout_s=240)
    assert (again.code, again.out.count("bit-equal")) == (0, 5), again.out
