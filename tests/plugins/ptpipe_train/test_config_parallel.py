"""Which options of `parallel:` fit together, and what they come to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import ptpipe
from ptpipe import ManifestError, StageError
from ptpipe_train import TrainConfig, train
from ptpipe_train.config_parallel import Parallel
from ptpipe_train.degrees import Degrees
from ptpipe_train.device import check_comm, find_missing_for_workers

MULTI_WORKER, PIPELINED, ALL = (
    {"ddp", "fsdp", "pp", "ddp+pp"},
    {"pp", "ddp+pp"},
    {"single", "dp", "ddp", "fsdp", "pp", "ddp+pp"},
)
# Transcribed from the descriptions of the options: a value that isn't the default, and the modes that accept it.
KNOWN: dict[str, tuple[Any, set[str]]] = {
    "workers": (4, MULTI_WORKER),
    "comm": ("gloo", MULTI_WORKER),
    "timeout_s": (10.0, MULTI_WORKER),
    "device_ids": ([0, 1], {"dp"}),
    "bucket_cap_mb": (1.0, {"ddp"}),
    "gradient_as_bucket_view": (False, {"ddp"}),
    "static_graph": (True, {"ddp"}),
    "sync_bn": (True, {"ddp"}),
    "find_unused": (True, {"ddp"}),
    "compress": ("bf16", {"ddp", "ddp+pp"}),
    "wrap": (["Linear"], {"fsdp"}),
    "wrap_min_parameters": (10, {"fsdp"}),
    "reshard_after_forward": (False, {"fsdp"}),
    "cpu_offload": (True, {"fsdp"}),
    "pipeline_stages": (4, PIPELINED),
    "microbatches": (8, PIPELINED),
    "schedule": ("gpipe", PIPELINED),
    "split_at": (["fc"], PIPELINED),
}
NEEDED = {"ddp": {"workers": 4}, "fsdp": {"workers": 4}, "ddp+pp": {"workers": 4}}


def parallel(**options: Any) -> Parallel:
    return Parallel.model_validate_json(json.dumps(options), strict=True)


def test_the_table_has_every_option() -> None:
    assert set(KNOWN) == set(Parallel.model_fields) - {"mode"}


@pytest.mark.parametrize("mode", sorted(ALL))
@pytest.mark.parametrize("option", KNOWN)
def test_an_option_is_for_its_modes_alone(option: str, mode: str) -> None:
    value, modes = KNOWN[option]
    needed = NEEDED.get(mode, {})
    if option == "pipeline_stages" or (option == "workers" and mode == "pp"):
        needed = {**needed, "pipeline_stages": 4}
    if mode in modes:
        made = parallel(**{"mode": mode, **needed, option: value})
        assert getattr(made, option) == (tuple(value) if isinstance(value, list) else value)
        return
    with pytest.raises(
        ValidationError, match=rf"{option} is an option of mode .*, not of {re.escape(mode)}\b"
    ) as caught:
        parallel(mode=mode, **{option: value})
    assert all(known in str(caught.value) for known in modes)


@pytest.mark.parametrize("mode", sorted(ALL))
def test_null_is_for_every_mode(mode: str) -> None:
    parallel(mode=mode, **dict.fromkeys(KNOWN) | NEEDED.get(mode, {}))


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "ddp+pp"])
def test_workers_are_asked_for(mode: str) -> None:
    with pytest.raises(ValidationError, match=f"mode {mode.replace('+', '.')} needs workers: the total number"):
        parallel(mode=mode)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "pp", "workers": 3}, "2 pipeline stages need 2 workers, not 3"),
        ({"mode": "pp", "pipeline_stages": 4, "workers": 2}, "4 pipeline stages need 4 workers, not 2"),
        (
            {"mode": "pp", "pipeline_stages": 4, "schedule": "gpipe", "workers": 5},
            "4 pipeline stages need 4 workers, not 5",
        ),
        ({"mode": "pp", "schedule": "interleaved_1f1b"}, "2 pipeline stages can't be distributed"),
        (
            {"mode": "pp", "pipeline_stages": 5, "schedule": "interleaved_1f1b"},
            "5 pipeline stages can't be distributed",
        ),
        (
            {"mode": "pp", "pipeline_stages": 6, "workers": 4, "schedule": "interleaved_1f1b"},
            "can't be distributed evenly",
        ),
        (
            {"mode": "pp", "pipeline_stages": 4, "workers": 1, "schedule": "interleaved_1f1b"},
            "can't be distributed evenly",
        ),
        (
            {"mode": "pp", "pipeline_stages": 4, "workers": 4, "schedule": "interleaved_1f1b"},
            "can't be distributed evenly",
        ),
        (
            {"mode": "pp", "pipeline_stages": 4, "workers": 9, "schedule": "interleaved_1f1b"},
            "can't be distributed evenly",
        ),
        ({"mode": "ddp+pp", "pipeline_stages": 3, "workers": 4}, "workers must be a multiple of 3"),
        ({"mode": "ddp+pp", "workers": 1}, "workers must be a multiple of 2"),
        ({"mode": "ddp+pp", "workers": 3, "pipeline_stages": 4, "schedule": "interleaved_1f1b"}, "multiple of 2"),
        (
            {"mode": "pp", "pipeline_stages": 4, "microbatches": 3},
            "need at least 4 microbatches, not 3",
        ),
        (
            {"mode": "pp", "pipeline_stages": 6, "microbatches": 7, "schedule": "interleaved_1f1b"},
            "a multiple of 3",
        ),
        ({"mode": "pp", "split_at": []}, "split_at must name where 1 of 2 pipeline stages begin"),
        ({"mode": "pp", "split_at": ["a", "b"]}, "split_at must name where 1 of 2 pipeline stages begin"),
        (
            {"mode": "pp", "pipeline_stages": 4, "split_at": ["a"]},
            "split_at must name where 3 of 4 pipeline stages begin",
        ),
        ({"mode": "pp", "pipeline_stages": 3, "split_at": ["a", "a"]}, "split_at names a layer twice"),
        ({"mode": "pp", "pipeline_stages": 1}, "greater than or equal to 2"),
        ({"mode": "ddp", "workers": 0}, "greater than or equal to 1"),
        ({"mode": "ddp", "workers": 2, "timeout_s": 0}, "greater than 0"),
        ({"mode": "tp"}, "'single', 'dp', 'ddp', 'fsdp', 'pp' or 'ddp\\+pp'"),
        ({"mode": "ddp", "workers": 2, "stages": 2}, "Extra inputs"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        parallel(**options)


@pytest.mark.parametrize(
    ("options", "replicas", "shards", "ranks", "per_rank"),
    [
        ({}, 1, 1, 1, 1),
        ({"mode": "dp", "device_ids": [0, 1, 2]}, 1, 1, 1, 1),
        ({"mode": "ddp", "workers": 1}, 1, 1, 1, 1),
        ({"mode": "ddp", "workers": 3}, 3, 1, 1, 1),
        ({"mode": "fsdp", "workers": 3}, 1, 3, 1, 1),
        ({"mode": "pp"}, 1, 1, 2, 1),
        ({"mode": "pp", "pipeline_stages": 5, "workers": 5}, 1, 1, 5, 1),
        ({"mode": "pp", "pipeline_stages": 6, "schedule": "interleaved_1f1b"}, 1, 1, 3, 2),
        ({"mode": "pp", "pipeline_stages": 6, "schedule": "interleaved_1f1b", "workers": 2}, 1, 1, 2, 3),
        ({"mode": "pp", "pipeline_stages": 4, "microbatches": 1, "schedule": "gpipe"}, 1, 1, 4, 1),
        ({"mode": "ddp+pp", "workers": 2}, 1, 1, 2, 1),
        ({"mode": "ddp+pp", "workers": 6, "pipeline_stages": 3}, 2, 1, 3, 1),
        ({"mode": "ddp+pp", "workers": 6, "pipeline_stages": 4, "schedule": "interleaved_1f1b"}, 3, 1, 2, 2),
    ],
)
def test_degrees(options: dict[str, Any], replicas: int, shards: int, ranks: int, per_rank: int) -> None:
    made = parallel(**options)
    assert made.degrees == Degrees(replicas, shards, ranks, per_rank)
    assert train.workers is not None
    assert train.workers(TrainConfig(parallel=made)) == replicas * shards * ranks


def test_twice_as_many_microbatches_as_pipeline_stages_by_default() -> None:
    assert parallel(mode="pp", pipeline_stages=3).num_microbatches == 6
    assert parallel(mode="pp", pipeline_stages=3, microbatches=5).num_microbatches == 5
    assert parallel(mode="ddp", workers=8).num_pipeline_stages == 1


def test_pipeline_degrees_by_exhaustive_search() -> None:
    """Every schedule of up to 8 pipeline stages on up to 8 workers: valid where evenly distributed, else refused."""
    for stages in range(2, 9):
        for workers in range(1, 9):
            for schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
                options = {"mode": "pp", "pipeline_stages": stages, "workers": workers, "schedule": schedule}
                if schedule == "interleaved_1f1b":
                    fits = workers > 1 and any(workers * per_rank == stages for per_rank in range(2, 9))
                else:
                    fits = workers == stages
                if fits:
                    degrees = parallel(**options).degrees
                    assert (degrees.world_size, degrees.pipeline_stages) == (workers, stages)
                else:
                    with pytest.raises(ValidationError):
                        parallel(**options)


OPTIONS = st.fixed_dictionaries(
    {"mode": st.sampled_from(sorted(ALL))},
    optional={
        "workers": st.integers(1, 16),
        "pipeline_stages": st.integers(2, 8),
        "microbatches": st.integers(1, 16),
        "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]),
    },
)


@given(OPTIONS, st.integers(1, 4096))
def test_workers_are_the_product_of_the_degrees(options: dict[str, Any], batch_size: int) -> None:
    try:
        made = parallel(**options)
    except ValidationError:
        return
    degrees = made.degrees
    assert degrees.world_size == degrees.replicas * degrees.shards * degrees.pipeline_ranks
    assert degrees.world_size == (made.workers or degrees.pipeline_ranks)
    assert (
        degrees.pipeline_stages == degrees.pipeline_ranks * degrees.pipeline_stages_per_rank == made.num_pipeline_stages
    )
    assert made.mode in ("ddp", "ddp+pp") or degrees.replicas == 1
    degrees.check(degrees.world_size)
    try:
        made.check_batch_size(batch_size)
    except ValueError:
        return
    # A valid batch can be divided: every worker has some of it, all micro-batches have the same size.
    assert batch_size // degrees.batch_shards >= 1
    if made.mode in PIPELINED:
        assert batch_size % degrees.batch_shards == 0
        assert batch_size // degrees.batch_shards % made.num_microbatches == 0


@pytest.mark.parametrize(
    ("options", "batch_size", "words"),
    [
        ({"mode": "ddp", "workers": 4}, 4, ""),
        ({"mode": "ddp", "workers": 4}, 5, ""),
        ({"mode": "ddp", "workers": 4}, 3, "a batch of 3 can't be shared by 4 workers"),
        ({"mode": "fsdp", "workers": 4}, 3, "a batch of 3 can't be shared by 4 workers"),
        ({"mode": "pp", "microbatches": 4}, 12, ""),
        ({"mode": "pp", "microbatches": 4}, 10, "a batch of 10 can't be divided into 1 equal shards of 4 equal micro"),
        ({"mode": "ddp+pp", "workers": 4, "microbatches": 4}, 16, ""),
        ({"mode": "ddp+pp", "workers": 4, "microbatches": 4}, 12, "12 can't be divided into 2 equal shards of 4 equal"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(options: dict[str, Any], batch_size: int, words: str) -> None:
    config = json.dumps({"batch_size": batch_size, "parallel": options})
    if not words:
        TrainConfig.model_validate_json(config, strict=True)
        return
    with pytest.raises(ValidationError, match=words):
        TrainConfig.model_validate_json(config, strict=True)


def test_too_many_or_too_few_workers() -> None:
    degrees = Degrees(replicas=2, shards=3, pipeline_ranks=4, pipeline_stages_per_rank=5)
    assert (degrees.world_size, degrees.batch_shards, degrees.pipeline_stages) == (24, 6, 20)
    degrees.check(24)
    for num in (23, 25):
        with pytest.raises(StageError, match=rf"24 workers \(2 replicas x 3 shards x 4 .*but there are {num}"):
            degrees.check(num)


MANIFEST = """\
version: 1
name: wrong
stages:
  data: {uses: data.synthetic, with: {num_train: 64, val_size: 8, num_test: 8, image_size: 8}}
  net: {uses: model.small_cnn}
  train:
    uses: train.supervised
    with:
      batch_size: 8
      parallel: %s
