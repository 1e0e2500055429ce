"""Train a network on labelled images: train.supervised. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ptpipe import Context, Stage, StageConfig, hookimpl, stage
from ptpipe_torch import Data, Model
from ptpipe_train.parallel_options import Parallel

ScheduleName: TypeAlias = Literal["constant", "step", "cosine", "one_cycle"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
MemoryFormat: TypeAlias = Literal["auto", "channels_last", "contiguous"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]

# Option to the schedules that know it; `warmup` is known to all.
_OPTIONS_OF = {"gamma": "step", "every_epochs": "step", "final": "cosine"}


class Schedule(StageConfig):
    """How the learning rate changes from step to step."""

    name: ScheduleName = Field(
        "constant",
        description="constant; step: times gamma every few epochs; cosine: falls along half a cosine; one_cycle: rises "
        "from lr/25 to lr and falls to nothing, both along cosines",
    )
    warmup: Count | Share | None = Field(
        None,
        description="rise linearly over this many steps (a whole number) or this share of all steps (0.05); with "
        "one_cycle: how long it rises; null: none, with one_cycle 0.3",
    )
    gamma: float | None = Field(None, gt=0, le=1, description="step: factor at each step down; null: 0.1")
    every_epochs: int | None = Field(None, ge=1, description="step: epochs between two steps down; null: 1")
    final: float | None = Field(None, ge=0, le=1, description="cosine: where it ends, as a share of lr; null: 0")

    @model_validator(mode="after")
    def _only_its_own(self) -> Self:
        for option, name in _OPTIONS_OF.items():
            if getattr(self, option) is not None and self.name != name:
                raise ValueError(f"{option} is an option of the schedule {name}, not of {self.name}")
        return self


class EarlyStopping(StageConfig):
    """When to stop before the last epoch."""

    patience: int = Field(3, ge=1, description="stop after this many epochs in a row without a better one")
    min_delta: float = Field(0.0, ge=0, description="by how much the figure must be better to count as better")
    metric: Literal["val_loss", "val_top1"] = Field("val_loss", description="the figure that is watched")


class Profile(StageConfig):
    """What to profile."""

    steps: int = Field(5, ge=1, le=1000, description="how many steps, after three that warm up")


class TrainConfig(StageConfig):
    """Options of `train.supervised`."""

    epochs: int = Field(3, ge=1, le=1_000_000, description="passes over the train split")
    batch_size: int | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="images in one forward pass, of all workers together; null: as the data set says",
    )
    accumulate: int = Field(
        1, ge=1, le=65536, description="batches whose gradients are averaged into one optimizer step"
    )
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="the optimizer")
    lr: float | None = Field(None, gt=0, description="greatest learning rate; null: 0.05 (sgd), 0.001 (adamw)")
    scale_lr: Literal["none", "linear"] = Field(
        "none", description="linear: lr is meant for one batch and is multiplied by `accumulate`"
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="of sgd; null: 0.9")
    nesterov: bool = Field(False, description="Nesterov's momentum; of sgd")
    weight_decay: float | None = Field(None, ge=0, description="null: torch's own, 0 (sgd) or 0.01 (adamw)")
    decay_norm_and_bias: bool = Field(
        True, description="weight decay also on biases and the weights of normalization layers, as torch does"
    )
    schedule: Schedule = Field(Schedule(), description="how the learning rate changes from step to step")
    precision: Precision = Field(
        "fp32", description="of the forward and backward pass: fp32, or bf16 / fp16 autocast (fp16 scales the loss)"
    )
    memory_format: MemoryFormat = Field(
        "auto", description="layout of images and weights; auto: channels_last where the network has convolutions"
    )
    clip_grad_norm: float | None = Field(None, gt=0, description="greatest norm of all gradients together; null: none")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of each label spread over all classes")
    early_stopping: EarlyStopping | None = Field(
        None, description="stop when val no longer improves, and go back to the best epoch's weights; null: never"
    )
    checkpoint_every_s: float | None = Field(
        None,
        gt=0,
        description="seconds between checkpoints; null: 15, or more where one is dear (under 1 % of the time)",
    )
    device: Device = Field("auto", description="auto: the first CUDA device, else the CPU")
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of a process; null: all of the machine, shared among its workers"
    )
    profile: Profile | None = Field(
        None,
        description="write a trace of PyTorch's profiler and a table of the dearest operators into the run's folder "
        "(of several processes, those of the first); null: don't",
    )
    parallel: Parallel = Field(Parallel(), description="how the training is spread over devices and processes")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.optimizer != "sgd" and (self.momentum is not None or self.nesterov):
            raise ValueError("momentum and nesterov are options of the optimizer sgd")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if self.parallel.static_graph and self.accumulate > 1:
            raise ValueError("static_graph and accumulate don't go together: DistributedDataParallel can't have both")
        if self.batch_size is not None:
            self.parallel.check_batch_size(self.batch_size)
        return self


def _find_lacks(config: TrainConfig) -> Iterable[str]:
    """What keeps this machine from training so, a line each."""
    from ptpipe_train import settings

    yield from settings.find_lacks(config.device, config.precision)
    yield from settings.find_lacks_of_workers(config.device, config.parallel)


def _num_workers(config: TrainConfig) -> int:
    return config.parallel.degrees.world_size


@stage("train.supervised", packages=("torch", "numpy"), preflight=_find_lacks, workers=_num_workers)
def train(config: TrainConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Train a classifier on the train split and measure it on the val split after each epoch.

    Takes a float model, or one that quant.prepare_qat prepared. The loss is cross-entropy, averaged over all samples
    of an optimizer step: 4 accumulated batches of 16 give the same step as one of 64 (batch norm apart, which sees
    one batch at a time). The order of samples follows from the seed and the epoch alone; dropout from the seed.

    A run that was killed goes on from its last checkpoint when it is started again, and ends with the very same
    weights as one that was not, on the same machine with the same number of threads. Val is measured in float32, as
    the model will be delivered. Ends with an error when the loss is no longer a finite number.

    `parallel` spreads the same training over processes and devices: a step takes the same samples, whatever their
    number, and ends where one process would (batch norm apart, which sees the share of one process).
    """
    from ptpipe_train.supervised import train_supervised

    return train_supervised(config, ctx, model, data)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Offer training."""
    return [train]
