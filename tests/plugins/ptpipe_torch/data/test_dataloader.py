"""Batches from worker processes: the same bits, no process left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ptpipe import StageError, host
from ptpipe_torch import ArrayColumn, Column, Data, ImageFileColumn, LoaderOptions, epoch_order
from ptpipe_torch.data import dataloader

from ....datasets import image_info, image_split, labels_of
from ....processes import is_running

NUM = 40
AUGMENT = ("crop", "flip", "rotate", "erase")


def array_data(**options: object) -> Data:
    pixels = np.random.default_rng(0).integers(0, 256, (NUM, 8, 8, 3), dtype=np.uint8)
    split = image_split(np.array([f"x/{i:02d}" for i in range(NUM)]), np.arange(NUM) % 2, ArrayColumn(pixels))
    info = image_info("x", ("a", "b"), (3, 8, 8), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    return Data(info, {"train": split}, LoaderOptions(**{"batch_size": 6, "augment": AUGMENT, **options}))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(NUM):
        Image.fromarray(rng.integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(folder / f"{number:02d}.png")
    return folder


def file_data(folder: Path, **options: object) -> Data:
    names = np.array([f"{number:02d}.png".encode() for number in range(NUM)])
    return with_images(array_data(**options), ImageFileColumn(folder, names, 8, 8, 3))


def with_images(data: Data, images: Column) -> Data:
    split = data.splits["train"]
    return Data(data.info, {"train": image_split(split.ids, labels_of(split), images)}, data.loader)


def epoch(data: Data, number: int = 0) -> list[tuple[torch.Tensor, ...]]:
    batches = data.batches("train", order_N=epoch_order(NUM, 7, number), augment_seed=(7, number))
    return [(batch.inputs["images"], batch.targets["labels"], batch.indices_N) for batch in batches]


def same(one: list[tuple[torch.Tensor, ...]], other: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(one) == len(other) and all(
        a.equal(b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True)
    )


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_no_bit(pictures: Path, persistent: bool) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}
    for make in (array_data, lambda **options: file_data(pictures, **options)):
        single, parallel = make(), make(**options)
        for number in range(3):
            assert same(epoch(single, number), epoch(parallel, number))
        del parallel


def test_number_of_workers_and_prefetching_change_no_bit() -> None:
    assert same(
        epoch(array_data(num_workers=1, prefetch_factor=1)), epoch(array_data(num_workers=3, prefetch_factor=4))
    )


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_workers_are_forked_whatever_the_default_is(request: pytest.FixtureRequest) -> None:
    """Python 3.14's is forkserver."""
    default = multiprocessing.get_start_method()
    request.addfinalizer(lambda: multiprocessing.set_start_method(default, force=True))
    multiprocessing.set_start_method("forkserver", force=True)
    assert same(epoch(array_data(num_workers=2)), epoch(array_data()))


def test_workers_use_no_global_randomness() -> None:
    """Or dropout would differ with the number of workers."""
    state = torch.get_rng_state()
    epoch(array_data(num_workers=1))
    assert torch.get_rng_state().equal(state)


def test_workers_end_with_the_iteration() -> None:
    data = array_data(num_workers=2)
    epoch(data)
    assert multiprocessing.active_children() == []
    batches = data.batches("train")
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []


def test_workers_end_at_once_with_an_iteration_that_is_garbage() -> None:
    """As where a stage failed: the traceback of its error is part of a cycle."""
    cycle: list[object] = [array_data(num_workers=2).batches("train")]
    cycle.append(cycle)
    next(cycle[0])  # type: ignore[call-overload]
    assert len(multiprocessing.active_children()) == 2
    del cycle
    start = time.monotonic()
    gc.collect()
    assert not multiprocessing.active_children()
    assert time.monotonic() - start < 4  # torch waits 5 s for a worker that does not hear that it shall end


