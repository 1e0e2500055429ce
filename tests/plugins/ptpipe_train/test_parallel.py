"""Every parallel mode ends with the weights of a single process. Real processes, real process groups."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import ptpipe
from ptpipe.api import RunResult
from ptpipe_torch import Model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]
thorough = pytest.mark.thorough

PLUGINS = f"{Path(__file__).parent}/parallel_nets.py, {Path(__file__).parent}/any_cpu_fp16.py"
MANIFEST = """
version: 1
name: proof
seed: 7
plugins: [{plugins}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 581, val_size: 101, num_test: 16, image_size: 12}}}}
  net: {{uses: model.plain}}
  train:
    uses: train.supervised
    with: {{epochs: 4, batch_size: 92, lr: 0.05, memory_format: contiguous, num_threads: 1}}
"""
Train: TypeAlias = Callable[..., RunResult]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proofs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Train:
    """Train with these options; what another test has trained is taken from the store."""
    manifest = folder / "proof.yaml"
    manifest.write_text(MANIFEST.format(plugins=PLUGINS), encoding="utf-8")

    def run(net: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **options: Any) -> RunResult:
        overrides = {f"train.{name}": value for name, value in options.items()} | (data or {})
        overrides |= {f"net.{name}": value for name, value in (net or {}).items()}
        return ptpipe.run(manifest, overrides, artifacts=folder / "artifacts")

    return run


def model_of(result: RunResult) -> Model:
    assert result.exit_code == 0, result.stages["train"].message
    model = result.artifact("train")
    assert isinstance(model, Model)
    return model


def max_difference(one: Model, other: Model) -> float:
    """Return the maximum difference of all parameters, relative to the maximum of each."""
    assert one.tensors.keys() == other.tensors.keys()
    assert all(tensor.isfinite().all() for model in (one, other) for tensor in model.tensors.values())
    return max(
        ((one.tensors[name] - other.tensors[name]).abs().max() / one.tensors[name].abs().max()).item()
        for name in one.tensors
    )


MODES = {
    "ddp": {"mode": "ddp", "workers": 2},
    "ddp, gloo": {"mode": "ddp", "workers": 2, "comm": "gloo"},
    "ddp, three workers": {"mode": "ddp", "workers": 3},
    "fsdp": {"mode": "fsdp", "workers": 2},
    "fsdp, wrapped": {"mode": "fsdp", "workers": 2, "wrap": ["Linear"], "wrap_min_parameters": 1000},
    "gpipe": {"mode": "pp", "schedule": "gpipe"},
    "1f1b": {"mode": "pp"},
    "gpipe, 4 stages": {"mode": "pp", "schedule": "gpipe", "pipeline_stages": 4, "microbatches": 4},
    "1f1b, 4 stages": {"mode": "pp", "pipeline_stages": 4, "microbatches": 4},
    "interleaved": {"mode": "pp", "schedule": "interleaved_1f1b", "pipeline_stages": 4, "microbatches": 4},
    "ddp+pp": {"mode": "ddp+pp", "workers": 4, "microbatches": 2},
    "ddp+pp, interleaved": {
        "mode": "ddp+pp",
        "workers": 4,
        "schedule": "interleaved_1f1b",
        "pipeline_stages": 4,
        "microbatches": 4,
    },
}


ONE_MORE = {"gpipe, 4 stages", "ddp+pp, interleaved"}
"""Of which another mode shows the schedule, another the stages."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[thorough] * (name in ONE_MORE)) for name in MODES])
def test_it_ends_where_one_process_does(run: Train, name: str) -> None:
    options = {"batch_size": 88} if name == "ddp+pp, interleaved" else {}  # it takes no halves of 46
    single = run(**options)
    parallel = run(parallel=MODES[name], **options)
    assert single.stages["train"].metrics["num_steps"] == 24 == parallel.stages["train"].metrics["num_steps"]
    assert max_difference(model_of(single), model_of(parallel)) < 1e-5
    for figure in ("val_loss", "train_loss"):
        assert parallel.stages["train"].metrics[figure] == pytest.approx(
            single.stages["train"].metrics[figure], rel=1e-5
        )
    assert parallel.stages["train"].metrics["val_accuracy"] == single.stages["train"].metrics["val_accuracy"]


@pytest.mark.parametrize("name", ["ddp, three workers", pytest.param("fsdp", marks=thorough)])
def test_buffers_that_passes_write_are_those_of_worker_0(run: Train, name: str) -> None:
    # The network compares them in each pass. 581 samples in batches of 145: the last has a sample for one worker.
    trained = run(net={"average": True}, parallel=MODES[name], batch_size=145, accumulate=2, epochs=1)
    assert model_of(trained).tensors["average.average"] > 0
    (notice,) = [notice for notice in trained.stages["train"].notices if "buffers" in notice]
    assert notice.startswith("the forward pass writes buffers (average.average): all workers take those of worker 0")


