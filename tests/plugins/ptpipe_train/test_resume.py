"""A training that was interrupted and resumed ends with the weights of an uninterrupted one."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ptpipe
from ptpipe import StageError
from ptpipe.api import RunResult
from ptpipe.execution.engine import RunOptions
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import ArrayColumn, Data, FunctionRef, builder, epoch_order
from ptpipe_train import checkpoint, checkpointer, state
from ptpipe_train.parallel.ddp import SingleProcess

from .conftest import Lab, Trained, assert_same_bits

KILLED = Path(__file__).with_name("killed_training.py")
EVERY_STEP = 1e-9
NUM_TRAIN, NUM_VAL = 100, 30
# `memory_format: auto` would read images too, which the tests that count them don't expect.
COUNTED = {"checkpoint_every_s": EVERY_STEP, "memory_format": "channels_last"}


class Stopped(BaseException):
    """Interrupts a training: like a kill, nothing in the product catches it."""


class StoppingImages(ArrayColumn):
    """Pixels that stop the training after a number of reads, and record the reads."""

    def __init__(self, pixels: Any) -> None:
        super().__init__(pixels)
        object.__setattr__(self, "takes_left", 10**9)
        object.__setattr__(self, "taken", [])

    def take(self, indices_B: Any) -> Any:
        object.__setattr__(self, "takes_left", self.takes_left - 1)
        if self.takes_left < 0:
            raise Stopped
        self.taken.append(indices_B.tolist())
        return super().take(indices_B)


def make_data(lab: Lab, stop_train: int = 10**9, stop_val: int = 10**9, **options: Any) -> Data:
    splits = {
        "train": lab.make_split("train", NUM_TRAIN, 1, StoppingImages),
        "val": lab.make_split("val", NUM_VAL, 2, StoppingImages),
    }
    for split, stop in zip(splits.values(), (stop_train, stop_val), strict=True):
        object.__setattr__(split.inputs["images"], "takes_left", stop)
    return lab.make_data(**options, **splits)


SITUATIONS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "bf16": {"precision": "bf16", "schedule": {"name": "one_cycle"}, "nesterov": True},
    "fp16": {"precision": "fp16", "clip_grad_norm": 0.5},
    "adamw": {"optimizer": "adamw", "schedule": {"name": "cosine", "warmup": 3}},
    "adam": {"optimizer": "adam", "weight_decay": 0.01},
    "accumulated": {"accumulate": 3, "label_smoothing": 0.1},
    "without the last batch": {"accumulate": 4, "drop_last": True},
    "frozen": {"freeze": ["0.*", "1.*"], "lr_factors": {"*.bias": 2, "6.*": 0.5}, "decay_norm_and_bias": False},
    "averaged": {"ema": {"decay": 0.9}, "early_stopping": {"patience": 1, "min_delta": 0.05}, "epochs": 9, "lr": 0.1},
    "checkpointed layers": {"gradient_checkpointing": ["Conv2d", "BatchNorm2d", "Dropout", "Linear"]},
    "mixed": {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "ema": {}, "precision": "bf16", "accumulate": 2},
    "pruned": {"pruning": {"amount": 0.8, "every": 2}, "ema": {}, "weight_decay": 0.01, "nesterov": True},
    "averaged to the end": {"ema": {}, "accumulate": 2, "precision": "bf16"},
    "early stopping": {"early_stopping": {"patience": 1, "min_delta": 0.05}, "epochs": 6, "lr": 0.1},
}


@pytest.mark.parametrize("options", SITUATIONS.values(), ids=SITUATIONS)
def test_stopped_anywhere_it_ends_with_the_same_bits(lab: Lab, options: dict[str, Any]) -> None:
    options = {"epochs": 3} | options
    model = lab.make_model(norm=True, dropout=0.5)
    want = lab.train_afresh(model, make_data(lab, augment=["shift"]), **options)
    rng, stops = random.Random(1), 0
    for _ in range(100):
        stop_train, stop_val = (rng.randrange(1, 9), 10**9) if rng.random() < 0.7 else (10**9, rng.randrange(0, 2))
        data = make_data(lab, stop_train, stop_val, augment=["shift"])
        try:
            got = lab.train(model, data, checkpoint_every_s=EVERY_STEP, **options)
            break
        except Stopped:
            stops += 1
    assert stops > 2
    assert_same_bits(got.model, want.model)
    for name in ("history", "train_loss", "val_accuracy", "epochs_done", "num_steps"):
        assert got.metrics[name] == want.metrics[name], name
    if "early_stopping" in options:
        assert want.metrics["epochs_done"] > want.metrics["best_epoch"] > 1
    if options.get("precision") == "fp16":
        assert got.metrics["loss_scale"] == want.metrics["loss_scale"]


class DrawingEverywhere(nn.Module):
    """Draws of torch's, Python's and NumPy's streams in training, as LayerDrop and noise do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        noise = random.gauss(0, 0.1) + float(np.random.standard_normal()) * 0.1
        return x * (random.random() > 0.2) + noise + 0.1 * torch.randn_like(x)


