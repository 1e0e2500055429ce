"""When checkpoints are written and restored, what each rank keeps, and shards of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ptpipe import Context
from ptpipe.events import Event, LogLine, Notice
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_train.checkpoint import Checkpoint, read_checkpoint
from ptpipe_train.checkpointer import Checkpointer
from ptpipe_train.config import EarlyStopping, TrainConfig
from ptpipe_train.dtensor import load_local_state_dict, local_state_dict, to_local
from ptpipe_train.optimizer import make_optimizer, optimizer_tensors
from ptpipe_train.progress import Best, TrainingProgress
from ptpipe_train.state import TrainingState

CPU = torch.device("cpu")
METADATA = {"work": "w", "environment": {}}


def make_state(seed: int = 0, steps: int = 3, *, early_stopping: bool = True) -> TrainingState:
    """After some real steps, and an epoch that was the best."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = make_optimizer(TrainConfig(optimizer="adamw"), net.named_parameters(), {})
    for _ in range(steps):
        net(torch.randn(4, 1, 4, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    best = Best(EarlyStopping()) if early_stopping else None
    if best and steps:
        best.update({"val_loss": 0.5 + seed}, net)
    progress = TrainingProgress(epoch=1, step=steps, loss_sum=0.1 * seed, history=[{"epoch": 1, "lr": 0.1}])
    return TrainingState(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), CPU, progress, best)


def make_checkpointer(folder: Path, events: list[Event], work: str = "w", **options: object) -> Checkpointer:
    ctx = Context("t", "train.supervised", 7, folder, _tell=events.append)
    return Checkpointer(ctx, None, work, {"torch": "1"}, **options)  # type: ignore[arg-type]


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert (one.step, one.metadata) == (other.step, other.metadata)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


# What rank 0 has for all


def test_copies_leave_out_what_is_the_same_on_all_ranks() -> None:
    state = make_state()
    whole = state.checkpoint(3, METADATA)
    own = state.without_shared(whole, state_is_replicated=True)
    # Its own are statistics of batch norms, which are averaged at the end of an epoch, and its random numbers.
    assert set(own.tensors) == {
        "model/1.running_mean",
        "model/1.running_var",
        "model/1.num_batches_tracked",
        "rng/cpu",
    }
    assert (own.step, own.metadata) == (whole.step, whole.metadata)
    size, whole_size = (sum(t.nbytes for n, t in c.tensors.items() if n != "rng/cpu") for c in (own, whole))
    assert size < whole_size / 20


def test_shards_leave_out_the_best_weights_alone() -> None:
    state = make_state()
    whole = state.checkpoint(3, METADATA)
    own = state.without_shared(whole, state_is_replicated=False)
    assert {name.partition("/")[0] for name in own.tensors} == {"model", "optimizer", "rng"}
    assert set(whole.tensors) - set(own.tensors) == {f"best/{name}" for name in state.module.state_dict()}


@pytest.mark.parametrize("state_is_replicated", [True, False])
@pytest.mark.parametrize("early_stopping", [True, False])
def test_what_was_left_out_comes_back_from_rank_0(*, state_is_replicated: bool, early_stopping: bool) -> None:
    first = make_state(0, early_stopping=early_stopping).checkpoint(3, METADATA)
    other = make_state(1, early_stopping=early_stopping)
    whole = other.checkpoint(3, METADATA)
    own = other.without_shared(whole, state_is_replicated=state_is_replicated)
    back = other.with_shared(own, first, state_is_replicated=state_is_replicated)
    assert back.tensors.keys() == whole.tensors.keys()
    parameters = {f"model/{name}" for name, _ in other.module.named_parameters()}
    for name, tensor in back.tensors.items():
        is_shared = name.startswith("best/") or (
            state_is_replicated and (name in parameters or name.startswith("optimizer/"))
        )
        assert torch.equal(tensor, (first if is_shared else whole).tensors[name]), name
    assert back.metadata == whole.metadata


@pytest.mark.parametrize("state_is_replicated", [True, False])
def test_of_one_and_the_same_state_nothing_is_lost(*, state_is_replicated: bool) -> None:
    state = make_state()
    whole = state.checkpoint(3, METADATA)
    own = state.without_shared(whole, state_is_replicated=state_is_replicated)
    assert_same(state.with_shared(own, whole, state_is_replicated=state_is_replicated), whole)


def test_shards_of_which_each_rank_has_other_names() -> None:
    """In a pipeline, rank 0 has other layers than rank 1: none of them may appear here."""
    first = Checkpoint(1, {"model/0.weight": torch.ones(1), "optimizer/0/exp_avg": torch.ones(1)}, {})
    own = Checkpoint(1, {"model/4.weight": torch.zeros(1), "rng/cpu": torch.zeros(1)}, {})
    assert_same(make_state().with_shared(own, first, state_is_replicated=False), own)


def test_a_state_goes_back_to_a_checkpoint() -> None:
    state = make_state(0)
    checkpoint = state.checkpoint(3, METADATA)
    assert json.loads(json.dumps(checkpoint.metadata)) == checkpoint.metadata
    want = [torch.rand(3), *(tensor.clone() for tensor in optimizer_tensors(state.optimizer).values())]
    frozen = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    other = make_state(1)
    other.restore(Checkpoint(3, frozen, checkpoint.metadata))
    got = [torch.rand(3), *optimizer_tensors(other.optimizer).values()]
    assert all(torch.equal(one, two) for one, two in zip(want, got, strict=True))
    for name, tensor in other.module.state_dict().items():
        assert torch.equal(tensor, frozen[f"model/{name}"]), name
    assert other.progress == state.progress
    assert other.best is not None
    assert (other.best.value, other.best.epochs_since) == (0.5, 0)


# Writing and going on, as one process


def test_alone_it_goes_on_from_the_newest_of_the_same_work(tmp_path: Path) -> None:
    events: list[Event] = []
    checkpointer = make_checkpointer(tmp_path, events)
    assert checkpointer.folder == tmp_path / "checkpoints"
    assert not checkpointer.restore_newest(make_state())
    for step in (2, 5, 9):
        checkpointer.write(make_state(step), step)
    fresh = make_state(1)
    assert make_checkpointer(tmp_path, events).restore_newest(fresh)
    assert_same(replace_rng(fresh.checkpoint(9, {})), replace_rng(make_state(9).checkpoint(9, {})))
    assert [event for event in events if isinstance(event, LogLine)] == [
        LogLine("t", "training resumes from the checkpoint of step 9", shown=True)
    ]
    assert not make_checkpointer(tmp_path, events, work="other").restore_newest(make_state())
    assert not [event for event in events if isinstance(event, Notice)]


def replace_rng(checkpoint: Checkpoint) -> Checkpoint:
    """Random numbers go on while a state is made: leave them out."""
    return replace(checkpoint, tensors={n: t for n, t in checkpoint.tensors.items() if not n.startswith("rng/")})


def test_alone_it_goes_on_from_the_one_before_where_the_newest_is_damaged(tmp_path: Path) -> None:
    events: list[Event] = []
    checkpointer = make_checkpointer(tmp_path, events)
    checkpointer.write(make_state(2), 2)
    checkpointer.write(make_state(5), 5)
    (checkpointer.folder / "step-000000000005.safetensors").write_bytes(b"torn")
    state = make_state(1)
    assert checkpointer.restore_newest(state)
    assert state.progress == make_state(2).progress
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice.startswith("checkpoint step-000000000005 is damaged (its tensors are not as they were written)")
    assert not list(checkpointer.folder.glob("step-000000000005*"))


def test_another_environment_is_told(tmp_path: Path) -> None:
    events: list[Event] = []
    make_checkpointer(tmp_path, events).write(make_state(), 1)
    checkpointer = make_checkpointer(tmp_path, events)
    checkpointer.environment = {"torch": "2"}
    assert checkpointer.restore_newest(make_state())
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert "torch was 1, is 2" in notice


def test_a_disk_that_takes_no_checkpoint_is_told_once(tmp_path: Path) -> None:
    events: list[Event] = []
    (tmp_path / "checkpoints").write_text("no folder")
    checkpointer = make_checkpointer(tmp_path, events)
    checkpointer.write(make_state(), 1)
    checkpointer.write(make_state(), 2)
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice.startswith("no checkpoint could be written (")


def test_when_it_is_time_for_one(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, [])
    assert not checkpointer.is_due
    checkpointer._written_s -= 15.1
    assert checkpointer.is_due
    checkpointer._cost_s = 1.0  # expensive: not before 100 times as long
    assert not checkpointer.is_due
    checkpointer._written_s -= 85.0
    assert checkpointer.is_due
    checkpointer.every_s = 1e6
    assert not checkpointer.is_due
    checkpointer.write(make_state(), 1)
    checkpointer.every_s = 1e-9
    assert checkpointer.is_due


@pytest.mark.parametrize("state_is_replicated", [True, False])
def test_each_rank_of_several_has_its_folder_and_writes_its_own(tmp_path: Path, *, state_is_replicated: bool) -> None:
    for rank in range(2):
        checkpointer = make_checkpointer(
            tmp_path, [], workers=WorkerGroup(rank, 2), state_is_replicated=state_is_replicated
        )
        checkpointer.write(make_state(rank), 4)
        assert checkpointer.folder == tmp_path / "checkpoints" / f"rank-{rank}"
    first, second = (read_checkpoint(tmp_path / "checkpoints" / f"rank-{rank}", 4) for rank in range(2))
    assert {name.partition("/")[0] for name in first.tensors} == {"model", "optimizer", "best", "rng"}
    assert ("optimizer/0/exp_avg" in second.tensors) is not state_is_replicated
    assert "best/0.weight" not in second.tensors
    assert make_checkpointer(tmp_path, [], workers=SINGLE_WORKER).folder == tmp_path / "checkpoints"


# Shards


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group without a network: a store in memory, and this process."""
    if not dist.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_whole_tensor_is_local() -> None:
    tensor = torch.ones(3)
    assert to_local(tensor) is tensor
    net = nn.Linear(2, 2)
    state = local_state_dict(net)
    assert state["weight"].data_ptr() == net.weight.data_ptr()
    load_local_state_dict(net, {"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    assert net.weight.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(RuntimeError, match="bias"):
        load_local_state_dict(net, {"weight": torch.ones(2, 2)})


@pytest.mark.usefixtures("group_of_one")
def test_a_shard_is_taken_and_put_back() -> None:
    mesh = init_device_mesh("cpu", (1,))
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    for layer in net:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    state = local_state_dict(net)
    assert not any(isinstance(tensor, DTensor) for tensor in state.values())
    assert state["0.weight"].data_ptr() == net[0].weight.to_local().data_ptr(), "the memory is shared"
    want = {name: torch.full_like(tensor, 3) for name, tensor in state.items()}
    load_local_state_dict(net, want)
    assert isinstance(net[0].weight, DTensor)
    for name, tensor in local_state_dict(net).items():
        assert torch.equal(tensor, want[name]), name
