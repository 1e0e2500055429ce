"""Batches of a data set, loaded in the calling process or in torch's DataLoader workers.

A request holds everything that decides what is read: the positions of the samples and the seed of their augmentation.
Workers return values as they are stored (pixels as bytes, a quarter of the size of floats); the consumer converts and
mixes them.

Shape legend: R samples that are read for a batch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ptpipe import StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.data.data import Batch
from ptpipe_torch.data.raw_form import NORMALIZED, Conversion, InputForm
from ptpipe_torch.runtime import exit_with_parent

if TYPE_CHECKING:
    from ptpipe_torch.data.data import Data
    from ptpipe_torch.data.mixing import Mixing

Values: TypeAlias = Mapping[str, torch.Tensor]
"""A batch as it is stored, by the names of its columns."""

_START_TIMEOUTS_S = (5, 10, 20, 40)
"""How long workers may take to start, by attempt. Tens of milliseconds are usual."""
_START_METHOD = "fork" if sys.platform == "linux" else None
"""Of workers; None: the platform's. From Python 3.14 on, Linux's is forkserver, which imports torch in each worker."""
_IN_USE: set[Any] = set()
"""torch's iterators whose workers run. Were one collected as garbage, with an error's traceback or another cycle, its
queues would be closed before `_end_workers` could use them: 5 s of waiting for each worker."""


class Request(NamedTuple):
    """Everything that decides what is read for a batch."""

    indices_R: npt.NDArray[np.int64]
    """Positions of the batch's samples, then of others that these are mixed with."""
    augment_seed: tuple[int, ...] | None
    num_samples: int
    """Of the batch."""