def test_fsdp_ends_where_ddp_does(run: Train) -> None:
    sharded, replicated = (run(parallel=MODES[name]) for name in ("fsdp", "ddp"))
    assert max_difference(model_of(sharded), model_of(replicated)) < 1e-5


def test_each_worker_reports_where_its_time_went(run: Train) -> None:
    for name, parts in (("ddp", ["forward", "backward", "communication"]), ("1f1b", ["forward_backward"])):
        workers = run(parallel=MODES[name]).stages["train"].metrics["workers"]
        assert [row["worker"] for row in workers] == [0, 1]
        for row in workers:
            assert row["samples_per_s"] > 0
            assert 0 < row["device_utilization"] <= 1
            assert all(row[f"{part}_ms"] > 0 for part in ("data", *parts, "optimizer"))


def test_steps_of_several_workers_can_be_profiled(run: Train, folder: Path) -> None:
    result = run(parallel=MODES["ddp"], profile={"steps": 2}, lr=0.043)  # no other test has trained that
    assert max_difference(model_of(run(lr=0.043)), model_of(result)) < 1e-5
    (table,) = result.folder.rglob("*operators*")
    assert "DistributedDataParallel.forward" in table.read_text(encoding="utf-8")


def test_workers_of_a_machine_share_memory_unless_gloo_is_chosen(run: Train) -> None:
    used = [run(parallel=MODES[name]).stages["train"].metrics["comm"] for name in ("ddp", "ddp, gloo")]
    assert used == ["shared memory" if platform.machine() == "x86_64" else "gloo", "gloo"]


def test_three_workers_end_alike_over_messages(run: Train) -> None:
    """Which order of gradients they have is found by a pass that leaves no trace in statistics and other buffers."""
    options = {"net": {"norm": True, "average": True}, "batch_size": 145, "accumulate": 2, "epochs": 2}
    shared = run(parallel=MODES["ddp, three workers"], **options)
    sent = run(parallel=MODES["ddp, three workers"] | {"comm": "gloo"}, **options)
    assert sent.exit_code == 0, sent.stages["train"].message
    assert sent.stages["train"].metrics["comm"] == "gloo"
    assert max_difference(model_of(shared), model_of(sent)) < 1e-5


CLIPPED = {"clip_grad_norm": 0.1}
ACCUMULATED = {"accumulate": 2, "batch_size": 48}
CHANNELS_LAST = {"memory_format": "channels_last"}
ADAMW = {"optimizer": "adamw", "lr": 0.002, "label_smoothing": 0.1}
FROZEN = {"freeze": ["conv1.*", "fc1.bias"], "clip_grad_norm": 0.5, "weight_decay": 0.01}
FACTORS = {"lr_factors": {"conv*.weight": 0.1, "*.bias": 2}, "decay_norm_and_bias": False, "weight_decay": 0.01}
AVERAGED = {"ema": {"decay": 0.9}, "accumulate": 2, "batch_size": 48, "freeze": ["conv1.bias"]}
MIXED = {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}
STOPPED = {"schedule": {"name": "cosine"}, "early_stopping": {"patience": 1, "min_delta": 0.9}}


