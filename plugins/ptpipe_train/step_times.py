"""Duration of the parts of a step, and utilization of the device."""

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
    """Source of timestamps."""

    def mark(self) -> Any:
        """Return a timestamp of the work submitted so far."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the time between two marks; None while the device has not reached the second."""


class ProcessorClock:
    """Clock for work that is complete when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class CudaClock:
    """Clock for asynchronous work of a CUDA device: marks are events in its stream, read without synchronizing."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None  # type: ignore[no-untyped-call]  # torch's own


class StepTimes:
    """Seconds spent in each part of the steps, by this worker's device; those for data by its process.

    Communication is exposed communication: what overlaps the computation of gradients counts as backward. A pipeline
    alternates forward and backward passes, and waits for other stages in between: that is one part.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._clock = clock or (CudaClock() if device.type == "cuda" else ProcessorClock())
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._pending = deque[tuple[str, Any, Any]]()
        self._num_steps = 0
        self._gradient_ready: Any = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time inside the `with` to that part."""
        begin = self._clock.mark()
        yield
        self._pending.append((name, begin, self._clock.mark()))

    def waiting_for(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and add the time that each takes to `data`."""
        while True:
            begin_s = time.perf_counter()
            batch = next(batches, None)
            self._seconds["data"] += time.perf_counter() - begin_s
            if batch is None:
                return
            yield batch

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Register hooks that record when each gradient is accumulated, for `backward`."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._record)  # type: ignore[no-untyped-call]  # torch's own

    def _record(self, parameter: nn.Parameter) -> None:
        self._gradient_ready = self._clock.mark()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Add the time up to the last gradient to `backward`, and the rest to `communication`."""
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
        """Add up the parts that the device has completed, oldest first."""
        while self._pending:
            name, begin, end = self._pending[0]
            if (seconds := self._clock.seconds(begin, end)) is None:
                return
            self._seconds[name] += seconds
            self._pending.popleft()

    def means_ms(self) -> list[float]:
        """Return the mean milliseconds per step of each of PARTS; 0 for parts that were not measured."""
        self._read()
        return [1000 * seconds / self._num_steps if self._num_steps else 0.0 for seconds in self._seconds.values()]


class Utilization:
    """Utilization of a device during steps, as a fraction of the time.

    Of a CUDA device it is NVML's figure (nvidia-ml-py must be installed): the fraction of the last sampling period in
    which any kernel ran. Of a CPU it is this process's CPU time divided by the wall-clock time of its threads; a worker
    that busy-waits for others counts as busy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_available = device, True
        self._seconds = self._busy_s = 0.0
        self._processor_s = time.process_time()

    def restart(self) -> None:
        """Exclude the work since the last call."""
        self._processor_s = time.process_time()

    def add(self, duration_s: float) -> None:
        """Add steps that took `duration_s` since the last call of this or of `restart`."""
        busy = self._sample(duration_s) if self._is_available and duration_s > 0 else None
        if busy is not None:
            self._seconds += duration_s
            self._busy_s += min(1.0, busy) * duration_s

    def mean(self) -> float | None:
        """Return the utilization over all steps; None where it is not available."""
        return self._busy_s / self._seconds if self._seconds else None

    def _sample(self, duration_s: float) -> float | None:
        if self._device.type == "cuda":
            try:
                return float(torch.cuda.utilization(self._device)) / 100
            except Exception:  # noqa: BLE001  # no library, no driver, no permission: each raises errors of its own
                self._is_available = False
                return None
        before_s, self._processor_s = self._processor_s, time.process_time()
        return (self._processor_s - before_s) / duration_s / torch.get_num_threads()
