"""Forward and backward passes as CUDA graphs: captured once, then replayed by a single call.

Python submits a small network's kernels more slowly than a fast device runs them. A replay submits all of them at once;
they are the same kernels on the same memory, so its result has the same bits.

What is captured never runs Python again. So passes are captured only where two of them, run as they are, showed that
nothing in the network depends on that: no operator that waits for the device (a branch on values), no random number
drawn on the CPU (a layer that is dropped by chance), and no attribute of a layer that changes from pass to pass. A
captured graph is used while the attributes of all layers and the memory of all parameters and buffers are what they
were: a batch norm that freezes later makes it a new one.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import Batch
from ptpipe_torch.errors import first_line
from ptpipe_torch.runtime import cpu_random_states

Passes: TypeAlias = Callable[[Batch], torch.Tensor]
"""Accumulates a batch's gradients, and returns the detached loss."""

PASSES_TO_CAPTURE = 3
"""How many passes it takes: two are run as they are, the third is captured."""

_SYNCHRONIZES = "called a synchronizing"
"""In the warning of torch's sync debug mode."""
_COMPARABLE = (bool, int, float, str, type(None), torch.Tensor)


@dataclass(frozen=True)
class _CapturedPasses:
    """A graph, and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: torch.Tensor
    gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]
    form: Hashable
    """Of its batches."""

    def replay(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Run the passes on a batch. `last`: whether an optimizer's step is next."""
        torch._foreach_copy_(self.batch.tensors, batch.tensors)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            else:  # the next replay writes to the graph's own memory again
                parameter.grad = gradient if last else gradient.clone()
        return self.loss.clone()


class CudaGraphs:
    """Runs the passes of a training, as a CUDA graph where its network allows that."""

    def __init__(self, module: nn.Module, log: Callable[[str], None]) -> None:
        """`module`: the network, on its CUDA device."""
        self._module, self._log = module, log
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._network: NetworkState | None = None
        self._state: Hashable = None
        """Of the network, in the passes that were observed."""
        self._forms: set[Hashable] = set()
        """Of the batches since then."""
        self._captured: _CapturedPasses | None = None
        self._is_possible = True
        self.num_replays = 0
        """How many passes were replayed."""

    def run(self, passes: Passes, batch: Batch, num_samples: int, *, last: bool) -> torch.Tensor:
        """Run the passes on a batch. `num_samples`: of the optimizer's step; `last`: whether it is the step's last."""
        if not self._is_possible:
            return passes(batch)
        if self._network is None:  # the first passes initialize libraries, which may wait for the device
            loss = passes(batch)
            self._network = NetworkState(self._module)
            return loss
        form = (num_samples, len(batch), *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in batch.tensors))
        if self._network.current() != self._state:
            self._captured = None
            self._forms = {form}
            return self._observe(passes, batch, self._network)
        if self._captured is None and form in self._forms:
            self._captured = self._capture(passes, batch, form)
        self._forms.add(form)
        if self._captured is None or self._captured.form != form:
            return passes(batch)
        self.num_replays += 1
        return self._captured.replay(batch, last=last)

    def _observe(self, passes: Passes, batch: Batch, network: NetworkState) -> torch.Tensor:
        """Run the passes as they are, and find out whether they can be captured."""
        self._state, random_states = network.current(), cpu_random_states()
        with _synchronizations() as found:
            loss = passes(batch)
        if found:
            self._refuse("an operator of the network or of its loss waits for the device")
        elif cpu_random_states() != random_states:
            self._refuse("the network draws random numbers on the CPU")
        elif changed := network.changed_since(self._state):
            self._refuse(f"each forward pass changes {changed}")
        return loss

    def _refuse(self, reason: str) -> None:
        self._is_possible = False
        self._log(f"no CUDA graph: {reason}")

    def _capture(self, passes: Passes, batch: Batch, form: Hashable) -> _CapturedPasses | None:
        static, sums = batch.clone(), [parameter.grad for parameter in self._parameters]
        graph = torch.cuda.CUDAGraph()
        for parameter in self._parameters:
            parameter.grad = None  # so that the graph has its own
        try:
            # Other threads, such as the one that pins memory, may call CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = passes(static)
            gradients = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        except torch.OutOfMemoryError:
            self._refuse("it needs memory of its own, and the device's is full")
            return None
        except RuntimeError as error:
            reason = f"the network's passes can't be captured as a CUDA graph ({first_line(error)})"
            raise StageError(f"{reason}: set cuda_graphs to false") from error
        finally:
            for parameter, sum_ in zip(self._parameters, sums, strict=True):
                parameter.grad = sum_
        return _CapturedPasses(graph, static, loss, gradients, form)


class NetworkState:
    """What a captured graph has of a network beside the values of its tensors, and a later pass might do differently.

    Those are the attributes of all layers that are numbers, strings or None (`training`, a probability, a counter), and
    where parameters, buffers and other tensors lie.
    """

    def __init__(self, module: nn.Module) -> None:
        """To be made after a forward pass, which may add attributes."""
        self._attributes = [
            (f"{path}.{name}".lstrip("."), attributes, name)
            for path, layer in module.named_modules()
            for attributes in (vars(layer), layer._parameters, layer._buffers)
            for name, value in attributes.items()
            if isinstance(value, _COMPARABLE)
        ]

    def current(self) -> tuple[Hashable, ...]:
        """Return the present state."""
        values = (attributes.get(name) for _, attributes, name in self._attributes)
        return tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)

    def changed_since(self, state: tuple[Hashable, ...]) -> str | None:
        """Return the name of an attribute that is another one than in `state`, None if all are the same."""
        pairs = zip(self._attributes, state, self.current(), strict=True)
        return next((path for (path, _, _), before, now in pairs if before != now), None)


@contextmanager
def _synchronizations() -> Iterator[list[str]]:
    """Yield a list that has an entry for each operator that waited for the device inside the `with`, at its end."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if _SYNCHRONIZES in str(warning.message):
            found.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
