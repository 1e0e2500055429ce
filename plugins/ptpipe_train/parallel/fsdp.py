"""Parameters in shards: FSDP2, `torch.distributed.fsdp.fully_shard`. The one file that knows it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ptpipe import StageError
from ptpipe_torch import Batch
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_train.evaluation import buffers_kept, left_as_it_was
from ptpipe_train.parallel.buffers import RangeUnion, SharedBuffers
from ptpipe_train.parallel.gradients import clip_together
from ptpipe_train.parallel.scaler import GroupScaler
from ptpipe_train.parallel.share import Share, is_idle
from ptpipe_train.parallel.way import Objective, Way
from ptpipe_train.parallel_options import Parallel
from ptpipe_train.settings import Settings


class Shards(Way):
    """Each process holds a shard of every parameter, its gradient and the optimizer's state of it.

    Layers that `wrap` or `wrap_min_parameters` choose are gathered when they are used and freed again; the rest is
    gathered as one. The whole network is there only to be measured and delivered.
    """

    state_is_shared = False

    def __init__(
        self,
        module: nn.Module,
        whole: nn.Module,
        settings: Settings,
        options: Parallel,
        workers: WorkerGroup,
        images_NCHW: torch.Tensor,
    ) -> None:
        """`module` is cut into shards; `whole`, the same network, takes the result. `images_NCHW`: to try it with."""
        super().__init__(whole, settings)
        # Shards are rows: weights stay contiguous, and images alone decide the layout of convolutions.
        self.trained = module = module.to(settings.device)
        self.workers, self.share = workers, Share(workers.rank, workers.size)
        mesh = init_device_mesh(settings.device.type, (workers.size,))
        offload = (
            CPUOffloadPolicy(pin_memory=settings.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
        )
        for layer in (*layers_to_wrap(module, options, images_NCHW), module):
            fully_shard(
                layer,
                mesh=mesh,
                reshard_after_forward=options.reshard_after_forward is not False,
                offload_policy=offload,
            )
        self._ranges, self._buffers = RangeUnion(module, workers), SharedBuffers(module)

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        self._ranges.takes_part = counts = not is_idle(batch)
        self.trained.set_requires_gradient_sync(last)
        # To the end of the backward pass, which looks whether what it needs was changed.
        with buffers_kept(self.trained, only_if=not counts):
            with self.times.part("forward"):
                with self.settings.autocast():
                    logits_NK = self.trained(batch.images_NCHW)
                loss = objective(logits_NK, batch.labels_N)
            with self.times.part("backward"):
                # FSDP averages over ranks what is to be summed.
                scaler.scale(loss * self.workers.size).backward()
        return loss.detach()

    def scaler(self) -> torch.amp.GradScaler:
        return GroupScaler(self.settings.device.type, enabled=self.settings.precision == "fp16")

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        clip_together(parameters, max_norm)

    def gather(self) -> None:
        self._buffers.unite()
        # On the device first: shards that rest in the CPU's memory are there for no comm of devices.
        state = {name: tensor.to(self.settings.device) for name, tensor in self.trained.state_dict().items()}
        self.module.load_state_dict(
            {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
        )


def layers_to_wrap(module: nn.Module, options: Parallel, images_NCHW: torch.Tensor) -> list[nn.Module]:
    """The chosen layers, inner ones first, as `fully_shard` wants them. Raises StageError for a type that can't be."""
    if not options.wrap and options.wrap_min_parameters is None:
        return []
    layers = [layer for name, layer in module.named_modules() if name]
    called = _called(module, images_NCHW)
    can_be = [layer for layer in layers if layer in called and not _shares_parameters(module, layer)]
    for name in options.wrap or ():
        if name not in {type(layer).__name__ for layer in layers}:
            types = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise StageError(f"wrap: the network has no layer of type {name} (there are: {types})")
        if name not in {type(layer).__name__ for layer in can_be}:
            raise StageError(
                f"wrap: no {name} of the network can be gathered by itself: its forward is never called, or it shares "
                "parameters with other layers"
            )
    return [layer for layer in reversed(can_be) if _is_chosen(layer, options)]


def _called(module: nn.Module, images_NCHW: torch.Tensor) -> set[nn.Module]:
    """The layers whose forward is called: containers are not, nor are those whose weights another layer uses."""
    called = set[nn.Module]()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: called.add(layer)) for layer in module.modules()]
    with left_as_it_was(module), torch.no_grad():
        module(images_NCHW)
    for hook in hooks:
        hook.remove()
    return called


def _shares_parameters(module: nn.Module, layer: nn.Module) -> bool:
    """Whether something outside the layer has some of its parameters too."""
    inside = set(layer.modules())
    own = {id(parameter) for parameter in layer.parameters()}
    others = (parameter for other in module.modules() if other not in inside for parameter in other.parameters(False))
    return any(id(parameter) in own for parameter in others)


def _is_chosen(layer: nn.Module, options: Parallel) -> bool:
    num = sum(parameter.numel() for parameter in layer.parameters())
    is_large = options.wrap_min_parameters is not None and num >= options.wrap_min_parameters
    return num > 0 and (is_large or type(layer).__name__ in (options.wrap or ()))
