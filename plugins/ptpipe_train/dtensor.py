"""State dicts of this rank's shards: what a process holds of DTensors, and whole tensors as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; any other tensor itself."""
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def local_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's state dict, with this rank's shard of each DTensor."""
    return {name: to_local(tensor) for name, tensor in module.state_dict().items()}


def load_local_state_dict(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `local_state_dict`."""
    sharded = {name: tensor for name, tensor in module.state_dict().items() if hasattr(tensor, "to_local")}
    if not sharded:
        module.load_state_dict(state)
        return
    with torch.no_grad():
        for name, tensor in sharded.items():
            to_local(tensor).copy_(state[name])
    module.load_state_dict({name: tensor for name, tensor in state.items() if name not in sharded}, strict=False)