def test_sharded_parameters_take_the_options_that_have_a_fused_kernel(run: Train) -> None:
    options = {"nesterov": True, "weight_decay": 0.01}
    single, parallel = run(**options), run(parallel=MODES["fsdp"], **options)
    assert max_difference(model_of(single), model_of(parallel)) < 1e-5


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp", CLIPPED),
        ("fsdp, wrapped", CLIPPED),
        ("1f1b", CLIPPED),
        pytest.param("ddp+pp", CLIPPED, marks=thorough),
        ("ddp", ACCUMULATED),
        pytest.param("fsdp, wrapped", ACCUMULATED, marks=thorough),
        ("ddp+pp", ACCUMULATED),
        ("fsdp, wrapped", ADAMW),
        ("1f1b", ADAMW | ACCUMULATED),
        ("ddp", FROZEN | FACTORS),
        ("fsdp, wrapped", FROZEN | FACTORS),
        ("1f1b, 4 stages", FROZEN | FACTORS),
        pytest.param("ddp+pp", FROZEN | FACTORS, marks=thorough),
        ("1f1b", CHANNELS_LAST),
        pytest.param("interleaved", CHANNELS_LAST, marks=thorough),
        pytest.param("ddp+pp", CHANNELS_LAST, marks=thorough),
        ("ddp", AVERAGED),
        ("fsdp, wrapped", AVERAGED),
        ("1f1b", AVERAGED),
        pytest.param("ddp+pp", AVERAGED | STOPPED, marks=thorough),
        ("ddp", MIXED | ACCUMULATED),
        pytest.param("ddp, three workers", MIXED, marks=thorough),
        pytest.param("fsdp, wrapped", MIXED, marks=thorough),
        ("1f1b", MIXED),
        pytest.param("interleaved", MIXED | CHANNELS_LAST, marks=thorough),
        pytest.param("ddp+pp", MIXED | ACCUMULATED, marks=thorough),
        ("fsdp", AVERAGED | STOPPED),
        pytest.param("ddp", STOPPED, marks=thorough),
        ("fsdp", STOPPED),
        pytest.param("ddp+pp", STOPPED, marks=thorough),
    ],
)
def test_with_other_options_too(run: Train, name: str, options: dict[str, Any]) -> None:
    single, parallel = run(**options), run(parallel=MODES[name], **options)
    assert max_difference(model_of(single), model_of(parallel)) < 1e-5
    done = single.stages["train"].metrics["epochs_done"]
    assert done == parallel.stages["train"].metrics["epochs_done"] == (2 if "early_stopping" in options else 4)


@pytest.mark.parametrize(("name", "tolerance"), [("single", 1e-6), ("ddp", 1e-5)])
def test_accumulated_batches_are_one_batch(run: Train, name: str, tolerance: float) -> None:
    mode = MODES.get(name, {})
    whole, parts = run(parallel=mode, batch_size=64), run(parallel=mode, batch_size=16, accumulate=4)
    assert max_difference(model_of(whole), model_of(parts)) < tolerance


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "ddp", "gradient_as_bucket_view": False, "bucket_cap_mb": 0.01, "static_graph": True},
        {"mode": "fsdp", "cpu_offload": True, "reshard_after_forward": False},
        {"mode": "pp", "split_at": ["fc1"]},
        {"mode": "pp", "pipeline_stages": 3, "split_at": ["conv2", "fc1"], "microbatches": 4, "schedule": "gpipe"},
    ],
    ids=["buckets", "offloaded", "split", "split twice"],
)
def test_options_of_a_mode_change_no_result(run: Train, options: dict[str, Any]) -> None:
    workers = {} if options["mode"] == "pp" else {"workers": 2}
    parallel = run(parallel=options | workers)
    assert max_difference(model_of(run()), model_of(parallel)) < 1e-5
    if "split_at" in options:
        assert parallel.stages["train"].metrics["split_points"] == options["split_at"]


def test_a_worker_whose_shard_of_the_last_batch_is_empty_changes_nothing(run: Train) -> None:
    """480 samples in batches of 479: the second worker has no sample of the last one."""
    options = {"batch_size": 479, "epochs": 10}
    parallel = run(parallel=MODES["ddp"], **options)
    assert max_difference(model_of(run(**options)), model_of(parallel)) < 1e-5


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_nor_does_it_with_batch_norm(run: Train, name: str) -> None:
    tensors = model_of(run({"norm": True}, parallel=MODES[name], batch_size=479, epochs=2)).tensors
    assert tensors["norm.num_batches_tracked"] == 4
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", *(pytest.param(name, marks=thorough) for name in ("interleaved", "1f1b, channels_last"))]
)
def test_batch_norm_sees_the_samples_of_a_micro_batch_alone(run: Train, name: str) -> None:
    """An epoch's last 40 of 480 samples are a micro-batch of 22, one of 18, and two of padding."""
    mode, _, memory_format = name.partition(", ")
    options = {"batch_size": 88, "epochs": 2, "memory_format": memory_format or "contiguous"}
    parallel = run({"norm": True}, parallel=MODES[mode], **options)
    num = 4
    options["batch_size"] = 88 // num
    single = run({"norm": True}, **options, accumulate=num)
    assert single.stages["train"].metrics["num_steps"] == 12 == parallel.stages["train"].metrics["num_steps"]
    assert (
        model_of(single).tensors["norm.num_batches_tracked"] == model_of(parallel).tensors["norm.num_batches_tracked"]
    )
    assert max_difference(model_of(single), model_of(parallel)) < 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ddp", "ddp, three workers", "fsdp", "1f1b", pytest.param("ddp+pp", marks=thorough)])
