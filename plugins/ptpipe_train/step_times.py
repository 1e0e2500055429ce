"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")

PARTS = ("data", "forward", "backward", "forward_backward", "communication", "optimizer")


class StepTimes:
    """Seconds spent in each part of the steps, as this process sees them.

    Communication is the time in which nothing else is done: what is sent while gradients are still being computed is
    part of backward. Chunks go forward and backward by turns, waiting for each other: that is one part. On a CUDA
    device, which works behind the process's back, nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = device.type == "cpu"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_steps = 0
        self._gradient_ready_s = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done inside the `with` as that part."""
        begin_s = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin_s

    def waiting_for(self, batches: Iterator[T]) -> Iterator[T]:
        """Pass batches on; the time that each takes is data's."""
        while True:
            with self.part("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of each gradient, so that `backward` knows when the last one was there."""
        if self.is_on:
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: nn.Parameter) -> None:
        self._gradient_ready_s = time.perf_counter()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count up to the last gradient as backward, and the rest as communication."""
        begin_s = self._gradient_ready_s = time.perf_counter()
        yield
        end_s = time.perf_counter()
        ready_s = self._gradient_ready_s if self._gradient_ready_s > begin_s else end_s
        self._seconds["backward"] += ready_s - begin_s
        self._seconds["communication"] += end_s - ready_s

    def step_done(self) -> None:
        """Count a step."""
        self._num_steps += 1

    def means_ms(self) -> list[float]:
        """Milliseconds a step, for each of PARTS; 0 for what was not measured."""
        measured = self._num_steps if self.is_on else 0
        return [1000 * seconds / measured if measured else 0.0 for seconds in self._seconds.values()]
