"""Which samples a worker takes, and batches that are padded up with samples that count nothing.

Shape legend: N samples, K classes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DistributedSampler

from ptpipe_torch import ArrayColumn, Batch, Classification
from ptpipe_torch.data.data import Partners
from ptpipe_torch.data.order import epoch_order
from ptpipe_train.config import Schedule
from ptpipe_train.device import DeviceSettings
from ptpipe_train.loop import Loop
from ptpipe_train.parallel import Objective, ParallelStrategy
from ptpipe_train.parallel.batch_shard import BatchShard, batches_of, padded, padding_batch
from ptpipe_train.progress import TrainingProgress
from ptpipe_train.schedule import LearningRate
from ptpipe_train.state import TrainingState
from ptpipe_train.steps import StepPlan

from ...datasets import labels_of
from .conftest import make_data, make_split


def objective_of(num_samples: int, label_smoothing: float = 0.0) -> Objective:
    return Objective(num_samples, Classification(class_names=tuple("abcde"), label_smoothing=label_smoothing))


def make_batch(num: int, *, channels_last: bool = False, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images_NCHW = torch.randn(num, 3, 4, 4, generator=generator)
    if channels_last:
        images_NCHW = images_NCHW.contiguous(memory_format=torch.channels_last)
    labels_N = torch.randint(0, 5, (num,), generator=generator)
    return Batch({"images": images_NCHW}, {"labels": labels_N}, 100 + torch.arange(num))


def make_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))


@given(num=st.integers(0, 200), batch_size=st.integers(1, 50), workers=st.integers(1, 9), seed=st.integers(0, 5))
def test_shards_are_the_batches(num: int, batch_size: int, workers: int, seed: int) -> None:
    order_N = epoch_order(num, seed, 0)
    shards = [BatchShard(rank, workers) for rank in range(workers)]
    left = [shard.of(order_N, batch_size) for shard in shards]
    for start in range(0, num, batch_size):
        batch_N = order_N[start : start + batch_size]
        # The next samples of each shard: `size` of them, or the rest.
        sizes = [shard.size(len(batch_N)) for shard in shards]
        assert sum(sizes) == len(batch_N)
        assert max(sizes) - min(sizes) <= 1
        parts = [part[:size] for part, size in zip(left, sizes, strict=True)]
        left = [part[size:] for part, size in zip(left, sizes, strict=True)]
        together = np.empty_like(batch_N)
        for rank, part_N in enumerate(parts):
            together[rank::workers] = part_N
        np.testing.assert_array_equal(together, batch_N)
    assert all(len(part) == 0 for part in left)


@given(workers=st.integers(1, 8), per_worker=st.integers(1, 8), epoch=st.integers(0, 3))
def test_one_batch_is_sharded_as_torch_does(workers: int, per_worker: int, epoch: int) -> None:
    num = workers * per_worker
    for rank in range(workers):
        sampler = DistributedSampler(range(num), num_replicas=workers, rank=rank, shuffle=True, seed=3)
        sampler.set_epoch(epoch)
        whole = DistributedSampler(range(num), num_replicas=1, rank=0, shuffle=True, seed=3)
        whole.set_epoch(epoch)
        assert BatchShard(rank, workers).of(np.array(list(whole)), num).tolist() == list(sampler)


def test_one_worker_takes_all_as_it_is() -> None:
    order_N = epoch_order(10, 1, 1)
    assert BatchShard().of(order_N, 3) is order_N
    assert BatchShard().size(7) == 7


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_data_gives_each_worker_its_part_of_each_batch(workers: int) -> None:
    """Divided by the data set's own batches: 37 samples in batches of 10, the last of 7."""
    data, order_N = make_data(37), epoch_order(37, 4, 2)
    parts = []
    for rank in range(workers):
        shard = BatchShard(rank, workers)
        batches = data.batches("train", order_N=shard.of(order_N, 10), batch_size=shard.size(10))
        parts.append([batch.indices_N.tolist() for batch in batches])
    assert all(len(part) == 4 for part in parts)
    for number, start in enumerate(range(0, 37, 10)):
        taken = [index for part in parts for index in part[number]]
        assert sorted(taken) == sorted(order_N[start : start + 10].tolist())


class Unread(ArrayColumn):
    """Images that raise when they are read."""

    def take(self, indices_B: Any) -> Any:
        raise AssertionError("an image was read")


def test_batches_without_inputs_have_the_same_targets() -> None:
    data, order_N = make_data(37), epoch_order(37, 4, 2)
    unread = make_data(train=make_split("train", 37, 1, Unread))
    bare = unread.batches("train", order_N=order_N, batch_size=10, augment_seed=(1, 2), with_inputs=False)
    for own, batch in zip(bare, data.batches("train", order_N=order_N, batch_size=10), strict=True):
        assert torch.equal(own.targets["labels"], batch.targets["labels"])
        assert torch.equal(own.indices_N, batch.indices_N)
        assert not own.inputs
        own, batch = padded(own, 10), padded(batch, 10)
        assert torch.equal(own.targets["labels"], batch.targets["labels"])
        assert torch.equal(own.indices_N, batch.indices_N)


