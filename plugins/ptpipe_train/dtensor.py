"""State dicts of this rank's shards: what a process holds of DTensors, and whole tensors as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; any other tensor itself."""
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def whole_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a DTensor gathered from all ranks; any other tensor itself. `device`: of the communication."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards are on the CPU, whose tensors nccl can't communicate.
    sharded: Any = tensor.to(device)
    whole: torch.Tensor = sharded.full_tensor()
    return whole


def shard_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, as FSDP divides the parameter: by rows, `torch.chunk`."""
    if not isinstance(parameter, DTensor):
        return whole
    (placement,) = parameter.placements
    assert placement.is_shard(0), placement
    mesh = parameter.device_mesh
    chunks = whole.chunk(mesh.size())
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole[:0]


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
