"""Networks whose initial weights are not drawn, because others take their place: a draw takes longer than loading."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_METHODS = ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_", "random_")
# Of `nn.init`, those that a mode is asked about, in place of the methods that they call.
_FUNCTIONS = (nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_)
_DRAWS = frozenset((*(getattr(torch.Tensor, name) for name in _METHODS), *_FUNCTIONS))


class UndrawnParameters(TorchFunctionMode):
    """Inside the `with`, parameters that would be filled with random numbers are zeroed, or left as they are.

    `zeroed`: False only where all of them are replaced before anything reads them: their memory is never touched.
    """

    def __init__(self, *, zeroed: bool) -> None:
        super().__init__()
        self._zeroed = zeroed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS and isinstance(tensor := args[0] if args else kwargs["tensor"], nn.Parameter):
            if self._zeroed:
                tensor.detach().zero_()
            return tensor
        return func(*args, **kwargs)


def built_undrawn(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that `build` returns, with zeros in place of random parameters where nothing else is random.

    A builder that draws other numbers too, or seeds the generator, is left to draw all: a buffer outside of the state
    dict may follow from them. So is one that can't do with zeros.
    """
    before = torch.random.get_rng_state()
    with UndrawnParameters(zeroed=True), suppress(Exception):  # what it raises without zeros follows
        module = build()
        if torch.equal(torch.random.get_rng_state(), before):
            return module
        del module
    torch.random.set_rng_state(before)
    return build()
