from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

from ptpipe import StageError
from ptpipe.events import Notice
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Data,
    DatasetInfo,
    FunctionRef,
    ImageInfo,
    LoaderOptions,
    Metric,
    Split,
    Task,
    TensorSpec,
    builder,
    transform,
)
from ptpipe_torch.task.own_functions import OwnFunction, OwnFunctionsTask
from ptpipe_train import supervised
from ptpipe_train.config_parallel import Parallel
from ptpipe_train.device import DeviceSettings
from ptpipe_train.parallel.ddp import SingleProcess, data_parallel
from ptpipe_train.single_samples import warn_of_small_passes

from ...datasets import image_info, image_split, labels_of
from ...signatures import classifier
from .conftest import SIDE, Lab, assert_same_bits, small_net


@transform
def eight_bits(module: nn.Module) -> nn.Module:
    return module


class Listening(nn.Module):
    """Records its callbacks in a buffer, and counts its samples, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fractions", torch.zeros(0))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))

    def on_progress(self, fraction: float) -> None:
        self.fractions = torch.cat([self.fractions, torch.tensor([fraction])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_seen += len(x)
        return x

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.fractions = torch.zeros_like(state[prefix + "fractions"])
        super()._load_from_state_dict(state, prefix, *rest)


@builder
def listening_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Listening(), nn.Linear(SIDE * SIDE, 4))


@builder
def one_value_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(SIDE * SIDE), nn.Linear(SIDE * SIDE, 4))


def test_learns_and_reports_metrics(lab: Lab) -> None:
    trained = lab.train(
        lab.make_model(norm=True, dropout=0.1), lab.make_data(400, 80), epochs=4, schedule={"name": "one_cycle"}
    )
    metrics = trained.metrics
    assert metrics["val_accuracy"] > 0.9
    assert metrics["train_loss"] < 0.8
    assert (metrics["num_steps"], metrics["epochs_done"], metrics["samples_per_step"]) == (100, 4, 16)
    assert (metrics["precision"], metrics["device"]) == ("fp32", "cpu")
    assert metrics["samples_per_s"] > 0
    assert metrics["peak_lr"] == pytest.approx(0.05, rel=1e-3)
    assert [figures["epoch"] for figures in metrics["history"]] == [1, 2, 3, 4]
    assert metrics["history"][-1]["val_loss"] == metrics["val_loss"]
    assert not trained.model.build().training
    assert trained.notices == []


class Wrapped(nn.Module):
    """A network that returns its logits as `form` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.head = form, nn.Linear(SIDE * SIDE, 4)

    def forward(self, x: torch.Tensor) -> Any:
        logits_NK = self.head(x.flatten(1))
        return {"dict": {"logits": logits_NK}, "tuple": (logits_NK,), "two": (logits_NK, x)}.get(self.form, logits_NK)


@builder
def wrapped(*, form: str) -> nn.Module:
    return Wrapped(form)


def test_outputs_may_be_named_or_in_a_sequence(lab: Lab) -> None:
    weights = [
        lab.train(lab.make_model(FunctionRef.to(wrapped, form=form)), lab.make_data(40, 20)).model.tensors
        for form in ("tensor", "dict", "tuple")
    ]
    for other in weights[1:]:
        assert all(torch.equal(tensor, weights[0][name]) for name, tensor in other.items())
    with pytest.raises(StageError, match=r"returns a tuple of 2 values; it must return logits \(batch, 4\) float32"):
        lab.train(lab.make_model(FunctionRef.to(wrapped, form="two")), lab.make_data(40))


class Freezing(nn.Identity):
    """A part of a prepared network that stops adapting after a fraction of the training."""

    def __init__(self, freeze_at: float) -> None:
        super().__init__()
        self.freeze_at = freeze_at


@builder
def freezing_net(*, freeze_at: float) -> nn.Module:
    return nn.Sequential(nn.Flatten(), Freezing(freeze_at), nn.Linear(SIDE * SIDE, 4))