def test_a_frozen_batch_norm_is_that_of_one_process(run: Train, name: str) -> None:
    """It sees no batch: even shards of a batch end where whole batches do."""
    frozen = {"freeze": ["conv1.*", "norm.*"]}
    single, parallel = (model_of(run({"norm": True}, parallel=MODES.get(mode, {}), **frozen)) for mode in ("", name))
    for key, tensor in single.tensors.items():
        torch.testing.assert_close(parallel.tensors[key], tensor, rtol=1e-4, atol=1e-4)  # with AVX2, 2e-5
    assert parallel.tensors["norm.num_batches_tracked"] == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("mode", "frozen"),
    [
        ({"mode": "pp", "split_at": ["conv2"]}, ["conv1.*"]),
        ({"mode": "pp", "split_at": ["fc1"]}, ["fc*"]),
        (MODES["fsdp, wrapped"], ["conv2.*", "fc1.*"]),
    ],
    ids=["first stage", "last stage", "sharded layer"],
)
def test_a_piece_of_which_nothing_is_trained(
    run: Train, mode: dict[str, Any], frozen: list[str], precision: str
) -> None:
    options = {"freeze": frozen, "epochs": 2, "precision": precision}
    single, parallel = model_of(run(**options)), model_of(run(parallel=mode, **options))
    assert max_difference(single, parallel) < (1e-5 if precision == "fp32" else 0.01)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mode", "types"),
    [
        ("ddp", ["Sequential"]),
        ("fsdp", ["Sequential"]),
        ("fsdp, wrapped", ["Sequential"]),
        ("fsdp, wrapped", ["Linear", "Conv2d"]),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_run_twice_change_nothing(run: Train, mode: str, types: list[str], precision: str) -> None:
    options = {"parallel": MODES[mode], "precision": precision, "accumulate": 2, "epochs": 2}
    net = {"norm": True, "norm_1d": True, "blocks": True}
    once, twice = (model_of(run(net, **options, **more)) for more in ({}, {"gradient_checkpointing": types}))
    for name, tensor in once.tensors.items():
        torch.testing.assert_close(twice.tensors[name], tensor, rtol=1e-6, atol=1e-6)


DROPPED = {"drop_last": True, "batch_size": 92, "epochs": 2}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "1f1b", pytest.param("ddp+pp", marks=thorough)])
def test_without_the_last_batch_too(run: Train, name: str) -> None:
    single, parallel = run(**DROPPED), run(parallel=MODES[name], **DROPPED)
    assert single.stages["train"].metrics["num_steps"] == 10
    assert max_difference(model_of(single), model_of(parallel)) < 1e-5


def test_a_worker_that_would_get_one_sample_is_found_before_the_first_step(run: Train) -> None:
    """Three whole batches leave three samples for three workers."""
    options = {"batch_size": 159, "epochs": 1}
    refused = run({"norm_1d": True}, parallel=MODES["ddp, three workers"], **options)
    assert refused.exit_code == 1
    message = refused.stages["train"].message
    assert (
        "480 samples in batches of 159, each divided into 3 forward passes, leave one: set drop_last to true, or"
        in (message)
    )
    assert run({"norm_1d": True}, parallel=MODES["ddp, three workers"], drop_last=True, **options).exit_code == 0


@pytest.mark.parametrize("name", ["ddp", pytest.param("ddp+pp", marks=thorough)])
def test_fewer_samples_than_workers(run: Train, name: str) -> None:
    data = {"data.num_train": 103, "data.val_size": 102, "data.calibration_size": 1}
    options = {"epochs": 3, "batch_size": 8}
    parallel = run(data=data, parallel=MODES[name], **options)
    assert max_difference(model_of(run(data=data, **options)), model_of(parallel)) < 1e-5


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_one_worker_is_one_process(run: Train, mode: str) -> None:
    assert max_difference(model_of(run()), model_of(run(parallel={"mode": mode, "workers": 1}))) == 0


@pytest.mark.parametrize(
    "name",
    ["ddp", pytest.param("fsdp, wrapped", marks=thorough), "1f1b", pytest.param("ddp+pp", marks=thorough)],
)
def test_fp16_ends_near_and_with_the_same_scale(run: Train, name: str) -> None:
    options = {"precision": "fp16", "epochs": 2, "clip_grad_norm": 0.1}
    single, parallel = run(**options), run(parallel=MODES[name], **options)
    assert max_difference(model_of(single), model_of(parallel)) < 0.01
    scales = [result.stages["train"].metrics["loss_scale"] for result in (single, parallel)]
    assert scales[0] == scales[1] > 0
    (notice,) = parallel.stages["train"].notices
    assert "bf16 is much faster" in notice


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp, wrapped", marks=thorough), "1f1b"])
def test_batch_norm_and_bf16_train_as_well(run: Train, name: str) -> None:
    """Batch norm sees the shard of one process: the result is not the same, but as good."""
    options = {"precision": "bf16", "epochs": 12}
    single = run({"norm": True}, **options).stages["train"].metrics
    result = run({"norm": True}, parallel=MODES[name], **options)
    model_of(result)
    parallel = result.stages["train"].metrics
    assert single["val_accuracy"] > 0.95
    assert parallel["val_accuracy"] > single["val_accuracy"] - 0.02


