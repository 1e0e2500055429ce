"""Options of `train.supervised`. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from ptpipe import JSON, StageConfig, host
from ptpipe_torch.cuda import finds_cuda_device
from ptpipe_train.config_parallel import COMPILED, LAYERED, PIPELINED, Parallel

ScheduleName: TypeAlias = Literal["auto", "constant", "step", "cosine", "one_cycle"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
PrecisionOption: TypeAlias = Literal["auto", "fp32", "bf16", "fp16"]
MemoryFormat: TypeAlias = Literal["auto", "channels_last", "contiguous"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]

# Each schedule option and the one schedule that accepts it; `warmup` applies to all.
_SCHEDULE_OF_OPTION = {"gamma": "step", "every_epochs": "step", "final": "cosine"}


class Schedule(StageConfig):
    """Learning-rate schedule, evaluated at every optimizer step."""

    name: ScheduleName = Field(
        "auto",
        description="auto: cosine if ranges or batch norms freeze before the last step (quant.prepare_qat), else "
        "constant; step: multiplied by gamma every few epochs; cosine: decays along half a cosine; "
        "one_cycle: rises from lr/25 to lr and decays to nearly zero, both along cosines",
    )
    warmup: Count | Fraction | None = Field(
        None,
        description="rise linearly over this many steps (an integer) or this fraction of all steps (0.05); with "
        "one_cycle: the length of its rise; null: none, with one_cycle 0.3",
    )
    gamma: float | None = Field(None, gt=0, le=1, description="step: factor of each decay; null: 0.1")
    every_epochs: int | None = Field(None, ge=1, description="step: epochs between two decays; null: 1")
    final: float | None = Field(None, ge=0, le=1, description="cosine: final value as a fraction of lr; null: 0")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for option, name in _SCHEDULE_OF_OPTION.items():
            if getattr(self, option) is not None and self.name != name:
                raise ValueError(f"{option} is an option of the schedule {name}, not of {self.name}")
        return self


def _not_renamed(metric: str) -> str:
    if metric == "val_top1":
        raise ValueError("val_top1 was renamed to val_accuracy")
    return metric


class EarlyStopping(StageConfig):
    """When to stop before the last epoch."""

    patience: int = Field(3, ge=1, description="stop after this many consecutive epochs without improvement")
    min_delta: float = Field(0.0, ge=0, description="minimum change of the metric that counts as an improvement")
    metric: Annotated[str, AfterValidator(_not_renamed)] = Field(
        "val_loss",
        pattern=r"^val_\w+$",
        description="the monitored metric: val_loss, or val_ and any metric of the data set's task, such as "
        "val_accuracy of a classification; the task knows whether higher is better",
    )


class Ema(StageConfig):
    """Exponential moving average of the weights."""

    decay: float = Field(
        0.999,
        gt=0,
        lt=1,
        description="fraction of the average that an optimizer step keeps; at most (1 + t) / (10 + t) in step t",
    )


class Pruning(StageConfig):
    """How weights are set to zero during the training; what is a number of steps may be a fraction of all steps."""

    amount: float = Field(gt=0, lt=1, description="fraction of each layer's weights that is zero at the end")
    begin: Count | Fraction = Field(
        0, description="step at which the zeros begin to grow: a number, or a fraction of all steps"
    )
    end: Count | Fraction = Field(
        0.75, description="step at which there are all zeros; the steps after it recover. A number, or a fraction"
    )
    every: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        0.01, description="steps from one pruning to the next: a number, or a fraction of all steps"
    )
    skip: tuple[str, ...] = Field(
        (), description="layers to keep dense, by name (`classifier`, `layer4.*`) or type (`Linear`, `BasicBlock`)"
    )


class Distillation(StageConfig):
    """How to learn from the model at the input `teacher`."""

    temperature: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="divides the scores of classes or labels; above 1, small ones count more",
    )
    weight: float = Field(
        0.5,
        ge=0,
        le=1,
        description="fraction of the loss that is the difference to the teacher's outputs; the rest is the task's own",
    )
    features: dict[str, str] = Field(
        {},
        description="layers whose outputs are compared too: `{layer of this network: layer of the teacher}`; in a "
        "network prepared for int8, a convolution includes the batch norm and the ReLU behind it",
    )
    feature_weight: float = Field(
        1.0, gt=0, le=1e6, description="factor of the features' squared difference, relative to the teacher's square"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weight == 0 and not self.features:
            raise ValueError("with weight 0 and no features nothing is learned from the teacher")
        return self


class Profile(StageConfig):
    """What to profile."""

    steps: int = Field(5, ge=1, le=1000, description="number of profiled steps, after three warm-up steps")


class TrainConfig(StageConfig):
    """Options of `train.supervised`."""

    unkeyed_options: ClassVar[frozenset[str]] = frozenset({"checkpoint_every_s", "profile", "cuda_graphs"})

    epochs: int = Field(3, ge=1, le=1_000_000, description="passes over the train split")
    batch_size: int | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="samples per forward pass, summed over all workers; null: the data set's batch_size",
    )
    accumulate: int = Field(
        1, ge=1, le=65536, description="batches whose gradients are accumulated for one optimizer step"
    )
    drop_last: bool = Field(
        False, description="leave out the samples of an epoch that don't fill its last batch; others in each epoch"
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="the optimizer")
    lr: float | None = Field(None, gt=0, description="peak learning rate; null: 0.05 (sgd), 0.001 (adam, adamw)")
    scale_lr: Literal["none", "linear"] = Field(
        "none", description="linear: lr is meant for one batch and is multiplied by `accumulate`"
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="momentum of sgd; null: 0.9")
    nesterov: bool = Field(False, description="Nesterov momentum, for sgd")
    weight_decay: float | None = Field(
        None, ge=0, description="weight decay; null: torch's default, 0 (sgd, adam) or 0.01 (adamw)"
    )
    decay_norm_and_bias: bool = Field(
        True, description="apply weight decay to biases and normalization weights too, as torch does"
    )
    schedule: Schedule = Field(Schedule(), description="learning-rate schedule")
    precision: PrecisionOption = Field(
        "fp32",
        description="precision of forward and backward pass: fp32, or bf16 / fp16 autocast (fp16 scales the loss); "
        "auto: the faster of fp32 and bf16, by timing a few steps of this network; its result depends on the machine. "
        "On CUDA devices torch's fp32 convolutions use TF32",
    )
    memory_format: MemoryFormat = Field(
        "auto",
        description="memory format of images and weights; auto: channels_last where the network convolves images and "
        "its forward pass accepts that format",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="patterns of parameters' names, such as `features.*`, that are not trained; a batch norm of which "
        "nothing is left to train keeps its running statistics",
    )
    lr_factors: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        {},
        description="factors of the learning rate by patterns of parameters' names, such as `{features.*: 0.1}`; the "
        "first pattern that matches counts",
    )
    gradient_checkpointing: tuple[str, ...] = Field(
        (),
        description="types of layers (`BasicBlock`) that run again in the backward pass instead of keeping their "
        "activations: less memory, more time",
    )
    compile: bool = Field(
        False,
        description="compile forward and backward pass with torch.compile, which needs a C++ compiler; the result "
        "differs in the last bits",
    )
    cuda_graphs: bool = Field(
        True,
        description="on a CUDA device, in one process: replay forward and backward pass as a CUDA graph where the "
        "network allows that, which has the same result in less time; not with compile or gradient_checkpointing",
    )
    clip_grad_norm: float | None = Field(None, gt=0, description="maximum norm of all gradients together; null: none")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of each label spread over all classes; for one class of each sample, pixel or token",
    )
    mixup_alpha: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="blend each training sample, and its loss, with those of another one; the weight is drawn from "
        "Beta(alpha, alpha); 0: don't",
    )
    cutmix_alpha: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="replace a box of each training image by another one's, and weight the loss by area; the area is "
        "drawn from Beta(alpha, alpha); 0: don't. With mixup_alpha too, either is applied to half of the samples",
    )
    ema: Ema | None = Field(
        None,
        description="average the weights over the steps (exponential moving average), and evaluate and deliver the "
        "averages; null: don't",
    )
    distillation: Distillation | None = Field(
        None, description="how to learn from the model at the input `teacher`; null: with the defaults, if it has one"
    )
    pruning: Pruning | None = Field(
        None,
        description="set more and more of the smallest weights of convolutions and linear layers to zero, along a "
        "cubic schedule; null: none, but zeros of a pruned model are kept",
    )
    early_stopping: EarlyStopping | None = Field(
        None,
        description="stop when val no longer improves, and restore the best epoch's weights; null: never. With "
        "pruning, from the epoch on that has all zeros",
    )
    checkpoint_every_s: float | None = Field(
        None,
        gt=0,
        description="seconds between checkpoints; null: 15, or more where writing one takes over 1 % of the time",
    )
    device: Device = Field("auto", description="auto: the first CUDA device, else the CPU")
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of each process; null: all of the machine, divided among its workers",
    )
    profile: Profile | None = Field(
        None,
        description="write a PyTorch profiler trace and a table of the most expensive operators into the run's folder "
        "(of rank 0, with several processes); null: don't. A cached training isn't profiled: run it with --fresh STAGE",
    )
    parallel: Parallel = Field(Parallel(), description="how the training is distributed over devices and processes")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer != "sgd" and (self.momentum is not None or self.nesterov):
            raise ValueError("momentum and nesterov are options of the optimizer sgd")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if self.parallel.static_graph and self.accumulate > 1:
            raise ValueError(
                "static_graph can't be combined with accumulate: DistributedDataParallel supports one only"
            )
        if self.gradient_checkpointing and self.parallel.mode in PIPELINED:
            raise ValueError(
                f"gradient_checkpointing can't be combined with parallel mode {self.parallel.mode}, whose pipeline "
                "stages have no layers but the innermost ones; more microbatches take less memory"
            )
        if self.compile:
            self._check_compile()
        if self.distillation and self.distillation.features:
            self._check_features()
        if self.batch_size is not None:
            self.parallel.check_batch_size(self.batch_size)
        return self

    def _check_compile(self) -> None:
        if self.parallel.mode not in COMPILED:
            raise ValueError(
                f"compile can't be combined with parallel mode {self.parallel.mode}, whose hooks and schedules are no "
                f"part of a compiled forward pass; it can with {' and '.join(COMPILED)}"
            )
        if self.gradient_checkpointing:
            raise ValueError("compile can't be combined with gradient_checkpointing: it chooses what is recomputed")

    def _check_features(self) -> None:
        """Refuse what takes layers apart, runs them twice, or leaves none to listen to."""
        others = {
            f"parallel mode {self.parallel.mode}": self.parallel.mode not in LAYERED,
            "compile": self.compile,
            "gradient_checkpointing": bool(self.gradient_checkpointing),
        }
        for other, is_chosen in others.items():
            if is_chosen:
                raise ValueError(
                    f"distillation.features can't be combined with {other}, where the outputs of layers can't be read; "
                    "distillation of the network's outputs can"
                )

    def captures_passes(self, device_type: str, num_workers: int) -> bool:
        """Return whether passes are captured as CUDA graphs; the other two options run their own code in each."""
        is_one_process = self.parallel.mode != "dp" and num_workers == 1
        is_wanted = self.cuda_graphs and not self.compile and not self.gradient_checkpointing
        return device_type == "cuda" and is_one_process and is_wanted

    def keyed_options(self) -> dict[str, JSON]:
        """Return what enters the key: with `lr_factors` as pairs, because their order counts."""
        return super().keyed_options() | {
            "lr_factors": [[pattern, factor] for pattern, factor in self.lr_factors.items()]
        }

    def resolved_options(self) -> dict[str, JSON]:
        """Return the device and the number of CPU threads that the training takes here; the latter on a CPU only.

        With several workers, `num_threads: null` is the machine's threads: how many each takes follows from `workers`.
        """
        on_cuda = self.device == "cuda" or (self.device == "auto" and finds_cuda_device())
        num_threads = None if on_cuda else self.num_threads or host.num_threads()
        return {"device": "cuda" if on_cuda else "cpu", "num_threads": num_threads}