@pytest.mark.parametrize(
    ("freeze_at", "schedule", "resolved"),
    [
        (0.75, {}, "cosine"),
        (1.0, {}, "constant"),
        (0.75, {"name": "constant"}, "constant"),
        (0.75, {"warmup": 2}, "cosine"),
    ],
)
def test_the_learning_rate_decays_where_parts_freeze(lab: Lab, freeze_at: float, schedule: Any, resolved: str) -> None:
    model = lab.make_model(FunctionRef.to(freezing_net, freeze_at=freeze_at))
    metrics = lab.train(model, lab.make_data(64), epochs=2, lr=0.05, schedule=schedule).metrics
    assert metrics["schedule"] == resolved
    assert (metrics["history"][-1]["lr"] < 0.01) is (resolved == "cosine")


def test_progress_counts_samples_to_the_end(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptpipe_train.supervised.POLL_EVERY_S", 0.0)
    trained = lab.train(lab.make_model(), lab.make_data(40), epochs=2)
    steps, epochs = [], []
    for event in trained.progress:
        (steps if "step" in event.facts else epochs).append(event)
    assert [event.done for event in steps] == [16, 32, 40, 56, 72, 80]
    assert {(event.total, event.unit) for event in trained.progress} == {(80, "samples")}
    assert steps[-1].facts.keys() == {"epoch", "step", "loss", "lr", "samples_per_s"}
    assert (steps[-1].facts["epoch"], steps[-1].facts["step"]) == (2, 6)
    assert [event.done for event in epochs] == [40, 80]
    assert [event.facts for event in epochs] == trained.metrics["history"], "each epoch's metrics as it ends"


def test_progress_comes_a_few_times_a_second(lab: Lab) -> None:
    begin_s = time.perf_counter()
    progress = lab.train(lab.make_model(), lab.make_data(1000), epochs=3).progress
    assert 6 <= len(progress) <= 6 + 4 * (time.perf_counter() - begin_s)


def test_val_is_measured_without_leaving_a_trace(lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(listening_net))
    with_val = lab.train_afresh(model, lab.make_data(100, 30), epochs=2)
    without = lab.train_afresh(model, lab.make_data(100, 0), epochs=2)
    assert_same_bits(with_val.model, without.model)
    assert with_val.model.tensors["1.num_seen"] == 200
    assert "val_accuracy" not in without.metrics


def test_val_figures_are_those_of_the_delivered_model(lab: Lab) -> None:
    data = lab.make_data(100, 33)
    trained = lab.train(lab.make_model(norm=True, dropout=0.5), data, epochs=2, precision="bf16")
    (batch,) = data.batches("val", batch_size=33)
    logits = trained.model.build()(batch.inputs["images"])
    assert trained.metrics["val_accuracy"] == (logits.argmax(1) == batch.targets["labels"]).double().mean().item()
    assert trained.metrics["val_loss"] == pytest.approx(
        nn.functional.cross_entropy(logits, batch.targets["labels"]).item(), rel=1e-5
    )


def test_callbacks_are_called_with_the_fraction_before_each_step(lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(listening_net))
    trained = lab.train(model, lab.make_data(64), epochs=2, accumulate=2)
    assert trained.model.tensors["1.fractions"].tolist() == [0.0, 0.25, 0.5, 0.75]


def test_the_process_is_left_as_it_was(lab: Lab) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    threads, dtype, state, numpy_state = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_rng_state(),
        np.random.get_state()[1],
    )
    lab.train(lab.make_model(dropout=0.5), lab.make_data(20), epochs=1, num_threads=2, precision="bf16")
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_seed_alone_decides(lab: Lab) -> None:
    model, data = lab.make_model(norm=True, dropout=0.5), lab.make_data()
    first = lab.train_afresh(model, data, epochs=2, precision="bf16")
    torch.manual_seed(99)  # the process's own stream must not matter
    second = lab.train_afresh(model, lab.make_data(), epochs=2, precision="bf16")
    assert_same_bits(first.model, second.model)
    lab.seed = 8
    other = lab.train_afresh(model, data, epochs=2, precision="bf16")
    assert not torch.equal(first.model.tensors["8.weight"], other.model.tensors["8.weight"])


