"""Sharded parameters: FSDP2, `torch.distributed.fsdp.fully_shard`. The only file that uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from ptpipe import StageError
from ptpipe_torch import Batch
from ptpipe_train.config_parallel import Parallel
from ptpipe_train.evaluation import buffers_restored, state_restored
from ptpipe_train.losses import backward
from ptpipe_train.parallel.batch_shard import BatchShard
from ptpipe_train.parallel.buffers import BufferSync, RangeSync, find_written
from ptpipe_train.parallel.gradients import clip_together
from ptpipe_train.parallel.strategy import Objective, ParallelStrategy, TrainingInputs

_NUM_TRIAL_SAMPLES = 2


class FSDPStrategy(ParallelStrategy):
    """Each process holds a shard of every parameter, its gradient and its optimizer state.

    Layers chosen by `wrap` or `wrap_min_parameters` are gathered when they are used and freed again; the rest is
    gathered as one unit. The whole network exists only to be evaluated and delivered.
    """

    state_is_replicated = False

    def __init__(self, inputs: TrainingInputs) -> None:
        settings, options, workers = inputs.settings, inputs.options, inputs.workers
        refuse_scalars(inputs.module)
        super().__init__(settings.place(inputs.model.build_prepared().train()), settings)
        # Shards are rows of the first dimension: weights stay contiguous, and the inputs alone set the memory format.
        self.trained = module = inputs.module.to(settings.device)
        self.workers, self.batch_shard = workers, BatchShard(workers.rank, workers.size)
        written = find_written(inputs)
        mesh = init_device_mesh(settings.device.type, (workers.size,))
        offload = (
            CPUOffloadPolicy(pin_memory=settings.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
        )
        for layer in (*layers_to_wrap(module, options, inputs.first_inputs(_NUM_TRIAL_SAMPLES)), module):
            fully_shard(
                layer,
                mesh=mesh,
                reshard_after_forward=options.reshard_after_forward is not False,
                offload_policy=offload,
            )
        self._ranges, self._buffers = RangeSync(module, workers), BufferSync(module, written=written)

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        self._ranges.takes_part = counts = len(batch) > 0
        assert isinstance(self.trained, FSDPModule)
        self.trained.set_requires_gradient_sync(last)
        # Restored after the backward pass only: autograd refuses tensors that were modified since the forward pass.
        with buffers_restored(self.trained, only_if=not counts):
            with self.times.part("forward"):
                with self.settings.autocast():
                    returned = self.trained(*batch.args)
                loss = objective(returned, batch)
            with self.times.part("backward"):
                # FSDP averages over ranks, but contributions to the mean must be summed.
                backward(scaler.scale(loss * self.workers.size))
        self._buffers.pass_done()
        return loss.detach()

    def grad_scaler(self) -> torch.amp.GradScaler:
        # Each rank holds other gradients: an overflow on one of them must skip the step on all.
        return ShardedGradScaler(
            self.settings.device.type, enabled=self.settings.precision == "fp16", process_group=dist.group.WORLD
        )

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        clip_together(parameters, max_norm)

    def consolidate(self) -> None:
        self._buffers.synchronize()
        # Offloaded shards are copied to the device first: nccl can't communicate CPU tensors.
        state = {name: tensor.to(self.settings.device) for name, tensor in self.trained.state_dict().items()}
        self.module.load_state_dict(
            {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
        )


def refuse_scalars(module: nn.Module) -> None:
    """Raise StageError for a parameter that is a scalar: shards are rows, and it has none."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise StageError(
                f"fsdp shards parameters along their first axis, and {name} is a scalar: give it the shape (1,), or "
                "use mode ddp"
            )


def layers_to_wrap(module: nn.Module, options: Parallel, inputs: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Return the layers to shard one by one, inner ones first, as `fully_shard` requires.

    `inputs` are used to find which layers' forward is called. Raise StageError for a type in `wrap` that the
    network doesn't have or that can't be wrapped.
    """
    if not options.wrap and options.wrap_min_parameters is None:
        return []
    layers = [layer for name, layer in module.named_modules() if name]
    called = _called(module, inputs)
    wrappable = [layer for layer in layers if layer in called and not _shares_parameters(module, layer)]
    for name in options.wrap or ():
        if name not in {type(layer).__name__ for layer in layers}:
            types = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise StageError(f"wrap: the network has no layer of type {name} (it has: {types})")
        if name not in {type(layer).__name__ for layer in wrappable}:
            raise StageError(
                f"wrap: no {name} of the network can be gathered separately: its forward is never called, or it shares "
                "parameters with other layers"
            )
    return [layer for layer in reversed(wrappable) if _is_chosen(layer, options)]


def _called(module: nn.Module, inputs: Sequence[torch.Tensor]) -> set[nn.Module]:
    """Return the layers whose forward is called: not containers, nor layers whose weights another layer uses."""
    called = set[nn.Module]()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: called.add(layer)) for layer in module.modules()]
    with state_restored(module), torch.no_grad():
        module(*inputs)
    for hook in hooks:
        hook.remove()
    return called


def _shares_parameters(module: nn.Module, layer: nn.Module) -> bool:
    """Return whether a layer outside this one uses some of its parameters too."""
    inside = set(layer.modules())
    own = {id(parameter) for parameter in layer.parameters()}
    others = (parameter for other in module.modules() if other not in inside for parameter in other.parameters(False))
    return any(id(parameter) in own for parameter in others)


def _is_chosen(layer: nn.Module, options: Parallel) -> bool:
    num = sum(parameter.numel() for parameter in layer.parameters())
    is_large = options.wrap_min_parameters is not None and num >= options.wrap_min_parameters
    return num > 0 and (is_large or type(layer).__name__ in (options.wrap or ()))