def test_persistent_workers_stay_until_the_data_is_gone() -> None:
    data = array_data(num_workers=2, persistent_workers=True)
    first = epoch(data)
    pids = {process.pid for process in multiprocessing.active_children()}
    assert len(pids) == 2
    abandoned = data.batches("train", order_N=epoch_order(NUM, 7, 5))
    next(abandoned)
    abandoned.close()
    assert same(epoch(data), first)
    assert {process.pid for process in multiprocessing.active_children()} == pids
    del data, abandoned
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_two_iterations_at_once(persistent: bool) -> None:
    data = array_data(num_workers=1, persistent_workers=persistent)
    expected = epoch(array_data())
    pairs = zip(
        data.batches("train", order_N=epoch_order(NUM, 7, 0), augment_seed=(7, 0)),
        data.batches("train", order_N=epoch_order(NUM, 7, 0), augment_seed=(7, 0)),
        strict=True,
    )
    for (one, other), (images_NCHW, _, _) in zip(pairs, expected, strict=True):
        assert one.inputs["images"].equal(other.inputs["images"]) and one.inputs["images"].equal(images_NCHW)


def test_no_warnings(pictures: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(file_data(pictures, num_workers=2))
        epoch(array_data(num_workers=host.num_threads() + 1))


def test_streaming_keeps_memory_bounded(pictures: Path) -> None:
    """A worker decodes what was asked for and no more."""
    data = file_data(pictures, num_workers=1, prefetch_factor=1)
    batches = data.batches("train")
    next(batches)
    for path in sorted(pictures.iterdir())[24:]:
        path.rename(path.with_suffix(".gone"))
    try:
        with pytest.raises(StageError, match=re.escape(f"{pictures / '24.png'} is gone")):
            list(batches)
    finally:
        for path in pictures.glob("*.gone"):
            path.rename(path.with_suffix(".png"))


# torch's signal handler may raise while torch opens a temporary file to count file descriptors.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_killed_worker_is_a_clear_end() -> None:
    class Slow(Column):
        def __len__(self) -> int:
            return NUM

        def take(self, indices_B: np.ndarray) -> np.ndarray:
            if indices_B[0] >= 12:
                time.sleep(30)
            return np.zeros((len(indices_B), 8, 8, 3), dtype=np.uint8)

    data = with_images(array_data(num_workers=1, augment=()), Slow())
    batches = data.batches("train")
    next(batches)
    (worker,) = multiprocessing.active_children()
    assert worker.pid
    with pytest.raises((StageError, RuntimeError), match=r"worker.*(killed|died|exited)"):
        os.kill(worker.pid, signal.SIGKILL)  # torch's signal handler may speak at any moment from here on
        list(batches)


def test_what_a_plugins_column_raises_comes_through() -> None:
    class Broken(Column):
        def __len__(self) -> int:
            return NUM

        def take(self, indices_B: np.ndarray) -> np.ndarray:
            raise RuntimeError("the plugin's own mistake")

    data = with_images(array_data(num_workers=1, augment=()), Broken())
    with pytest.raises(RuntimeError, match="the plugin's own mistake"):
        list(data.batches("train"))


@pytest.mark.parametrize(("set_before", "seen"), [(None, "false"), ("true", "true")])
def test_workers_know_that_the_tokenizers_library_takes_no_threads_in_them(
    set_before: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Telling(Column):
        def __len__(self) -> int:
            return NUM

        def take(self, indices_B: np.ndarray) -> np.ndarray:
            raise StageError(str(os.environ.get("TOKENIZERS_PARALLELISM")))

    monkeypatch.setitem(sys.modules, "tokenizers", sys.modules[__name__])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    if set_before is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    data = with_images(array_data(num_workers=1, augment=()), Telling())
    with pytest.raises(StageError, match=f"^{seen}$"):
        list(data.batches("train"))
    assert os.environ.get("TOKENIZERS_PARALLELISM") == set_before


def test_killed_run_takes_its_workers_along(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import multiprocessing, time, numpy as np\n"
        "from ptpipe_torch import *\n"
        "images, labels = (ArrayColumn(array) for array in (np.zeros((2, 4, 4, 1), np.uint8), np.zeros(2, np.int64)))\n"
        "split = Split(np.array(['a', 'b']), {'images': images}, {'labels': labels})\n"
        "loader = LoaderOptions(batch_size=1, num_workers=2, persistent_workers=True)\n"
        "image = ImageInfo(shape_CHW=(1, 4, 4), mean=(0.5,), std=(0.5,))\n"
        "info = DatasetInfo('x', {'images': image}, Classification(class_names=('a',)))\n"
        "data = Data(info, {'train': split}, loader)\n"
        "list(data.batches('train'))\n"
        "print(*[process.pid for process in multiprocessing.active_children()], flush=True)\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    pids = [int(pid) for pid in run.stdout.readline().split()]
    run.kill()
    run.wait()
    run.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 4
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]


class Forks:
    """Counts forks; those whose number is in `hanging` never run a line of their program, nor a signal handler."""

    num, hanging = 0, frozenset[int]()

    @classmethod
    def count(cls) -> None:
        cls.num += 1

    @classmethod
    def hang(cls) -> None:
        if cls.num in cls.hanging:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(100)
            os._exit(1)


os.register_at_fork(before=Forks.count, after_in_child=Forks.hang)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the forks of these numbers hang."""
    monkeypatch.setattr(dataloader, "_START_TIMEOUTS_S", (0.5, 1, 30))

    def hang(*numbers: int) -> None:
        monkeypatch.setattr(Forks, "num", 0)
        monkeypatch.setattr(Forks, "hanging", frozenset(numbers))

    return hang


@pytest.mark.sampled(3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2), (2, 3)])
def test_workers_that_hang_in_fork_are_replaced(numbers, persistent: bool, hang) -> None:
    data, single = array_data(num_workers=2, persistent_workers=persistent), array_data()
    hang(*numbers)
    for number in range(2):
        assert same(epoch(data, number), epoch(single, number))
    assert len(multiprocessing.active_children()) == 2 * persistent


@pytest.mark.timeout(60)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_hanging_worker_that_makes_no_batch_is_not_left_behind(persistent: bool, hang) -> None:
    data = array_data(num_workers=2, persistent_workers=persistent, batch_size=NUM)
    hang(2)
    assert len(epoch(data)) == 1
    assert multiprocessing.active_children() == []
    assert len(epoch(data)) == 1


@pytest.mark.timeout(60)
def test_workers_that_never_start(hang, monkeypatch: pytest.MonkeyPatch) -> None:
    hang(*range(10))
    monkeypatch.setattr(dataloader, "_START_TIMEOUTS_S", (0.1, 0.2))
    with pytest.raises(StageError, match=r"did not start within 0.2 s, in 2 attempts.* use fewer num_workers, or 0"):
        epoch(array_data(num_workers=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_on_a_gpu(channels_last: bool, num_workers: int, pin_memory: bool) -> None:
    data, here = array_data(num_workers=num_workers, pin_memory=pin_memory), array_data()
    arguments = {"augment_seed": (1, 1), "channels_last": channels_last}
    for one, other in zip(
        data.batches("train", device="cuda", **arguments), here.batches("train", **arguments), strict=True
    ):
        assert one.inputs["images"].device.type == one.targets["labels"].device.type == "cuda"
        assert one.inputs["images"].stride() == other.inputs["images"].stride()
        torch.testing.assert_close(one.inputs["images"].cpu(), other.inputs["images"], rtol=1e-6, atol=1e-6)
        assert one.targets["labels"].cpu().equal(other.targets["labels"])


def test_a_worker_is_silent_about_an_interrupted_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[BaseException] = []
    monkeypatch.setattr(dataloader, "exit_with_parent", lambda pid: None)
    monkeypatch.setattr(sys, "excepthook", lambda type_, error, trace: reported.append(error))
    ignored: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda *setting: ignored.append(setting))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    dataloader._init_worker(1, sender, 3)
    assert ignored == [(signal.SIGHUP, signal.SIG_IGN)], "of the run's handlers, the one that torch leaves"
    assert receiver.recv_bytes() == b"3"
    receiver.close()
    errors = [EOFError(), ConnectionResetError(), AuthenticationError(), ValueError("a fault")]
    for error in errors:
        sys.excepthook(type(error), error, None)
    assert reported == errors[-1:]