class Stopping:
    """Plays val losses and keeps the weights of each epoch."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses
        self.weights: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, *rest: Any) -> tuple[dict[str, float], list[str]]:
        self.weights.append(module.state_dict()["8.weight"].clone())
        loss = self.losses[len(self.weights) - 1]
        return {"loss": loss, "accuracy": 1 - loss}, []


@pytest.mark.parametrize("metric", ["val_loss", "val_accuracy"])
def test_early_stopping_ends_and_restores_the_best(lab: Lab, monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    scores = Stopping([0.9, 0.5, 0.495, 0.6, 0.4, 0.3])
    monkeypatch.setattr(supervised, "evaluate", scores)
    rule = {"patience": 2, "min_delta": 0.01, "metric": metric}
    trained = lab.train(lab.make_model(), lab.make_data(40, 8), epochs=6, early_stopping=rule)
    assert len(scores.weights) == 4
    assert torch.equal(trained.model.tensors["8.weight"], scores.weights[1])
    assert trained.metrics["stopped_early"] is True
    assert (trained.metrics["best_epoch"], trained.metrics["epochs_done"], trained.metrics["val_loss"]) == (2, 4, 0.5)


def test_early_stopping_restores_the_best_also_where_patience_lasts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = Stopping([0.9, 0.5, 0.6])
    monkeypatch.setattr(supervised, "evaluate", scores)
    trained = lab.train(lab.make_model(), lab.make_data(40, 8), epochs=3, early_stopping={})
    assert torch.equal(trained.model.tensors["8.weight"], scores.weights[1])
    assert trained.metrics["stopped_early"] is False


def test_a_loss_that_is_not_finite_fails_with_remedies(lab: Lab) -> None:
    with pytest.raises(StageError) as caught:
        lab.train(lab.make_model(), lab.make_data(), epochs=3, lr=1e20, precision="bf16")
    text = str(caught.value)
    assert "the loss became nan in epoch 1, step" in text or "the loss became inf in epoch 1, step" in text
    assert "of 7, at a learning rate of 1e+20" in text
    assert all(word in text for word in ("lower lr", "warmup", "clip_grad_norm", "precision fp32"))


def test_a_last_step_that_ruins_the_weights_is_seen(lab: Lab) -> None:
    # One step: its loss is that of sound weights.
    with pytest.raises(StageError, match=r"weights became nan or inf in epoch 1, step 1 of 1, at a .* of 1e\+38"):
        lab.train(lab.make_model(), lab.make_data(16), epochs=1, lr=1e38, weight_decay=1e3)


def test_the_step_of_a_bad_loss_is_named_though_losses_are_read_now_and_then(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptpipe_train.supervised.POLL_EVERY_S", math.inf)
    data, model = lab.make_data(64), lab.make_model()
    calls = iter(range(100))
    original = SingleProcess.forward_backward

    def spoiled(self: Any, *rest: Any, **named: Any) -> torch.Tensor:
        loss = original(self, *rest, **named)
        return loss * math.inf if next(calls) == 5 else loss

    monkeypatch.setattr(SingleProcess, "forward_backward", spoiled)
    with pytest.raises(StageError, match="the loss became inf in epoch 2, step 2 of 4"):
        lab.train(model, data, epochs=3)


def test_refuses_what_can_not_be_trained(lab: Lab) -> None:
    model, data = lab.make_model(), lab.make_data()
    int8 = model.with_recipe(convert=(FunctionRef.to(eight_bits),))
    with pytest.raises(
        StageError, match=r"^the model is quantized \(int8\): train it before quant.convert or quant.dyn"
    ):
        lab.train(int8, data)
    with pytest.raises(StageError, match=r"returns logits \(batch, 7\) .*; quadrants needs logits \(batch, 4\)"):
        lab.train(model.with_recipe(signature=classifier((1, 8, 8), 7)), data)
    with pytest.raises(StageError, match=r"takes images \(batch, 1, 9, 9\) .*; quadrants needs .*1, 8, 8\)"):
        lab.train(model.with_recipe(signature=classifier((1, 9, 9), 4)), data)
    with pytest.raises(StageError, match="no train samples"):
        lab.train(model, lab.make_data(0))
    with pytest.raises(StageError, match="early_stopping needs a val split"):
        lab.train(model, data, early_stopping={})


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("val_f1", "there are val_accuracy, val_loss"),
        ("val_acuracy", "did you mean 'val_accuracy'?"),
        ("val_top5_accuracy", "did you mean 'val_accuracy'?"),  # there are no more than four classes
    ],
)
def test_a_metric_to_monitor_that_the_task_has_not_is_refused_at_the_start(lab: Lab, metric: str, hint: str) -> None:
    with pytest.raises(StageError) as caught:
        lab.train(lab.make_model(), lab.make_data(40, 8), early_stopping={"metric": metric})
    assert str(caught.value) == f"early_stopping.metric: quadrants has no metric {metric!r} ({hint})"
    assert lab.events == []


OWN = """
import torch