class LabelsAlone(ParallelStrategy):
    """A process that needs no images; it records the labels."""

    needs_inputs = False

    def __init__(self, module: nn.Module, settings: DeviceSettings) -> None:
        super().__init__(module, settings)
        self.labels_N: list[int] = []

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        self.labels_N += batch.targets["labels"].tolist()
        return torch.zeros(())


def test_images_are_not_read_where_they_are_not_needed() -> None:
    train = make_split("train", 37, 1, Unread)
    data, plan = make_data(train=train), StepPlan(1, 37, 10, 1, 4)
    strategy = LabelsAlone(make_net(), DeviceSettings(torch.device("cpu")))
    state = TrainingState(
        strategy.module,
        torch.optim.SGD(strategy.module.parameters()),
        strategy.grad_scaler(),
        strategy.settings.device,
        TrainingProgress(),
        None,
    )
    lr = LearningRate(0.1, Schedule(), plan.num_steps, plan.steps_per_epoch)
    Loop(data, plan, lr, strategy, data.info.task, None).train_epoch(state, lambda num_samples, loss: None)
    assert strategy.labels_N == labels_of(train)[epoch_order(37, 4, 0)].tolist()


@pytest.mark.parametrize("channels_last", [False, True])
@given(num=st.integers(1, 9), more=st.integers(0, 20))
def test_a_padded_batch_repeats_its_last_sample(num: int, more: int, *, channels_last: bool) -> None:
    batch = make_batch(num, channels_last=channels_last)
    labels_N = batch.targets["labels"].clone()
    big = padded(batch, num + more)
    assert len(big.inputs["images"]) == len(big.targets["labels"]) == num + more
    assert len(big) == num and torch.equal(big.indices_N, batch.indices_N)
    assert torch.equal(big.inputs["images"][:num], batch.inputs["images"])
    assert torch.equal(big.targets["labels"][:num], batch.targets["labels"])
    for position in range(num, num + more):
        assert torch.equal(big.inputs["images"][position], batch.inputs["images"][num - 1])
        assert big.targets["labels"][position] == labels_N[num - 1]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert big.inputs["images"].is_contiguous(memory_format=layout)
    assert torch.equal(batch.targets["labels"], labels_N), "the batch itself stays as it was"
    assert padded(batch, num) is batch


