"""Networks whose initial weights are not drawn, because others take their place: a draw takes longer than loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_METHODS = ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_", "random_")
# Of `nn.init`, those that a mode is asked about, in place of the methods that they call.
_FUNCTIONS = (nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_)
_DRAWS = frozenset((*(getattr(torch.Tensor, name) for name in _METHODS), *_FUNCTIONS))


class _ZerosForDraws(TorchFunctionMode):
    """Inside the `with`, tensors that would be filled with random numbers are zeroed; remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self._zeroed: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWS or kwargs.get("generator") is not None:  # other draws may follow from that generator
            return func(*args, **kwargs)
        tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
        self._zeroed.append(tensor.detach().zero_())
        return tensor

    def are_all_in(self, state: Mapping[str, Any]) -> bool:
        """Return whether all of these tensors are among, or parts of, those of a state dict."""
        stored = {value.untyped_storage().data_ptr() for value in state.values() if isinstance(value, torch.Tensor)}
        return all(tensor.untyped_storage().data_ptr() in stored for tensor in self._zeroed)


def built_undrawn(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that `build` returns, with zeros in its state dict in place of random numbers.

    A builder that draws for more than that, or seeds the generator, draws everything: what is outside of the state may
    follow from it, like the buffer of a fixed random projection. So does one that can't do with zeros.
    """
    before = torch.random.get_rng_state()
    zeros = _ZerosForDraws()
    with suppress(Exception):  # what it raises without zeros follows
        with zeros:
            module = build()
        if torch.equal(torch.random.get_rng_state(), before) and zeros.are_all_in(module.state_dict()):
            return module
        del module
    torch.random.set_rng_state(before)
    del zeros
    return build()