def inverse(outputs, targets): return 1 / targets
def LogError(outputs, targets): return torch.log(targets * 0 + 2)
"""


def measured(lab: Lab, file: Path, function: str) -> Data:
    """Images whose network is measured by a function of a file."""
    file.write_text(OWN)
    data = lab.make_data(40, 8)
    reference = FunctionRef.in_file(file, function, {})
    metric = OwnFunction(address=reference.address, source=reference.source)
    task = OwnFunctionsTask(base=data.info.task.to_json(), metric=metric, higher_is_better=False)
    own = task.with_source_functions([f"{file}:{function}"])
    return Data(replace(data.info, task=own), data.splits, data.loader)


def test_a_metric_that_is_not_finite_is_no_fault_of_the_training(lab: Lab, tmp_path: Path) -> None:
    data = measured(lab, tmp_path / "own.py", "inverse")
    assert 0 in labels_of(data.splits["val"])
    with pytest.raises(
        StageError, match=r"^the metric inverse became inf on val, where the loss is 1\.\d+: its function"
    ):
        lab.train(lab.make_model(), data, epochs=1)


def test_a_metric_of_any_name_is_monitored(lab: Lab, tmp_path: Path) -> None:
    data = measured(lab, tmp_path / "own.py", "LogError")
    trained = lab.train(lab.make_model(), data, epochs=2, early_stopping={"metric": "val_LogError"})
    assert trained.metrics["val_LogError"] == pytest.approx(math.log(2))


def test_the_figures_of_an_epoch_are_those_of_the_task(lab: Lab) -> None:
    metrics = lab.train(lab.make_model(), lab.make_data(40, 8), epochs=1).metrics
    assert metrics["history"][0].keys() >= {"val_accuracy", "val_loss"}
    assert "val_top5_accuracy" not in metrics["history"][0]
    data = lab.make_data(40, 8)
    names = tuple("abcdef")
    data = Data(image_info("six", names, (1, SIDE, SIDE), (0.3,), (0.2,)), data.splits, data.loader)
    ref = FunctionRef.to(small_net, norm=False, dropout=0.0, num_classes=6)
    model = lab.make_model(ref).with_recipe(signature=classifier((1, SIDE, SIDE), 6))
    rule = {"metric": "val_top5_accuracy"}
    metrics = lab.train(model, data, epochs=1, early_stopping=rule).metrics
    assert 0 <= metrics["val_accuracy"] <= metrics["val_top5_accuracy"] <= 1


def with_positive(data: Data, name: str) -> Data:
    task = data.info.task.model_copy(update={"positive_class": name})
    return Data(replace(data.info, task=task), data.splits, data.loader)


@pytest.mark.parametrize("name", ["roc_auc", "average_precision"])
def test_the_best_epoch_may_be_that_of_a_ranking(lab: Lab, name: str) -> None:
    data = with_positive(lab.make_data(60, 40), "c")
    trained = lab.train(lab.make_model(), data, epochs=4, lr=0.02, early_stopping={"metric": f"val_{name}"})
    with trained.model.predictor() as predict:
        (batch,) = data.batches("val", batch_size=40)
        logits_NK = torch.from_numpy(predict(batch.input_arrays())["logits"])
    found_N, probabilities_N = batch.targets["labels"] == 2, logits_NK.double().softmax(1)[:, 2]
    score = {"roc_auc": roc_auc_score, "average_precision": average_precision_score}[name]
    best = max(epoch[f"val_{name}"] for epoch in trained.metrics["history"])
    assert trained.metrics[f"val_{name}"] == best == pytest.approx(score(found_N, probabilities_N), abs=1e-12)
    assert not trained.notices


def test_a_val_split_without_the_positive_class_is_reported_once(lab: Lab) -> None:
    data = with_positive(lab.make_data(40, 8), "a")
    val = data.splits["val"]
    val = image_split(val.ids, np.maximum(labels_of(val), 1), val.inputs["images"])
    data = Data(data.info, {**data.splits, "val": val}, data.loader)
    trained = lab.train(lab.make_model(), data, epochs=2)
    sentence = "val has no sample of 'a': F1, roc_auc and average_precision are undefined there and count as 0"
    assert trained.notices == [sentence] and trained.metrics["val_roc_auc"] == 0


class Estimation(Task):
    """A task without labels: a network's first output estimates a number."""

    num_outputs: int

    targets = property(lambda self: {"number": ArrayInfo(dtype="float32")})
    outputs = property(lambda self: (TensorSpec("logits", "float32", ("batch", self.num_outputs)),))
    metrics = property(lambda self: (Metric("mae", higher_is_better=False),))

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (outputs["logits"][:, 0] - targets["number"]).square()

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"error": (outputs["logits"][:, 0] - targets["number"]).abs().double().sum()}

    def figures(self, sums: Mapping[str, np.ndarray], num_samples: int) -> dict[str, Any]:
        return {"mae": float(sums["error"]) / num_samples}

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"prediction": outputs["logits"][:, 0], "score": -self.losses(outputs, targets)}