def gradients(batch: Batch, objective: Objective) -> tuple[torch.Tensor, list[torch.Tensor]]:
    net = make_net()
    loss = objective(net(batch.inputs["images"]), batch)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_padding_does_not_count(label_smoothing: float, *, channels_last: bool) -> None:
    batch, objective = make_batch(5, channels_last=channels_last), objective_of(5, label_smoothing)
    loss, grads = gradients(batch, objective)
    padded_loss, padded_grads = gradients(padded(batch, 12), objective)
    with torch.no_grad():
        logits_NK = make_net()(batch.inputs["images"])
    by_hand = cross_entropy(logits_NK, batch.targets["labels"], label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(padded_loss, by_hand)
    assert len(grads) == len(padded_grads) == 4
    for grad, padded_grad in zip(grads, padded_grads, strict=True):
        assert grad.abs().max() > 1e-3
        torch.testing.assert_close(padded_grad, grad)


@pytest.mark.parametrize("num", [1, 2, 6])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_padding_batch_has_no_gradient(num: int, label_smoothing: float) -> None:
    batch = padding_batch(make_batch(num))
    assert len(batch) == 0
    assert batch.inputs["images"].shape == (2, 3, 4, 4)  # two: batch norm can't normalize a single value
    assert batch.targets["labels"].shape == (2,)
    loss, grads = gradients(batch, objective_of(7, label_smoothing))
    assert loss.item() == 0.0
    assert len(grads) == 4
    assert all(grad.count_nonzero() == 0 for grad in grads)


def test_a_padding_batch_keeps_the_layout_and_the_original() -> None:
    original = make_batch(3, channels_last=True)
    labels_N = original.targets["labels"].clone()
    assert padding_batch(original).inputs["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(original.targets["labels"], labels_N)


@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_rows_after_the_samples_count_nothing_whatever_they_are(num_samples: int) -> None:
    batch, objective = make_batch(5), objective_of(7, 0.1)
    with torch.no_grad():
        logits_NK = make_net()(batch.inputs["images"])
    labels_N = batch.targets["labels"]
    loss = objective(logits_NK, replace(batch, indices_N=batch.indices_N[:num_samples]))
    summed = cross_entropy(logits_NK[:num_samples], labels_N[:num_samples], reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, summed / 7)
    logits_NK[num_samples:] = 1e4
    changed = {"labels": torch.cat([labels_N[:num_samples], 4 - labels_N[num_samples:]])}
    assert torch.equal(objective(logits_NK, Batch({}, changed, batch.indices_N[:num_samples])), loss)


def make_mixed_batch(num: int) -> Batch:
    others = {"labels": (make_batch(num).targets["labels"] + 1) % 5}
    return replace(make_batch(num), partners=Partners(others, torch.linspace(0, 1, num)))


def test_a_mixed_batch_has_the_loss_of_mixed_targets() -> None:
    batch = make_mixed_batch(5)
    assert batch.partners is not None
    weights_N1 = batch.partners.weights_B[:, None]
    own_NK, other_NK = (one_hot(of["labels"], 5) for of in (batch.targets, batch.partners.targets))
    with torch.no_grad():
        logits_NK = make_net()(batch.inputs["images"])
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits_NK, weights_N1 * own_NK + (1 - weights_N1) * other_NK)
    torch.testing.assert_close(gradients(batch, objective_of(5, 0.1))[0], expected)


def test_partners_are_padded_and_sliced_with_their_samples() -> None:
    batch, objective = make_mixed_batch(5), objective_of(5)
    loss, grads = gradients(batch, objective)
    big = padded(batch, 12)
    parts = [big.rows(start, start + 4) for start in (0, 4, 8)]  # as micro-batches are
    assert [len(part) for part in parts] == [4, 1, 0]
    for whole in ([big], parts):
        losses, grads_of_parts = zip(*(gradients(part, objective) for part in whole), strict=True)
        torch.testing.assert_close(sum(losses), loss)
        for grad, summed in zip(grads, map(sum, zip(*grads_of_parts, strict=True)), strict=True):
            torch.testing.assert_close(summed, grad)
    nothing, nothing_grads = gradients(padding_batch(batch), objective)
    assert nothing == 0 and all(grad.count_nonzero() == 0 for grad in nothing_grads)


def test_several_columns_are_padded_alike() -> None:
    columns = {"a": torch.arange(6).view(3, 2), "b": torch.tensor([True, False, True])}
    batch = Batch(columns, {"c": torch.arange(3.0), "d": torch.arange(12.0).view(3, 2, 2)}, torch.arange(3))
    big = padded(batch, 5)
    for own, found in ((batch.inputs, big.inputs), (batch.targets, big.targets)):
        assert list(own) == list(found)
        for name, tensor in own.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor[[0, 1, 2, 2, 2]])
    nothing = padding_batch(batch)
    assert [len(tensor) for tensor in (*nothing.args, *nothing.targets.values())] == [2] * 4 and len(nothing) == 0


def test_padding_batches_follow_until_all_workers_are_done() -> None:
    batches: list[Any] = [make_batch(4, seed=seed) for seed in range(2)]
    got = list(batches_of(iter(batches), 4, lambda: batches[1]))
    assert got[0] is batches[0]
    assert got[1] is batches[1]
    assert [len(batch) for batch in got] == [4, 4, 0, 0]
    assert torch.equal(got[2].inputs["images"][0], batches[1].inputs["images"][0])


def test_a_worker_may_have_an_empty_shard() -> None:
    (batch,) = batches_of(iter(()), 1, lambda: make_batch(3))
    assert len(batch) == 0 and len(batch.inputs["images"]) == 2


def test_no_more_batches_than_wanted() -> None:
    batches = iter([make_batch(2, seed=seed) for seed in range(3)])
    assert len(list(batches_of(batches, 2, lambda: pytest.fail("none is missing")))) == 2
    assert len(list(batches)) == 1


@given(num=st.integers(1, 60), batch_size=st.integers(1, 20), workers=st.integers(1, 5))
def test_parts_of_the_loss_add_up_to_the_mean(num: int, batch_size: int, workers: int) -> None:
    """Over all workers and batches, as one process has it."""
    logits_NK = torch.randn(num, 5, generator=torch.Generator().manual_seed(num), dtype=torch.float64)
    labels_N = torch.arange(num) % 5
    order_N = epoch_order(num, 0, 0)
    objective = objective_of(num, 0.1)
    parts = [
        objective(logits_NK[part_N], Batch({}, {"labels": labels_N[part_N]}, torch.from_numpy(part_N))).item()
        for rank in range(workers)
        if len(part_N := BatchShard(rank, workers).of(order_N, batch_size))
    ]
    # In float32 inside, and each part is rounded.
    assert math.fsum(parts) == pytest.approx(cross_entropy(logits_NK, labels_N, label_smoothing=0.1).item(), rel=1e-5)
