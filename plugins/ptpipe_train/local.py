"""The part of a tensor that this process holds: all of it, or its shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Take what this process holds of it, sharing its memory."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def local_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state dict, of each tensor this process's part."""
    return {name: local(tensor) for name, tensor in module.state_dict().items()}


def load_local_state(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `local_state`."""
    sharded = {name: tensor for name, tensor in module.state_dict().items() if hasattr(tensor, "to_local")}
    if not sharded:
        module.load_state_dict(state)
        return
    with torch.no_grad():
        for name, tensor in sharded.items():
            local(tensor).copy_(state[name])
    module.load_state_dict({name: tensor for name, tensor in state.items() if name not in sharded}, strict=False)
