"""Parallel quantization-aware training: every worker has the int8 network of a single process."""

from __future__ import annotations

import json
import platform
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ptpipe
from ptpipe.api import RunResult
from ptpipe_torch import Model

from ...forks import Fork, run_ptpipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

PLUGIN = Path(__file__).parent / "parallel_nets.py"
MANIFEST = """
version: 1
name: proof-qat
seed: 7
plugins: [{plugin}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 580, val_size: 100, num_test: 100, image_size: 12}}}}
  net: {{uses: model.plain}}
  pretrain: {{uses: train.supervised, with: {{epochs: 6, batch_size: 48, lr: 0.05, num_threads: 1}}}}
  fake_quant: {{uses: quant.prepare_qat, needs: {{model: pretrain}}, with: {{backend: fbgemm}}}}
  finetune:
    uses: train.supervised
    needs: {{model: fake_quant}}
    with: {{epochs: 2, batch_size: 48, lr: 0.01, num_threads: 1}}
  int8: {{uses: quant.convert, needs: {{model: finetune}}}}
"""
MODES = {
    "ddp": {"mode": "ddp", "workers": 2},
    "ddp, gloo": {"mode": "ddp", "workers": 2, "comm": "gloo"},
    "fsdp": {"mode": "fsdp", "workers": 2},
    "pp": {"mode": "pp", "microbatches": 4},
    "ddp+pp": {"mode": "ddp+pp", "workers": 4, "microbatches": 2},
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qat") / "qat.yaml"
    path.write_text(MANIFEST.format(plugin=PLUGIN), encoding="utf-8")
    return path


def run(
    manifest: Path, mode: dict[str, Any], backend: str, more: dict[str, Any] | None = None, **options: Any
) -> RunResult:
    overrides: dict[str, Any] = (
        {"fake_quant.backend": backend} | (more or {}) | {f"finetune.{k}": v for k, v in options.items()}
    )
    if mode:
        overrides["finetune.parallel"] = mode
    result = ptpipe.run(manifest, overrides, artifacts=manifest.parent / "artifacts")
    assert result.exit_code == 0, [stage.message for stage in result.stages.values()]
    return result


def int8_of(result: RunResult) -> dict[str, torch.Tensor]:
    model = result.artifact("int8")
    assert isinstance(model, Model)
    assert model.int8_tensors is not None
    return dict(model.int8_tensors)


# Options of a single process that does as the workers do: pipelines see micro-batches, and ranges move once for each.
ALIKE = {
    "ddp": {"batch_size": 48},
    "ddp, gloo": {"batch_size": 48},
    "fsdp": {"batch_size": 48},
    "pp": {"batch_size": 12, "accumulate": 4},
    "ddp+pp": {"batch_size": 24, "accumulate": 2},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("ddp", "fbgemm"),
        ("ddp", "qnnpack"),
        pytest.param("ddp, gloo", "fbgemm", marks=pytest.mark.thorough),
        ("fsdp", "fbgemm"),
        ("pp", "fbgemm"),
        ("ddp+pp", "qnnpack"),
    ],
)
def test_the_int8_network_is_that_of_one_process(manifest: Path, name: str, backend: str) -> None:
    # Of more epochs, a value that rounds to the next integer would make more of a difference than the last bits do.
    single = int8_of(run(manifest, {}, backend, epochs=1, **ALIKE[name]))
    parallel = int8_of(run(manifest, MODES[name], backend, epochs=1))
    assert single.keys() == parallel.keys()
    num_weights = 0
    for key, expected in single.items():
        found = parallel[key]
        if expected.dtype == torch.int8:
            assert (expected.int() - found.int()).abs().max() <= 1, key
            num_weights += expected.numel()
        elif expected.dtype.is_floating_point:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=key)
        else:
            assert (expected - found).abs().max() <= 1, key
    assert num_weights > 6000


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_learned_ranges_are_those_of_one_process(manifest: Path, name: str) -> None:
    """A few steps: later, a value that rounds to the next integer makes more of a difference than the last bits do."""
    few = {"fake_quant.learned_step_size": True, "data.num_train": 144}
    single, parallel = (
        run(manifest, mode, "fbgemm", few, epochs=1, weight_decay=0.1).artifact("finetune")
        for mode in ({}, MODES[name])
    )
    assert isinstance(single, Model) and isinstance(parallel, Model)
    learned = [key for key in single.tensors if key.endswith("log_part")]
    assert sum(bool((single.tensors[key] < -1e-4).any()) for key in learned) >= 4
    for key, expected in single.tensors.items():
        torch.testing.assert_close(parallel.tensors[key], expected, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["pp", "ddp+pp"])