"""


@pytest.mark.parametrize(
    ("options", "place", "words"),
    [
        (
            "{mode: ddp, workers: 2, pipeline_stages: 2}",
            "10:17",
            "is an option of mode pp and ddp+pp, not of ddp",
        ),
        ("{mode: pp, chunks: 2}", "10:28", "parallel.chunks: renamed to pipeline_stages"),
        ("{mode: ddp, workers: two}", "10:38", "workers"),
        (
            "{mode: pp, pipeline_stages: 4, microbatches: 2}",
            "10:17",
            "4 pipeline stages need at least 4 micro",
        ),
        ("{mode: ddp, workrs: 2}", "10:29", "did you mean 'workers'?"),
        ("{mode: ddp, workers: 9}", "9:7", "a batch of 8 can't be shared by 9 workers"),
    ],
)
def test_a_wrong_option_is_found_in_the_manifest(tmp_path: Path, options: str, place: str, words: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(MANIFEST % options, encoding="utf-8")
    with pytest.raises(ManifestError) as caught:
        ptpipe.load_plan(path)
    lines = [str(problem) for problem in caught.value.problems]
    assert any(line.startswith(f"{path}:{place}: ") and words in line for line in lines), lines


def test_this_machine_lacks_what_workers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = find_missing_for_workers("auto", parallel(mode="ddp", workers=2, sync_bn=True))
    assert line.startswith("parallel sync_bn:")
    assert "CUDA" in line
    (line,) = find_missing_for_workers("auto", parallel(mode="fsdp", workers=2, comm="nccl"))
    assert line.startswith("parallel comm nccl:")
    assert "use gloo or auto" in line
    assert list(find_missing_for_workers("auto", parallel(mode="ddp", workers=2, sync_bn=False, comm="gloo"))) == []
    assert train.preflight is not None
    both = Parallel(mode="ddp", workers=2, sync_bn=True, comm="nccl")
    assert len(list(train.preflight(TrainConfig(parallel=both)))) == 2


def test_a_cuda_device_counts_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wanted = parallel(mode="ddp", workers=2, sync_bn=True, comm="nccl")
    assert list(find_missing_for_workers("cuda", wanted)) == []
    assert len(list(find_missing_for_workers("cpu", wanted))) == 2


@pytest.mark.parametrize("mode", ["fsdp", "pp"])
def test_gloo_can_not_do_every_mode_on_cuda_devices(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wanted = parallel(mode=mode, workers=2, comm="gloo")
    (line,) = find_missing_for_workers("cuda", wanted)
    assert line.startswith(
        f"parallel mode {mode} on CUDA devices needs comm nccl, and with it a device for each worker"
    )
    assert list(find_missing_for_workers("cpu", wanted)) == []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    with pytest.raises(StageError, match=r"use mode ddp, or device cpu \(this machine has \d+\)$"):
        check_comm(torch.device("cuda"), wanted)
    check_comm(torch.device("cpu"), wanted)
    check_comm(torch.device("cuda"), parallel(mode="ddp", workers=2, comm="gloo"))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    check_comm(torch.device("cuda"), wanted)


def test_without_torch_distributed_nothing_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    (line,) = find_missing_for_workers("cpu", parallel(mode="pp"))
    assert line == "parallel mode pp: this build of torch has no torch.distributed"
    assert list(find_missing_for_workers("cpu", parallel())) == []


def test_importing_it_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, ptpipe_train.config; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
