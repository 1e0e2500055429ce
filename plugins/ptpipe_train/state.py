"""State of a training: everything that changes during it, and therefore everything that its checkpoints hold."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ptpipe_torch.runtime import cpu_random_states
from ptpipe_train.checkpoint import Checkpoint
from ptpipe_train.dtensor import load_local_state_dict, local_state_dict
from ptpipe_train.ema import WeightAverage
from ptpipe_train.optimizer import load_optimizer, optimizer_tensors
from ptpipe_train.progress import Best, TrainingProgress
from ptpipe_train.sparsity import KeptZeros

_MODEL, _OPTIMIZER, _AVERAGE, _KEPT, _BEST, _RNG = "model/", "optimizer/", "average/", "kept/", "best/", "rng/"


@dataclass
class TrainingState:
    """One worker's state of a training between two steps."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    progress: TrainingProgress
    best: Best | None
    average: WeightAverage | None = None
    zeros: KeptZeros = field(default_factory=KeptZeros)

    def checkpoint(self, step: int, metadata: Mapping[str, object]) -> Checkpoint:
        """Return the present state as a checkpoint, with additional JSON metadata."""
        tensors = {
            **_prefixed(_MODEL, local_state_dict(self.module)),
            **_prefixed(_OPTIMIZER, optimizer_tensors(self.optimizer)),
            **_prefixed(_AVERAGE, self.average.tensors if self.average else {}),
            **_prefixed(_KEPT, self.zeros.tensors),
            **_prefixed(_RNG, _random_states(self.device)),
            **_prefixed(_BEST, self.best.tensors if self.best else {}),
        }
        own = {
            "progress": asdict(self.progress),
            "scaler": self.scaler.state_dict(),
            "best": self.best.state() if self.best else None,
            "random": _interpreter_random_states(),
        }
        return Checkpoint(step, tensors, {**metadata, **own})

    def without_shared(self, checkpoint: Checkpoint, *, state_is_replicated: bool) -> Checkpoint:
        """Return what a rank other than 0 must keep: everything that rank 0's checkpoint doesn't have."""
        parameters = {_MODEL + name for name, _ in self.module.named_parameters()}
        tensors = {
            name: tensor
            for name, tensor in checkpoint.tensors.items()
            if not name.startswith(_BEST)
            and not (state_is_replicated and (name in parameters or name.startswith((_OPTIMIZER, _AVERAGE, _KEPT))))
        }
        return Checkpoint(checkpoint.step, tensors, checkpoint.metadata)

    def with_shared(self, own: Checkpoint, first: Checkpoint, *, state_is_replicated: bool) -> Checkpoint:
        """Inverse of `without_shared`. `first`: rank 0's checkpoint of the same step."""
        shared = {
            name: tensor
            for name, tensor in first.tensors.items()
            if name.startswith(_BEST)
            or (state_is_replicated and name.startswith((_MODEL, _OPTIMIZER, _AVERAGE, _KEPT)))
        }
        return Checkpoint(own.step, {**shared, **own.tensors}, own.metadata)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint of the same work, with the random number generators of torch, NumPy and Python."""
        tensors, metadata = checkpoint.tensors, checkpoint.metadata
        load_local_state_dict(self.module, _under(_MODEL, tensors))
        load_optimizer(self.optimizer, _under(_OPTIMIZER, tensors))
        if self.average:
            self.average.load(_under(_AVERAGE, tensors))
        self.zeros.load(_under(_KEPT, tensors))
        if metadata["scaler"]:
            self.scaler.load_state_dict(metadata["scaler"])
        self.progress = TrainingProgress(**metadata["progress"])
        if self.best:
            self.best.load(metadata["best"], _under(_BEST, tensors))
        _restore_random_states(self.device, _under(_RNG, tensors))
        if "random" in metadata:
            _restore_interpreter_random_states(metadata["random"])


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _interpreter_random_states() -> dict[str, object]:
    """Return the states of Python's stream and of NumPy's global one, each as a JSON text."""
    _, python, numpy = cpu_random_states()
    return {"python": json.dumps(python), "numpy": numpy}


def _restore_interpreter_random_states(states: Mapping[str, Any]) -> None:
    version, words, next_gauss = json.loads(states["python"])
    random.setstate((version, tuple(words), next_gauss))
    np.random.set_state(json.loads(states["numpy"]))


def _prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