def estimates(lab: Lab) -> Data:
    """Images, and the number of the bright quadrant to estimate."""

    def split(name: str, num: int, seed: int) -> Split:
        labelled = lab.make_split(name, num, seed)
        return Split(labelled.ids, labelled.inputs, {"number": ArrayColumn(labels_of(labelled).astype(np.float32))})

    image = ImageInfo(shape_CHW=(1, SIDE, SIDE), mean=(0.3,), std=(0.2,))
    info = DatasetInfo("estimates", {"images": image}, Estimation(num_outputs=4))
    return Data(info, {"train": split("train", 200, 1), "val": split("val", 50, 2)}, LoaderOptions(batch_size=16))


def test_a_strangers_task_is_trained(lab: Lab) -> None:
    trained = lab.train(
        lab.make_model(), estimates(lab), epochs=8, lr=0.01, early_stopping={"metric": "val_mae", "patience": 8}
    )
    history = trained.metrics["history"]
    assert trained.metrics["val_mae"] == min(epoch["val_mae"] for epoch in history) < 0.5 * history[0]["val_mae"]
    assert "val_loss" not in trained.metrics


def test_a_strangers_task_is_checked_before_the_first_step(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimation, "figures", lambda *_: {"mean": 1.0})
    with pytest.raises(StageError, match=r"^Estimation\.figures\(\) returned no mae, which is one of its metrics$"):
        lab.train(lab.make_model(), estimates(lab))
    assert lab.events == []


