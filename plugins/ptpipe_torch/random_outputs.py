"""Networks whose outputs are random in eval mode too, as `F.dropout(x)` makes them: it drops in both modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ptpipe import StageError
from ptpipe_torch.model.example_inputs import copies, zeros
from ptpipe_torch.model.model import Model
from ptpipe_torch.model.outputs import tensors_of
from ptpipe_torch.python_file import seeded_everywhere
from ptpipe_torch.runtime import cpu_random_states
from ptpipe_torch.source_line import TORCH_FOLDER, running_line

_INTERNAL = (TORCH_FOLDER, __file__)


def random_draws(network: nn.Module, inputs: Sequence[torch.Tensor]) -> str | None:
    """Return where a network in eval mode draws random numbers that change its outputs; None if it does not.

    The network is left as it was, and so are all random streams. May raise anything that the network raises.
    """
    with torch.no_grad():
        with seeded_everywhere(0):
            states = cpu_random_states()
            first = tensors_of(network(*copies(inputs)))
            if cpu_random_states() == states:
                return None
        with seeded_everywhere(1), _Draws() as draws:
            second = tensors_of(network(*copies(inputs)))
    if all(map(_is_same, first, second)):
        return None
    lines = list(draws.lines)
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    where = f" ({lines[0]}{more})" if lines else ""
    return (
        f"this network draws random numbers in eval mode too{where}. Draw them in train mode alone, behind "
        "`if self.training:`; for dropout, `F.dropout(x, training=self.training)`"
    )


def refuse_random_outputs(network: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Raise StageError for a network in eval mode whose outputs are random: nothing can be compared with them."""
    if reason := random_draws(network, inputs):
        raise StageError(reason)


def random_draws_of(model: Model) -> str | None:
    """Return `random_draws` of a model's network, on two samples of ones; None also if it does not run on them."""
    try:
        inputs = zeros(model.signature.inputs, 2)  # dropout changes no zeros
        return random_draws(model.build(), [x + 1 if x.is_floating_point() else x for x in inputs])
    except Exception:  # noqa: BLE001  # a network may raise anything; the stage's own run of it reports that
        return None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the lines whose operators of torch draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.lines: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        returned = func(*args, **(kwargs or {}))
        if state is not None and not torch.equal(torch.get_rng_state(), state):
            self.lines[running_line(_INTERNAL)] = None
        return returned
