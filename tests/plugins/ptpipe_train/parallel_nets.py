"""Networks for comparing parallel with single-process training, as a plugin."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ptpipe import Context, Stage, StageConfig, hookimpl, stage
from ptpipe_torch import Data, FunctionRef, Model, Recipe, builder


@builder
def plain_net(
    *,
    num_classes: int,
    shape_CHW: tuple[int, int, int],
    norm: bool,
    norm_1d: bool,
    unused: bool,
    differs: bool,
    blocks: bool,
    max_eval_batch: int | None,
    average: bool,
) -> nn.Module:
    channels, height, width = shape_CHW
    layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(channels, 16, 3, padding=1)}
    if norm:
        layers["norm"] = nn.BatchNorm2d(16)
    layers |= {
        "relu1": nn.ReLU(inplace=True),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(16, 16, 3, padding=1),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(16 * (height // 4) * (width // 4), 32),
        **({"norm_1d": nn.BatchNorm1d(32)} if norm_1d else {}),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(32, num_classes),
    }
    if blocks:
        for block, names in (("block1", ("conv2", "relu2", "pool2")), ("block2", ("fc1", "norm_1d", "relu3", "fc2"))):
            inner = nn.Sequential(*(layers.pop(name) for name in names if name in layers))
            layers[block] = inner
        layers = {name: layers[name] for name in sorted(layers, key=ORDER.index)}
    network = nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    if unused:
        network.add_module("unused", Unused())
    if max_eval_batch:
        network.add_module("limited", Limited(max_eval_batch))
    if average:
        network.add_module("average", Average())
        network.add_module("named", Named())
    if differs:
        network.add_module("differing", Differing())
    return network


ORDER = ("conv1", "norm", "relu1", "pool1", "block1", "flatten", "block2")


class Unused(nn.Module):
    """Has an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Limited(nn.Module):
    """Takes so many samples at once in eval mode, as a device whose memory is full."""

    def __init__(self, max_eval_batch: int) -> None:
        super().__init__()
        self.max_eval_batch = max_eval_batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > self.max_eval_batch:
            raise ValueError(f"a batch of {len(x)}")
        return x


class Differing(nn.Module):
    """Changes its parameter in the forward pass, differently in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight += int(os.environ.get("RANK", "0"))
        return x + 0 * self.weight


class Output(dict[str, torch.Tensor]):
    """What torch's own functions for nested outputs take for a single value."""


class Named(nn.Module):
    """Returns its input by name."""

    def forward(self, x: torch.Tensor) -> Output:
        return Output(logits=x)


class Average(nn.Module):
    """Keeps a moving average of its inputs in a buffer, which must be the same on all ranks in each pass."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and dist.is_initialized():
            averages = [torch.zeros(()) for _ in range(dist.get_world_size())]
            dist.all_gather(averages, self.average)
            if len(set(map(float, averages))) > 1:
                raise ValueError(f"{averages} differ")
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().square().mean()
        return x - self.average


class Branching(nn.Module):
    """Its control flow depends on values: it can't be traced."""

    def __init__(self, num_inputs: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.fc(x if x.sum() > 0 else -x)


@builder
def branching_net(*, num_classes: int, shape_CHW: tuple[int, int, int]) -> nn.Module:
    channels, height, width = shape_CHW
    return Branching(channels * height * width, num_classes)


class PlainConfig(StageConfig):
    norm: bool = False
    norm_1d: bool = False
    unused: bool = False
    differs: bool = False
    blocks: bool = False
    max_eval_batch: int | None = None
    average: bool = False
    branching: bool = False


@stage("model.plain")
def plain(config: PlainConfig, ctx: Context, data: Data) -> Model:
    """Make the network."""
    arguments: dict[str, Any] = {
        "num_classes": data.info.task.num_classes,
        "shape_CHW": data.info.inputs["images"].shape_CHW,
    }
    options = config.model_dump(exclude={"branching"})
    ref = (
        FunctionRef.to(branching_net, **arguments)
        if config.branching
        else FunctionRef.to(plain_net, **options, **arguments)
    )
    torch.manual_seed(int(os.environ.get("NET_SEED", str(ctx.seed))))  # set: a stage that gives another net each time
    module = ref.resolve("builder")(**ref.arguments)
    return Model.from_module(Recipe(ref, data.info.signature), module)


@hookimpl
def ptpipe_stages() -> list[Stage[..., Any]]:
    return [plain]