class Loading:
    """Loads the batches of one data set, and keeps persistent workers from one epoch to the next."""

    def __init__(self, data: Data) -> None:
        self._splits = data.splits
        self._options = data.loader
        self._info = data.info
        self._conversions: dict[InputForm, dict[str, Conversion]] = {}
        self._idle: dict[tuple[str, bool], DataLoader[Any]] = {}

    def batches(
        self,
        split: str,
        requests: Sequence[Request],
        *,
        channels_last: bool,
        device: torch.device | str | None,
        mixing: Mixing | None,
        input_form: InputForm | None,
    ) -> Iterator[Batch]:
        """Yield a batch per request, in order. See `Data.batches`. `input_form`: None reads targets alone."""
        with_inputs = input_form is not None
        conversions = self._conversions_to(input_form or NORMALIZED)
        pin = self._options.pin_memory and device is not None and torch.device(device).type == "cuda"
        if self._options.num_workers and requests and with_inputs:
            source = self._from_workers(split, requests, pin)
        else:
            source = self._in_process(split, requests, with_inputs, pin)
        inputs: Mapping[str, Any] = self._info.inputs if with_inputs else {}
        # Closed explicitly: in Python 3.12 a generator that is closed keeps what it refers to, here the workers.
        with closing(source) as batches:
            for request, values in zip(requests, batches, strict=True):
                if device is not None:
                    values = {name: tensor.to(device, non_blocking=True) for name, tensor in values.items()}
                tensors = {name: conversions[name](tensor, channels_last) for name, tensor in values.items()}
                batch = Batch(
                    {name: tensors[name] for name in inputs},
                    {name: tensors[name] for name in self._info.targets},
                    torch.from_numpy(request.indices_R),
                )
                yield mixing.mix(batch, request.num_samples) if mixing else batch

    def _conversions_to(self, form: InputForm) -> dict[str, Conversion]:
        """Return the conversion of each column; kept, since they keep what they compute."""
        if form not in self._conversions:
            infos = self._info
            conversions = {name: info.conversion(name) for name, info in infos.columns.items()}
            if form != NORMALIZED:
                conversions |= {name: info.raw_form(name, form).conversion for name, info in infos.inputs.items()}
            self._conversions[form] = conversions
        return self._conversions[form]

    def _in_process(self, split: str, requests: Sequence[Request], with_inputs: bool, pin: bool) -> Generator[Values]:
        rows = self._rows(split, with_inputs=with_inputs)
        for request in requests:
            values = rows.make(request)
            yield {name: tensor.pin_memory() for name, tensor in values.items()} if pin else values

    def _rows(self, split: str, *, with_inputs: bool = True) -> BatchRows:
        samples = self._splits[split]
        columns = samples.columns if with_inputs else samples.targets
        return BatchRows(columns, self._info.columns, self._options.augment)

    def _from_workers(self, split: str, requests: Sequence[Request], pin: bool) -> Generator[Values]:
        """Yield a batch per request; start all workers once more if one hangs while it starts.

        In Python 3.11 a forked process may hang before it runs any of our code: it takes a lock of the interpreter that
        another thread of its parent held at the fork, one of torch's that was about to run Python.
        """
        num_done = 0
        for timeout_s in _START_TIMEOUTS_S:
            with closing(self._attempt(split, requests[num_done:], timeout_s, pin)) as batches:
                try:
                    for batch in batches:
                        num_done += 1
                        yield batch
                except _WorkerHangs:
                    continue
            return
        raise StageError(
            f"a data worker did not start within {_START_TIMEOUTS_S[-1]} s, in {len(_START_TIMEOUTS_S)} attempts: the "
            "machine may be out of memory; use fewer num_workers, or 0"
        )

    def _attempt(self, split: str, requests: Sequence[Request], timeout_s: float, pin: bool) -> Generator[Values]:
        start = _Start(timeout_s)
        with _without_workers_warnings(), _tokenizers_forked():
            # Removed while in use: a second iteration at the same time gets its own workers.
            idle = self._idle.pop((split, pin), None)
            loader = idle or self._loader(split, start, pin)
            assert isinstance(loader.sampler, _Requests)
            loader.sampler.requests = requests
            iterator: Any = iter(loader)
        if idle is None:
            start.watch(iterator._workers)
        _IN_USE.add(iterator)
        keep = self._options.persistent_workers
        try:
            for number, _ in enumerate(requests):
                start.wait_for(number)  # the worker that makes this batch
                batch = _next(iterator)
                if isinstance(batch, str):
                    raise StageError(batch)
                yield batch
        except Exception:
            keep = False
            raise
        finally:
            if start.kill_hung() or not keep:
                _end_workers(iterator)
            else:
                self._idle[split, pin] = loader
            _IN_USE.discard(iterator)

    def _loader(self, split: str, start: _Start, pin: bool) -> DataLoader[Any]:
        options = self._options
        return DataLoader(
            self._rows(split),
            batch_size=None,
            sampler=_Requests(),
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
            pin_memory=pin,
            multiprocessing_context=_START_METHOD,
            worker_init_fn=partial(_init_worker, os.getpid(), start.sender),
            generator=torch.Generator(),  # without one, each epoch draws from the global stream
        )


class BatchRows(Dataset[Any]):
    """A map-style dataset from requests to whole batches, augmented, as they are stored."""

    def __init__(
        self, columns: Mapping[str, Column], infos: Mapping[str, ColumnInfo], augmentations: Sequence[str]
    ) -> None:
        self._columns = columns
        self._infos = infos
        self._augmentations = augmentations

    def make(self, request: Request) -> Values:
        """Return the columns' values. Raises StageError, e.g. for an unreadable image file."""
        values = {name: column.take(request.indices_R) for name, column in self._columns.items()}
        if request.augment_seed is not None:
            for name in values:
                values[name] = self._infos[name].augment(
                    values[name], request.indices_R, request.augment_seed, self._augmentations
                )
        return {name: torch.from_numpy(array) for name, array in values.items()}

    def __getitem__(self, request: Request) -> Values | str:
        # Errors as text: the DataLoader would replace an exception's message by a worker's traceback.
        try:
            return self.make(request)
        except StageError as error:
            return str(error)