@builder
def drawing_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), DrawingEverywhere(), nn.Linear(8, 4))


def test_what_python_and_numpy_draw_follows_from_the_seed_too(lab: Lab) -> None:
    model, options = lab.make_model(FunctionRef.to(drawing_net)), {"epochs": 2, "memory_format": "contiguous"}
    want = lab.train_afresh(model, make_data(lab), **options)
    outside = random.getstate(), np.random.get_state()[1].tolist()
    assert_same_bits(lab.train_afresh(model, make_data(lab), **options).model, want.model)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == outside, "the caller's streams go on"
    for stop in (4, 6):
        with pytest.raises(Stopped):
            lab.train(model, make_data(lab, stop_train=stop), checkpoint_every_s=EVERY_STEP, **options)
    assert_same_bits(lab.train(model, make_data(lab), **options).model, want.model)


def test_a_checkpoint_without_those_streams_is_taken(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpointer.write_checkpoint

    def as_before(folder: Path, written: checkpoint.Checkpoint) -> None:
        metadata = {name: value for name, value in written.metadata.items() if name != "random"}
        write(folder, replace(written, metadata=metadata))

    monkeypatch.setattr(checkpointer, "write_checkpoint", as_before)
    trained = stop_and_go_on(lab)
    assert trained.log == ["training resumes from the checkpoint of step 9"]
    assert_same_bits(trained.model, lab.train_afresh(lab.make_model(dropout=0.5), make_data(lab), epochs=2).model)


@pytest.mark.parametrize(("precision", "learned"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_a_model_with_fake_quantization_too(lab: Lab, precision: str, learned: bool) -> None:
    config = PrepareQatConfig(backend="fbgemm", learned_step_size=learned)
    folded = prepare_qat(config, lab.context(), lab.make_model(norm=True))
    options = {"epochs": 2, "precision": precision, "lr": 0.01, "memory_format": "channels_last"}
    want = lab.train_afresh(folded, make_data(lab), **options)
    for stop in (3, 5):
        with pytest.raises(Stopped):
            lab.train(folded, make_data(lab, stop_train=stop), checkpoint_every_s=EVERY_STEP, **options)
    got = lab.train(folded, make_data(lab), checkpoint_every_s=EVERY_STEP, **options)
    assert got.log == ["training resumes from the checkpoint of step 8"]
    assert_same_bits(got.model, want.model)
    assert got.model.recipe == folded.recipe


@pytest.mark.thorough
def test_a_compiled_training_too(lab: Lab) -> None:
    model, options = lab.make_model(norm=True, dropout=0.5), {"epochs": 2, "compile": True}
    want = lab.train_afresh(model, make_data(lab), **options)
    with pytest.raises(Stopped):
        lab.train(model, make_data(lab, stop_train=4), checkpoint_every_s=EVERY_STEP, **options)
    assert_same_bits(lab.train(model, make_data(lab), checkpoint_every_s=EVERY_STEP, **options).model, want.model)


@pytest.mark.parametrize(("accumulate", "stop"), [(1, 9), (2, 8), (3, 8)])
def test_resumes_in_mid_epoch_without_repeating_a_sample(lab: Lab, accumulate: int, stop: int) -> None:
    model, options = lab.make_model(), {"epochs": 2, "accumulate": accumulate} | COUNTED
    first, second = make_data(lab, stop_train=stop), make_data(lab)
    with pytest.raises(Stopped):
        lab.train(model, first, **options)
    trained = lab.train(model, second, **options)
    # Batches of an optimizer step that was not finished are taken again; those before never are.
    whole_steps = steps_done(stop, accumulate)
    assert trained.log == [f"training resumes from the checkpoint of step {whole_steps}"]
    order = np.concatenate([epoch_order(NUM_TRAIN, 7, epoch) for epoch in range(2)]).tolist()
    taken = [index for batch in batches_of(whole_steps, accumulate, first) for index in batch]
    assert taken + [index for batch in second.splits["train"].inputs["images"].taken for index in batch] == order


def steps_done(num_batches: int, accumulate: int) -> int:
    """Whole optimizer steps in the first so many batches, 7 an epoch."""
    per_epoch = -(-7 // accumulate)
    return num_batches // 7 * per_epoch + num_batches % 7 // accumulate


def batches_of(num_steps: int, accumulate: int, data: Data) -> list[list[int]]:
    per_epoch = -(-7 // accumulate)
    num_batches = num_steps // per_epoch * 7 + num_steps % per_epoch * accumulate
    return data.splits["train"].inputs["images"].taken[:num_batches]


def stop_and_go_on(lab: Lab, between: Any = None, stop: int = 9, **options: Any) -> Trained:
    model, options = lab.make_model(dropout=0.5), {"epochs": 2} | COUNTED | options
    with pytest.raises(Stopped):
        lab.train(model, make_data(lab, stop_train=stop), **options)
    if between:
        between(sorted((lab.scratch / "checkpoints").iterdir()))
    return lab.train(model, make_data(lab), **options)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_damaged_checkpoint_is_left_out_for_the_one_before(lab: Lab, suffix: str) -> None:
    def damage(files: list[Path]) -> None:
        (newest,) = [file for file in files if file.name == f"step-000000000009{suffix}"]
        newest.write_bytes(newest.read_bytes()[:-50])

    trained = stop_and_go_on(lab, damage)
    (notice,) = trained.notices
    assert "step-000000000009 is damaged" in notice
    assert trained.log == ["training resumes from the checkpoint of step 8"]
    assert_same_bits(trained.model, lab.train_afresh(lab.make_model(dropout=0.5), make_data(lab), epochs=2).model)


def test_with_all_damaged_it_starts_from_scratch(lab: Lab) -> None:
    trained = stop_and_go_on(lab, lambda files: [file.write_bytes(b"") for file in files])
    assert len(trained.notices) == 2
    assert trained.log == []
    assert_same_bits(trained.model, lab.train_afresh(lab.make_model(dropout=0.5), make_data(lab), epochs=2).model)


def test_a_checkpoint_of_other_work_is_not_taken(lab: Lab) -> None:
    with pytest.raises(Stopped):
        lab.train(lab.make_model(), make_data(lab, stop_train=9), epochs=2, checkpoint_every_s=EVERY_STEP)
    options = {"epochs": 2, "lr": 0.01}
    other = lab.train(lab.make_model(), make_data(lab), **options)
    assert other.log == []
    assert_same_bits(other.model, lab.train_afresh(lab.make_model(), make_data(lab), **options).model)


MANIFEST = """
version: 1
name: anew
seed: 7
plugins: [{plugin}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 400, val_size: 20, num_test: 16, image_size: 12}}}}
  net: {{uses: model.plain}}
  train: {{uses: train.supervised, with: {{epochs: 2, batch_size: 16, checkpoint_every_s: 1e-9, num_threads: 1}}}}
"""


class Run:
    """A run in this process, whose training fails after a number of batches."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.manifest, self.artifacts, self.monkeypatch = folder / "anew.yaml", folder / "artifacts", monkeypatch
        plugin = Path(__file__).with_name("parallel_nets.py")
        self.manifest.write_text(MANIFEST.format(plugin=plugin), encoding="utf-8")

    def __call__(self, net_seed: int, num_batches: int = 10**9, **options: Any) -> RunResult:
        calls, forward_backward = iter(range(10**9)), SingleProcess.forward_backward

        def failing(*arguments: Any, **named: Any) -> torch.Tensor:
            if next(calls) == num_batches:
                raise StageError("killed")
            return forward_backward(*arguments, **named)

        self.monkeypatch.setenv("NET_SEED", str(net_seed))
        with self.monkeypatch.context() as patch:
            patch.setattr(SingleProcess, "forward_backward", failing)
            return ptpipe.run(self.manifest, artifacts=self.artifacts, **options)

    def newest_step(self) -> int:
        return max(int(file.stem[5:]) for file in self.artifacts.glob("scratch/*/checkpoints/step-*.json"))


def test_a_checkpoint_of_another_network_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    run(1, num_batches=30)
    assert run.newest_step() == 30
    fresh = RunOptions(fresh=("net",))
    stopped = run(2, num_batches=12, options=fresh)
    (notice,) = stopped.stages["train"].notices
    assert notice.startswith("the checkpoint of step 30 was ignored: it is of another model, which a stage above made")
    assert run.newest_step() == 12, "the former ones, though later, are gone"
    resumed = run(2)
    assert (resumed.exit_code, list(resumed.stages["train"].notices)) == (0, [])
    run.artifacts = tmp_path / "undisturbed"
    assert_same_bits(resumed.artifact("train"), run(2).artifact("train"))


def test_a_network_that_was_made_anew_and_is_the_same_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch)
    run(1, num_batches=30)
    resumed = run(1, options=RunOptions(fresh=("net",)))
    assert (resumed.exit_code, list(resumed.stages["train"].notices)) == (0, [])
    assert "resumes from the checkpoint of step 30" in (resumed.folder / "log.txt").read_text(encoding="utf-8")
    metrics = resumed.stages["train"].metrics
    assert metrics["restarted_at_epochs"] == [pytest.approx(30 / (metrics["num_steps"] / 2), abs=0.001)]
    (page,) = re.findall(
        r"<figure><figcaption>Loss</figcaption>(.*?)</svg>", (resumed.folder / "report.html").read_text()
    )
    assert ">restarted</text>" in page


def test_another_number_of_threads_gets_a_notice(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"epochs": 2, "checkpoint_every_s": EVERY_STEP, "num_threads": None}
    monkeypatch.setattr("ptpipe.host.num_threads", lambda: 1)
    with pytest.raises(Stopped):
        lab.train(lab.make_model(), make_data(lab, stop_train=9), **options)
    monkeypatch.setattr("ptpipe.host.num_threads", lambda: 2)
    (notice,) = lab.train(lab.make_model(), make_data(lab), **options).notices
    assert "number of threads was 1, is 2" in notice
    assert "torch was" not in notice


def test_a_full_disk_gets_one_notice_and_training_continues(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    want = lab.train_afresh(lab.make_model(), make_data(lab), epochs=2)
    monkeypatch.setattr(checkpointer, "write_checkpoint", full)
    trained = lab.train(lab.make_model(), make_data(lab), epochs=2, checkpoint_every_s=EVERY_STEP)
    (notice,) = trained.notices
    assert "No space left on device" in notice
    assert_same_bits(trained.model, want.model)


def test_checkpoints_take_less_than_a_hundredth_of_the_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(checkpointer.time, "perf_counter", lambda: now[0])

    def slow(folder: Path, written: checkpoint.Checkpoint) -> None:
        now[0] += 2.0

    monkeypatch.setattr(checkpointer, "write_checkpoint", slow)
    monkeypatch.setattr(state.TrainingState, "checkpoint", lambda self, step, metadata: None)
    pace = checkpointer.Checkpointer(lab.context(), None, "work", {}, _written_s=0.0)
    training: Any = state.TrainingState(*[None] * 6)
    written = []
    for tick in range(1000):
        now[0] += 1.0
        if pace.is_due:
            pace.write(training, tick)
            written.append(tick)
    assert written == [14, 214, 414, 614, 814]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, str(KILLED), str(folder)], check=True, timeout=200)
    yield folder


@pytest.mark.thorough
@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(killed: Path) -> None:
    want = load_file(killed / "undisturbed.safetensors")
    got = load_file(killed / "killed.safetensors")
    moments = (killed / "moments.txt").read_text(encoding="utf-8").split()
    assert len(moments) >= 5, "too few kills to mean anything"
    assert len(set(moments)) >= 4, "always killed before there was a new checkpoint"
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name