def test_samples_that_only_fill_a_batch_leave_no_trace(manifest: Path, name: str) -> None:
    """A last batch of 1: most micro-batches, and for ddp+pp a whole replica, have nothing that counts."""
    incomplete = {"data.num_train": 581}
    single = int8_of(run(manifest, {}, "fbgemm", incomplete, **ALIKE[name]))
    parallel = int8_of(run(manifest, MODES[name], "fbgemm", incomplete))
    for key, expected in single.items():
        if expected.dtype == torch.int8:
            assert (expected.int() - parallel[key].int()).abs().max() <= 1, key
        elif expected.dtype.is_floating_point:
            torch.testing.assert_close(parallel[key], expected, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ddp", "ddp+pp"])
def test_it_is_as_accurate(manifest: Path, name: str) -> None:
    """Pipeline stages see one micro-batch at a time: their ranges differ a little. bf16, accumulated, clipped."""
    options = {"precision": "bf16", "accumulate": 2, "batch_size": 24, "clip_grad_norm": 1.0}
    single, parallel = (
        run(manifest, mode, "fbgemm", **options).stages["finetune"].metrics for mode in ({}, MODES[name])
    )
    assert single["val_accuracy"] > 0.9
    assert parallel["val_accuracy"] > single["val_accuracy"] - 0.03


KEEPS_STATES = '''
"""Saves each worker's state of a network in quantization-aware training, before it is consolidated."""
from pathlib import Path

from safetensors.torch import save_file

from ptpipe import hookimpl
from ptpipe_train.parallel.ddp import DDPStrategy

consolidate = DDPStrategy.consolidate


def keep_and_consolidate(strategy):
    state = {name: tensor.clone().contiguous() for name, tensor in strategy.module.state_dict().items()}
    save_file(state, Path(__file__).with_name(f"rank-{strategy.workers.rank}.safetensors"))
    consolidate(strategy)


DDPStrategy.consolidate = keep_and_consolidate


@hookimpl
def ptpipe_stages():
    return []
'''


@pytest.mark.parametrize("comm", ["auto", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_ranges_and_weights_are_the_same_on_all_workers_at_every_time(tmp_path: Path, comm: str) -> None:
    """Consolidation makes them rank 0's; before that they must agree without it. Shards are uneven."""
    plugin, manifest = tmp_path / "keeps.py", tmp_path / "qat.yaml"
    plugin.write_text(KEEPS_STATES, encoding="utf-8")
    manifest.write_text(MANIFEST.format(plugin=f"{PLUGIN}, {plugin}"), encoding="utf-8")
    learned = {"fake_quant.learned_step_size": True}
    result = run(manifest, {"mode": "ddp", "workers": 2, "comm": comm}, "fbgemm", learned, batch_size=43, epochs=1)
    assert result.exit_code == 0
    first, second = (load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(2))
    parts = [tensor for name, tensor in first.items() if name.endswith("log_part")]
    assert sum(bool(part.any()) for part in parts) >= 4
    ranges = [name for name in first if name.endswith((".low", ".high", "scale", "zero_point"))]
    assert len(ranges) >= 4, sorted(first)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="shared memory is for x86")
def test_a_process_that_does_several_stages_keeps_nothing(tmp_path: Path, free_port: int) -> None:
    """As torchrun's do. Networks of graphs outlive their stage somewhere in torch; what they hold must not."""
    plugin = tmp_path / "look.py"
    plugin.write_text(LOOK, encoding="utf-8")
    path = tmp_path / "qat.yaml"
    more = "  look: {uses: look.maps, needs: {model: finetune}}\n"
    text = MANIFEST.format(plugin=f"{PLUGIN}, {plugin}").replace("epochs: 6", "epochs: 1")
    path.write_text(text.replace("  int8: {uses: quant.convert, needs: {model: finetune}}\n", more), encoding="utf-8")
    mode = json.dumps(MODES["ddp"])
    arguments = ["run", str(path), "--artifacts", str(tmp_path / "artifacts")]
    arguments += ["-s", f"pretrain.parallel={mode}", "-s", f"finetune.parallel={mode}"]
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost"}
    ranks |= {"MASTER_PORT": str(free_port)}
    with ExitStack() as stack:
        running = [
            stack.enter_context(Fork(run_ptpipe, *arguments, environment=ranks | {"RANK": rank, "LOCAL_RANK": rank}))
            for rank in ("0", "1")
        ]
        outputs = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "5 done" in outputs[0] or "6 done" in outputs[0]


LOOK = '''
"""A stage that fails where memory of an earlier one is still there."""
from pathlib import Path

from ptpipe import Context, StageConfig, StageError, hookimpl, stage
from ptpipe_torch import Model


class Config(StageConfig):
    """None."""


@stage("look.maps")
def look(config: Config, ctx: Context, model: Model) -> Model:
    """Look."""
    if "memfd:ptpipe" in Path("/proc/self/maps").read_text():
        raise StageError("memory is still mapped")
    return model


@hookimpl
def ptpipe_stages():
    return [look]
'''