class _Requests(Sampler[Request]):
    """A sampler that yields the requests of the current epoch."""

    requests: Sequence[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


class _WorkerHangs(Exception):  # noqa: N818  # no error: the workers are started once more
    pass


class _Start:
    """The start of worker processes, each of which reports on a pipe that it runs."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._receiver, self.sender = multiprocessing.Pipe(duplex=False)
        self._missing: dict[int, BaseProcess] = {}

    def watch(self, workers: Sequence[BaseProcess]) -> None:
        """Expect the reports of these workers from now on."""
        self._missing = dict(enumerate(workers))
        self._deadline = time.monotonic() + self._timeout_s

    def wait_for(self, number: int) -> None:
        """Wait for a worker, unless it has ended. Raises _WorkerHangs if it does not report in time."""
        while number in self._missing and (remaining_s := self._deadline - time.monotonic()) > 0:
            ready = wait([self._receiver, *(worker.sentinel for worker in self._missing.values())], remaining_s)
            if self._receiver in ready:
                del self._missing[int(self._receiver.recv_bytes())]
            self._missing = {key: worker for key, worker in self._missing.items() if worker.sentinel not in ready}
        if number in self._missing:
            raise _WorkerHangs

    def kill_hung(self) -> bool:
        """Wait for all workers; kill those that don't report in time: a signal does not reach them. Return if any."""
        for number in list(self._missing):
            try:
                self.wait_for(number)
            except _WorkerHangs:
                with suppress(RuntimeError):  # from torch's signal handler: a worker was killed
                    self._missing[number].kill()
                    self._missing[number].join()
        self._receiver.close()
        self.sender.close()
        return bool(self._missing)


@contextmanager
def _without_workers_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # Python 3.12 warns about fork() with threads. Workers use none of the parent's: torch limits them to one.
        warnings.filterwarnings("ignore", r".*use of fork\(\) may lead to deadlocks.*", DeprecationWarning)
        # torch warns about more workers than CPUs; the manifest sets their number for any machine.
        warnings.filterwarnings("ignore", "This DataLoader will create .* worker processes", UserWarning)
        yield


@contextmanager
def _tokenizers_forked() -> Iterator[None]:
    """Keep the `tokenizers` library from warning in each process that is forked inside the `with`.

    It does where it has used threads before. It takes none in those processes, where they could wait forever.
    """
    name = "TOKENIZERS_PARALLELISM"
    if "tokenizers" not in sys.modules or name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _next(iterator: Iterator[Values | str]) -> Values | str:
    try:
        return next(iterator)
    except (RuntimeError, ConnectionError, EOFError) as error:
        # A dead worker shows as torch's RuntimeError, or as a broken pipe where its batch was about to be read.
        # Exceptions of a plugin's own column in a worker arrive as "Caught ... in DataLoader worker".
        first_line, *_ = [*str(error).splitlines(), ""]
        if first_line.startswith("Caught ") or (
            isinstance(error, RuntimeError) and "DataLoader worker" not in first_line
        ):
            raise
        raise StageError(
            f"a data worker died ({first_line}); if memory ran out, use fewer num_workers, or 0"
        ) from error


def _init_worker(parent_pid: int, start: Connection, worker_id: int) -> None:
    exit_with_parent(parent_pid)  # which may have ended before this process could ask for its parent
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its handler was inherited; the run ends its workers
    start.send_bytes(str(worker_id).encode())
    start.close()
    report = sys.excepthook

    def report_unless_interrupted(
        type_: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # The thread that passes tensors to the parent prints that an interrupted run took no more of them.
        if not isinstance(error, EOFError | ConnectionError | AuthenticationError):
            report(type_, error, trace)

    sys.excepthook = report_unless_interrupted  # a worker's own errors travel to the parent


def _end_workers(iterator: Any) -> None:
    # torch does this when the iterator is collected, but an error's traceback may keep it alive for long.
    with suppress(RuntimeError):  # from torch's signal handler, if a worker was just killed
        iterator._shutdown_workers()
