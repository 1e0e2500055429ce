"""Trainings that torch.compile compiles: the same weights, nothing left behind, and clear refusals.

Compiling takes seconds: what one training can show, one test shows.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import ptpipe
from ptpipe import StageError
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import FunctionRef, builder
from ptpipe_train import TrainConfig, _find_missing
from ptpipe_train.compiling import find_missing_compiler

from .conftest import Lab, assert_same_bits, max_difference

can_compile = pytest.mark.skipif(bool(list(find_missing_compiler("cpu"))), reason="there is no C++ compiler")


class Growing(nn.Linear):
    """Its forward pass is another one in each step."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return super().forward(x.flatten(1)) * self.step


@builder
def growing_net() -> nn.Module:
    return nn.Sequential(Growing())


@builder
def compact_net() -> nn.Module:
    """As few kernels to compile as batch norm, dropout and two layers have: each takes a second or two."""
    layers = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)
    return nn.Sequential(nn.Flatten(), *layers)


def children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


@can_compile
@pytest.mark.slow
def test_it_ends_with_the_weights_of_an_uncompiled_training(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With dropout, batch norm, a frozen bias and averaged weights."""
    model, data = lab.make_model(FunctionRef.to(compact_net)), lab.make_data(96, 30)
    options: dict[str, Any] = {"epochs": 2, "ema": {"decay": 0.9}, "freeze": ["1.bias"], "accumulate": 2}
    plain = lab.train_afresh(model, data, **options)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    before = dict(os.environ), children()
    compiled = lab.train_afresh(model, data, compile=True, **options)
    assert list(compiled.model.tensors) == list(model.tensors)
    assert 0 < max_difference(compiled.model, plain.model) < 1e-5
    assert compiled.metrics["val_accuracy"] == plain.metrics["val_accuracy"]
    assert compiled.notices == []
    assert capfd.readouterr() == ("", "")
    changed = {name for name, value in os.environ.items() if before[0].get(name) != value}
    assert changed <= {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}  # which torch sets for what it loads
    assert children() == before[1]
    assert list((tmp_path / "temporary").iterdir()) == list((tmp_path / "here").iterdir()) == []
    assert not multiprocessing.active_children()


@can_compile
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_run_gives_the_same_bits(lab: Lab, precision: str) -> None:
    model, data = lab.make_model(norm=True, dropout=0.5), lab.make_data(100)
    options = {"epochs": 2, "compile": True, "precision": precision}
    assert_same_bits(lab.train_afresh(model, data, **options).model, lab.train_afresh(model, data, **options).model)


@can_compile
@pytest.mark.slow
@pytest.mark.thorough
def test_a_network_that_changes_in_each_step_is_refused(lab: Lab) -> None:
    with pytest.raises(StageError, match=r"^compile: the forward pass was compiled 8 times, because"):
        lab.train(lab.make_model(FunctionRef.to(growing_net)), lab.make_data(160), epochs=1, compile=True)


def test_fake_quantization_is_refused(lab: Lab) -> None:
    model = prepare_qat(PrepareQatConfig(backend="fbgemm"), lab.context(), lab.make_model(norm=True))
    with pytest.raises(StageError, match="compile: fake quantization reads ranges back in each forward pass"):
        lab.train(model, lab.make_data(20), compile=True)


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    line, *_ = _find_missing(TrainConfig(compile=True, device="cpu"))  # Python's headers may be missing too
    assert line.startswith("compile: there is no C++ compiler g++ here (CXX can name another one)")
    monkeypatch.setenv("CXX", "no-such-compiler")
    line, *_ = _find_missing(TrainConfig(compile=True, device="cpu"))  # Python's headers may be missing too
    assert line.startswith("compile: there is no C++ compiler no-such-compiler here (as CXX says)")
    assert list(_find_missing(TrainConfig(device="cpu"))) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallel": {"mode": "fsdp", "workers": 2}},
            "can't be combined with parallel mode fsdp, .* can with single and ddp",
        ),
        ({"parallel": {"mode": "pp"}}, "can't be combined with parallel mode pp"),
        ({"gradient_checkpointing": ("Linear",)}, "can't be combined with gradient_checkpointing"),
    ],
)
def test_what_can_not_be_compiled_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig(compile=True, **options)


def test_it_is_in_the_key() -> None:
    assert TrainConfig(compile=True).keyed_options() != TrainConfig().keyed_options()


MANIFEST = """
version: 1
name: compiled
plugins: [{plugin}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 201, val_size: 16, num_test: 16, image_size: 12}}}}
  net: {{uses: model.plain}}
  train: {{uses: train.supervised, with: {{epochs: 2, batch_size: 64, memory_format: contiguous, num_threads: 1}}}}
"""


@can_compile
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("forked_workers")
def test_every_worker_compiles(tmp_path: Path) -> None:
    manifest = tmp_path / "compiled.yaml"
    manifest.write_text(MANIFEST.format(plugin=Path(__file__).parent / "parallel_nets.py"), encoding="utf-8")
    single = ptpipe.run(manifest, artifacts=tmp_path / "artifacts")
    parallel = {"train.compile": True, "train.parallel": {"mode": "ddp", "workers": 2}}
    compiled = ptpipe.run(manifest, parallel, artifacts=tmp_path / "artifacts")
    assert compiled.exit_code == 0, compiled.stages["train"].message
    assert 0 < max_difference(compiled.artifact("train"), single.artifact("train")) < 1e-5