@pytest.mark.parametrize("name", ["ddp", "1f1b"])
def test_all_workers_take_the_precision_that_rank_0_measured(run: Train, name: str) -> None:
    auto = run(parallel=MODES[name], precision="auto")
    metrics = auto.stages["train"].metrics
    assert metrics[f"{metrics['precision']}_step_ms"] == min(metrics["fp32_step_ms"], metrics["bf16_step_ms"]) > 0
    chosen = run(parallel=MODES[name], precision=metrics["precision"])
    # Pipeline stages are balanced by measured cost, which only changes the order of sums.
    assert max_difference(model_of(chosen), model_of(auto)) < 1e-2


@pytest.mark.parametrize(("name", "compress"), [("ddp", "bf16"), ("ddp+pp", "fp16")])
def test_compressed_gradients_end_near(run: Train, name: str, compress: str) -> None:
    compressed = run(parallel=MODES[name] | {"compress": compress})
    assert 1e-7 < max_difference(model_of(run()), model_of(compressed)) < 0.02


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("num_val", "name"), [(10_000, "ddp"), (9_999, "ddp, three workers")])
def test_every_val_sample_is_counted_once(run: Train, num_val: int, name: str) -> None:
    data = {"data.num_train": 480 + num_val, "data.val_size": num_val}
    options = {"epochs": 1, "batch_size": 480}
    single = run(data=data, **options).stages["train"].metrics["val_accuracy"]
    assert run(data=data, parallel=MODES[name], **options).stages["train"].metrics["val_accuracy"] == single
    assert single * num_val == pytest.approx(round(single * num_val), abs=1e-9)


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=thorough)])
def test_val_is_measured_in_batches_of_a_workers_share(run: Train, name: str) -> None:
    """A worker has memory for its share of a batch, 40 of 80 samples, though all workers together measure 101."""
    result = run({"max_eval_batch": 40}, parallel=MODES[name], batch_size=80, epochs=1)
    assert result.exit_code == 0, result.stages["train"].message


def test_a_network_that_cannot_be_split_is_refused_before_the_first_step(run: Train) -> None:
    result = run({"branching": True}, parallel=MODES["1f1b"])
    assert result.exit_code == 1
    assert "can't be split into pipeline stages: its control flow depends on values" in result.stages["train"].message


def test_unused_parameters_are_named_and_can_be_allowed(run: Train) -> None:
    refused = run({"unused": True}, parallel=MODES["ddp"])
    assert refused.exit_code == 1
    assert "were unused in a step: set parallel.find_unused to true" in refused.stages["train"].message
    allowed = run({"unused": True}, parallel=MODES["ddp"] | {"find_unused": True})
    assert max_difference(model_of(run({"unused": True})), model_of(allowed)) < 1e-5


def test_workers_that_do_not_agree_deliver_nothing(run: Train) -> None:
    result = run({"differs": True}, parallel=MODES["ddp"])
    assert result.exit_code == 1
    assert "the workers ended with different networks" in result.stages["train"].message


def test_a_layer_that_no_pipeline_stage_can_begin_with_is_named(run: Train) -> None:
    result = run(parallel={"mode": "pp", "split_at": ["relu1"]})
    assert (
        "split_at: no pipeline stage can begin with relu1 (possible split points: pool1, conv2"
        in result.stages["train"].message
    )


def test_a_type_that_is_not_there_is_named(run: Train) -> None:
    result = run(parallel=MODES["fsdp"] | {"wrap": ["Bottleneck"]})
    assert "wrap: the network has no layer of type Bottleneck (it has: Conv2d, Flatten" in (
        result.stages["train"].message
    )


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are as many devices as dp wants")
@pytest.mark.parametrize("ids", [None, [3, 9]])
def test_dp_without_two_devices_is_one_replica_and_gives_a_notice(run: Train, ids: list[int] | None) -> None:
    result = run(parallel={"mode": "dp", **({"device_ids": ids} if ids else {})})
    assert max_difference(model_of(run()), model_of(result)) == 0
    (notice,) = result.stages["train"].notices
    assert "training with a single replica" in notice