def test_checking_a_task_changes_no_bit_of_the_training(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> dict[str, torch.Tensor]:
        return lab.train(lab.make_model(norm=True, dropout=0.5), estimates(lab), epochs=1).model.tensors

    checked = weights()
    monkeypatch.setattr("ptpipe_train.supervised.check_task", lambda *_: None)
    unchecked = weights()
    assert all(torch.equal(tensor, checked[name]) for name, tensor in unchecked.items())


def test_labels_are_smoothed_only_where_there_are_some(lab: Lab) -> None:
    with pytest.raises(
        StageError, match=r"^label_smoothing is for one class of .* and the task Estimation has none: leave it out$"
    ):
        lab.train(lab.make_model(), estimates(lab), label_smoothing=0.1)
    with pytest.raises(StageError, match=r"no metric 'val_loss' \(there are val_mae\)"):
        lab.train(lab.make_model(), estimates(lab), early_stopping={})
    assert lab.events == []


def test_a_batch_of_one_sample_is_refused_at_the_start_where_batch_norm_needs_more(lab: Lab) -> None:
    model, data = lab.make_model(FunctionRef.to(one_value_norm)), lab.make_data(33)
    with pytest.raises(StageError, match="33 samples in batches of 16 leave one: set drop_last to true, or") as caught:
        lab.train(model, data)
    assert str(caught.value).endswith("a batch_size such as 15 or 17")
    assert lab.events == []
    assert lab.train(model, data, drop_last=True, epochs=2).metrics["num_steps"] == 4
    for batch_size in (15, 17):
        lab.train(model, data, batch_size=batch_size, epochs=1)
    with pytest.raises(StageError, match=r"leave one: choose a batch_size such as 3$"):
        lab.train(model, data, batch_size=1)
    lab.train(lab.make_model(norm=True), data, epochs=1)  # several values per channel: nothing to refuse


def test_without_the_last_batch_an_epoch_takes_whole_ones_of_its_order(lab: Lab) -> None:
    trained = lab.train(lab.make_model(), lab.make_data(40), epochs=2, drop_last=True)
    assert (trained.metrics["num_steps"], trained.metrics["samples_per_step"]) == (4, 16)
    assert [event.total for event in trained.progress] == [64] * len(trained.progress)
    assert trained.progress[-1].done == 64
    with pytest.raises(StageError, match="drop_last leaves no batch: 15 samples don't fill one of 16"):
        lab.train(lab.make_model(), lab.make_data(15), drop_last=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_refuses_a_device_that_is_not_there(lab: Lab) -> None:
    with pytest.raises(StageError, match="no CUDA device"):
        lab.train(lab.make_model(), lab.make_data(), device="cuda")


def test_out_of_memory_names_the_options_to_change(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(SingleProcess, "forward_backward", full)
    with pytest.raises(StageError, match="smaller batch_size and a larger accumulate"):
        lab.train(lab.make_model(), lab.make_data())


@pytest.mark.parametrize(
    ("schedule", "options", "reason"),
    [
        ({"warmup": 500}, {"epochs": 2}, "the warmup is too long for 8 steps"),
        ({"name": "one_cycle"}, {"epochs": 1, "batch_size": 64}, "the schedule one_cycle needs more than 1 step"),
    ],
)
def test_a_learning_rate_that_never_rises_gets_a_notice(
    lab: Lab, schedule: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    (notice,) = lab.train(lab.make_model(), lab.make_data(64), schedule=schedule, **options).notices
    assert notice == f"the learning rate never rises to 0.05: {reason}"


@pytest.mark.parametrize(
    ("parallel", "batch_size", "num_images"),
    [
        (Parallel(), 2, None),
        (Parallel(mode="ddp", workers=4), 32, None),
        (Parallel(mode="ddp", workers=4), 31, 7),
        (Parallel(mode="ddp", workers=4, sync_bn=True), 4, None),
        (Parallel(mode="fsdp", workers=2), 14, 7),
        (Parallel(mode="pp", microbatches=4), 32, None),
        (Parallel(mode="ddp+pp", workers=4, microbatches=4), 32, 4),
    ],
)
def test_batch_norm_of_few_images_is_noticed(
    lab: Lab, parallel: Parallel, batch_size: int, num_images: int | None
) -> None:
    for norm in (True, False):
        warn_of_small_passes(parallel, lab.context(), lab.make_model(norm=norm).build_prepared().train(), batch_size)
    notices = [event.text for event in lab.events if isinstance(event, Notice)]
    assert len(notices) == (num_images is not None)
    assert all(notice.startswith(f"batch norm sees {num_images} images at once") for notice in notices)


class Watching(nn.Identity):
    """As fake quantization does."""

    all_reduce_range = None


def test_dp_over_devices_refuses_fake_quantization(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device would observe the range of its own shard."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = DeviceSettings(torch.device("cuda"))
    with pytest.raises(StageError, match=r"dp can't train fake quantization.*use mode ddp"):
        data_parallel(nn.Sequential(nn.Linear(2, 2), Watching()), chosen, Parallel(mode="dp"), lab.context())
