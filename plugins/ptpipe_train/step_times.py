"""Where the time of a step goes, and how busy the device is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")

PARTS = ("data", "forward", "backward", "forward_backward", "communication", "optimizer")


class Clock(Protocol):
    """Tells how far the work has come."""

    def mark(self) -> Any:
        """Take note of this moment."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Time between two marks; None where the second is still to come."""


class ProcessorClock:
    """For work that is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class CudaClock:
    """For work that a CUDA device does behind the process's back: marks are events in its queue, read when it is there.

    Nothing waits for the device.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None


class StepTimes:
    """Seconds spent in each part of the steps, as this worker's device sees them; those for data as its process does.

    Communication is the time in which nothing else is done: what is sent while gradients are still being computed is
    part of backward. Chunks go forward and backward by turns, waiting for each other: that is one part.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._clock = clock or (CudaClock() if device.type == "cuda" else ProcessorClock())
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._pending = deque[tuple[str, Any, Any]]()
        self._num_steps = 0
        self._gradient_ready: Any = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done inside the `with` as that part."""
        begin = self._clock.mark()
        yield
        self._pending.append((name, begin, self._clock.mark()))

    def waiting_for(self, batches: Iterator[T]) -> Iterator[T]:
        """Pass batches on; the time that each takes is data's."""
        while True:
            begin_s = time.perf_counter()
            batch = next(batches, None)
            self._seconds["data"] += time.perf_counter() - begin_s
            if batch is None:
                return
            yield batch

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of each gradient, so that `backward` knows when the last one was there."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: nn.Parameter) -> None:
        self._gradient_ready = self._clock.mark()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count up to the last gradient as backward, and the rest as communication."""
        begin = self._clock.mark()
        self._gradient_ready = None
        yield
        end = self._clock.mark()
        ready = self._gradient_ready or end
        self._pending += [("backward", begin, ready), ("communication", ready, end)]

    def step_done(self) -> None:
        """Count a step."""
        self._num_steps += 1
        self._read()

    def _read(self) -> None:
        """Add up what is over, oldest first."""
        while self._pending:
            name, begin, end = self._pending[0]
            if (seconds := self._clock.seconds(begin, end)) is None:
                return
            self._seconds[name] += seconds
            self._pending.popleft()

    def means_ms(self) -> list[float]:
        """Milliseconds a step, for each of PARTS, when all steps are over; 0 for what was not measured."""
        self._read()
        return [1000 * seconds / self._num_steps if self._num_steps else 0.0 for seconds in self._seconds.values()]


class Utilization:
    """How busy a device is while steps are done: a share of its time.

    A CUDA device tells itself, where NVIDIA's library is installed (nvidia-ml-py): the share of the last moment in
    which any kernel ran. Of a CPU it is the processor time that this process took, out of what its threads could have
    had; a worker that waits for others awake seems busy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._tells = device, True
        self._seconds = self._busy_s = 0.0
        self._processor_s = time.process_time()

    def restart(self) -> None:
        """What was done until now was no step."""
        self._processor_s = time.process_time()

    def add(self, duration_s: float) -> None:
        """Steps took so long, since the last call of this or of `restart`."""
        busy = self._look(duration_s) if self._tells and duration_s > 0 else None
        if busy is not None:
            self._seconds += duration_s
            self._busy_s += min(1.0, busy) * duration_s

    def mean(self) -> float | None:
        """The share over all steps; None where the device doesn't tell."""
        return self._busy_s / self._seconds if self._seconds else None

    def _look(self, duration_s: float) -> float | None:
        if self._device.type == "cuda":
            try:
                return float(torch.cuda.utilization(self._device)) / 100
            except Exception:  # noqa: BLE001  # no library, no driver, no right: each has errors of its own
                self._tells = False
                return None
        before_s, self._processor_s = self._processor_s, time.process_time()
        num_threads: int = torch.get_num_threads()
        return (self._processor_s - before_s) / duration_s / num_threads
