"""Training in parallel on CUDA devices ends where one process on one device does.

Each training is a process of its own, with TF32 off in it and in its workers: it rounds far more than what is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from ptpipe.store.store import Store
from ptpipe_torch import Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
on_two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")

DEVICE, COMM = "cuda", "nccl"
PLUGIN = Path(__file__).parent / "parallel_nets.py"
MANIFEST = """
version: 1
name: proof-gpu
seed: 7
plugins: [{plugin}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 581, val_size: 101, num_test: 16, image_size: 12}}}}
  net: {{uses: model.plain}}
  train:
    uses: train.supervised
    with: {{epochs: 4, batch_size: 92, lr: 0.05, memory_format: contiguous, num_threads: 1, device: {device}}}
"""


@dataclass(frozen=True)
class Trained:
    model: Model
    metrics: dict[str, Any]


Train: TypeAlias = Callable[..., Trained]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train with these options; what another test has trained is taken from the store."""
    folder = tmp_path_factory.mktemp("proofs-gpu")
    manifest, artifacts = folder / "proof.yaml", folder / "artifacts"
    manifest.write_text(MANIFEST.format(plugin=PLUGIN, device=DEVICE), encoding="utf-8")

    def train(*, norm: bool = False, **options: Any) -> Trained:
        settings = [f"net.norm={json.dumps(norm)}", *(f"train.{k}={json.dumps(v)}" for k, v in options.items())]
        ended = subprocess.run(
            [sys.executable, "-m", "ptpipe", "run", manifest, "--artifacts", artifacts, "--json"]
            + [word for setting in settings for word in ("-s", setting)],
            env=os.environ | {"NVIDIA_TF32_OVERRIDE": "0"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        (stage,) = (stage for stage in json.loads(ended.stdout)["stages"] if stage["stage_id"] == "train")
        return Trained(Store(artifacts).get(stage["outputs"]["output"]["digest"], Model), stage["metrics"])

    return train


def max_difference(one: Trained, other: Trained) -> float:
    """Return the maximum difference of all parameters and statistics, relative to the maximum of each."""
    assert one.model.tensors.keys() == other.model.tensors.keys()
    assert all(tensor.isfinite().all() for trained in (one, other) for tensor in trained.model.tensors.values())
    return max(
        ((tensor - other.model.tensors[name]).abs().max() / tensor.abs().max().clamp_min(1e-12)).item()
        for name, tensor in one.model.tensors.items()
        if tensor.is_floating_point()
    )


def assert_alike(single: Trained, parallel: Trained) -> None:
    assert single.metrics["device"] == parallel.metrics["device"] == DEVICE
    assert single.metrics["num_steps"] == parallel.metrics["num_steps"] == 24
    assert max_difference(single, parallel) < 1e-5
    assert single.metrics["val_loss"] == pytest.approx(parallel.metrics["val_loss"], rel=1e-5)


def test_two_workers_on_one_device_end_where_one_process_does(train: Train) -> None:
    """With gloo: NCCL wants a device for each."""
    assert_alike(train(), train(parallel={"mode": "ddp", "workers": 2, "comm": "gloo"}))


def test_the_device_reports_where_the_time_of_a_step_goes(train: Train) -> None:
    (worker,) = train(cuda_graphs=False, epochs=3).metrics["workers"]  # results are stored without this option
    # The device works asynchronously: its work takes longer than launching it.
    assert worker["forward_ms"] > 0.02
    assert worker["backward_ms"] > 0.02
    assert train().metrics["workers"][0]["forward_backward_ms"] > 0.02  # a graph has both passes
    assert 0 <= worker.get("device_utilization", 0) <= 1


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_is_as_accurate(train: Train, precision: str, memory_format: str) -> None:
    options = {"norm": True, "epochs": 12, "memory_format": memory_format}
    exact, reduced = train(**options), train(**options, precision=precision)
    assert exact.metrics["val_accuracy"] > 0.95
    assert reduced.metrics["val_accuracy"] > exact.metrics["val_accuracy"] - 0.02
    # Otherwise it was no other precision at all.
    assert max_difference(exact, reduced) > 1e-4
    assert reduced.metrics["precision"] == precision
    if precision == "fp16":
        assert reduced.metrics["loss_scale"] > 0


@on_two_devices
@pytest.mark.parametrize(
    "mode",
    [
        {"mode": "dp", "device_ids": [0, 1]},
        {"mode": "dp", "device_ids": [1, 0]},
        {"mode": "ddp", "workers": 2, "comm": COMM},
        {"mode": "fsdp", "workers": 2, "comm": COMM, "wrap": ["Linear"]},
        {"mode": "fsdp", "workers": 2, "comm": COMM, "cpu_offload": True},
        {"mode": "pp", "pipeline_stages": 2, "comm": COMM},
    ],
    ids=["dp", "dp, the second first", "ddp", "fsdp", "fsdp, offloaded", "pp"],
)
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}], ids=["", "clipped"])
def test_two_devices_end_where_one_does(train: Train, mode: dict[str, Any], options: dict[str, Any]) -> None:
    assert_alike(train(**options), train(**options, parallel=mode))


@on_two_devices
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pp"])
def test_fp16_over_two_devices_ends_near_and_with_the_same_scale(train: Train, mode: str) -> None:
    workers = {} if mode == "pp" else {"workers": 2}
    single, parallel = (train(precision="fp16", parallel=options) for options in ({}, {"mode": mode, **workers}))
    assert max_difference(single, parallel) < 0.01
    assert single.metrics["loss_scale"] == parallel.metrics["loss_scale"] > 0


@on_two_devices
def test_sync_bn_sees_the_batch_of_all_workers(train: Train) -> None:
    single = train(norm=True)
    assert_alike(single, train(norm=True, parallel={"mode": "ddp", "workers": 2, "sync_bn": True}))
    # Without it each worker normalizes by its own shard, which is another result.
    assert max_difference(single, train(norm=True, parallel={"mode": "ddp", "workers": 2})) > 1e-4
