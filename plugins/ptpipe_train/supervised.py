"""`train.supervised`: one training from its options to the trained model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ptpipe import JSON, Context, StageError
from ptpipe_torch import Data, Metric, Model, Task
from ptpipe_torch.data.mixing import MixOptions
from ptpipe_torch.distributed.worker_group import TIMEOUT_S, WorkerGroup, init_worker_group
from ptpipe_torch.memory_format import view_failure
from ptpipe_torch.python_file import seeded_everywhere
from ptpipe_torch.runtime import freed_memory_kept, released_memory, torch_threads
from ptpipe_train.activation_checkpoint import checkpoint_layers
from ptpipe_train.checkpointer import Checkpointer
from ptpipe_train.compiling import compiler_session
from ptpipe_train.config_parallel import PIPELINED
from ptpipe_train.device import (
    DeviceSettings,
    check_comm,
    describe_environment,
    deterministic_kernels,
    first_batch,
    resolve_device,
)
from ptpipe_train.distillation import TeacherModel, find_distillation
from ptpipe_train.early_stopping import find_fault
from ptpipe_train.ema import WeightAverage
from ptpipe_train.evaluation import evaluate
from ptpipe_train.loop import Loop
from ptpipe_train.memory_format import uses_channels_last
from ptpipe_train.model_fit import check_pipelined, check_task, refuse_disagreement, with_meanings_of
from ptpipe_train.monitor import POLL_EVERY_S, TrainingMonitor
from ptpipe_train.optimizer import make_optimizer, parameters_of, peak_lr
from ptpipe_train.parallel import ParallelStrategy, TrainingInputs, choose_strategy
from ptpipe_train.parameters import freeze_parameters, resolve_lr_factors, undecayed_parameters
from ptpipe_train.precision import PrecisionChoice, choose_precision, measure_step_ms
from ptpipe_train.profiling import StepProfile
from ptpipe_train.progress import Best, TrainingProgress
from ptpipe_train.schedule import LearningRate, resolve_schedule
from ptpipe_train.single_samples import refuse_single_samples, warn_of_small_passes
from ptpipe_train.sparsity import KeptZeros, PruningSchedule, pruned_weights, with_sparsity
from ptpipe_train.state import TrainingState
from ptpipe_train.step_times import PARTS, Utilization
from ptpipe_train.steps import StepPlan
from ptpipe_train.trivial_answer import no_better_than_trivial
from ptpipe_train.unstored_state import refuse_unstored_state

if TYPE_CHECKING:
    from ptpipe_train.config import EarlyStopping, TrainConfig


def train_supervised(config: TrainConfig, ctx: Context, model: Model, data: Data, teacher: Model | None) -> Model:
    """Train the model. See `ptpipe_train.train`."""
    batch_size = config.batch_size or data.loader.batch_size
    _check(config, ctx, model, data, batch_size)
    distillation = find_distillation(config.distillation, model, teacher, data)
    model = with_meanings_of(ctx, model, data)
    with (
        torch_threads(config.num_threads),
        _actionable_errors(config),
        compiler_session() if config.compile else nullcontext(),
        init_worker_group(
            ctx, config.parallel.comm or "auto", config.parallel.timeout_s or TIMEOUT_S, config.device != "cpu"
        ) as workers,
    ):
        plan = _plan_steps(config, ctx, model, data, batch_size)
        with released_memory():  # of the networks that are tried
            settings, choice = _resolve_settings(config, ctx, model, data, plan, workers)
        with (
            seeded_everywhere(_seed(ctx, workers), settings.device),
            deterministic_kernels(settings.device),
            freed_memory_kept(),
        ):
            module = model.build_prepared().train()
            freeze_parameters(module, config.freeze)
            checkpoint_layers(module, config.gradient_checkpointing)
            inputs = TrainingInputs(
                *(ctx, model, module, data, batch_size, settings, config.parallel, workers),
                *(config.compile, config.captures_passes(settings.device.type, workers.size), distillation is not None),
            )
            check_task(inputs, plan)
            training = _set_up(config, inputs, plan, choice, distillation)
            training.run()
            training.report()
            if training.state.progress.epoch > 1:  # after one epoch it was compared
                refuse_unstored_state(model, data, training.loop.strategy, batch_size)
            trained = model.with_state_dict_of(training.loop.strategy.module)
            trained = with_sparsity(ctx, trained, training.state.zeros)
            refuse_disagreement(workers, trained)
            return trained


def _plan_steps(config: TrainConfig, ctx: Context, model: Model, data: Data, batch_size: int) -> StepPlan:
    """Assign samples to steps. Raise StageError where an epoch has no batch, or one that the network can't take."""
    num_samples = len(data.splits["train"])
    if config.drop_last and num_samples < batch_size:
        raise StageError(f"drop_last leaves no batch: {num_samples} samples don't fill one of {batch_size}")
    plan = StepPlan(config.epochs, num_samples, batch_size, config.accumulate, ctx.seed, config.drop_last)
    refuse_single_samples(model, plan, config.parallel, config.freeze)
    return plan


def _resolve_settings(
    config: TrainConfig, ctx: Context, model: Model, data: Data, plan: StepPlan, workers: WorkerGroup
) -> tuple[DeviceSettings, PrecisionChoice]:
    """Resolve every `auto` of device, memory format and precision; the same on every rank."""
    device = resolve_device(config.device)
    check_comm(device, config.parallel)
    channels_last = uses_channels_last(config.memory_format, ctx, model, data, device)
    settings = DeviceSettings(device, channels_last=channels_last)

    def measure(num_rounds: int) -> list[float]:
        samples_per_pass = max(1, plan.batch_size // config.parallel.passes_per_batch)
        batch = first_batch(data, settings, samples_per_pass)
        cuda_graphs = config.captures_passes(device.type, workers.size)
        with freed_memory_kept():
            return measure_step_ms(model, data.info.task, batch, settings, num_rounds, cuda_graphs=cuda_graphs)

    num_batches = plan.epochs * plan.num_batches(plan.samples_per_epoch)
    choice = choose_precision(config.precision, device, ctx, workers, num_batches, measure)
    return replace(settings, precision=choice.precision), choice


def _seed(ctx: Context, workers: WorkerGroup) -> int:
    """Return the seed of dropout and of what else draws in a forward pass: each worker has its own streams."""
    return ctx.seed if workers.rank == 0 else int(np.random.SeedSequence([ctx.seed, workers.rank]).generate_state(1)[0])


def _check(config: TrainConfig, ctx: Context, model: Model, data: Data, batch_size: int) -> None:
    """Raise StageError where the options don't fit the model or the data."""
    config.parallel.degrees.check(ctx.num_workers)
    try:
        config.parallel.check_batch_size(batch_size)
    except ValueError as error:
        raise StageError(str(error)) from None
    if model.recipe.convert:
        name = ctx.input_names.get("model", ("the model",))[0]
        raise StageError(f"{name} is quantized (int8): train it before quant.convert or quant.dynamic")
    data.info.check_fit("the model", model.signature, retrained=True)
    if config.parallel.mode in PIPELINED:
        check_pipelined(config.parallel.mode, model.signature)
    if not len(data.splits["train"]):
        raise StageError(f"{data.info.name} has no train samples")
    _task(config, data)
    if mixing := _mixing(config):
        mixing.check(data.info)
    if config.early_stopping:
        _monitored(config.early_stopping, data)


def _task(config: TrainConfig, data: Data) -> Task:
    """Return the task to train. Raises StageError where it has no labels to smooth."""
    return data.info.task.with_label_smoothing(config.label_smoothing)


def _mixing(config: TrainConfig) -> MixOptions | None:
    """Return how samples are mixed; None: they aren't."""
    options = MixOptions(config.mixup_alpha, config.cutmix_alpha)
    return None if options == MixOptions() else options


def _monitored(rule: EarlyStopping, data: Data) -> Metric:
    """Return the metric of val that early stopping monitors. Raises StageError where there is none of that name."""
    metrics = {f"val_{metric.name}": metric for metric in data.info.task.metrics}
    if fault := find_fault(rule, data.info.name, len(data.splits["val"]), metrics):
        raise StageError(fault)
    return metrics[rule.metric]


def _set_up(
    config: TrainConfig,
    inputs: TrainingInputs,
    plan: StepPlan,
    choice: PrecisionChoice,
    distillation: TeacherModel | None,
) -> Training:
    ctx = inputs.ctx
    lr_factors = resolve_lr_factors(inputs.module, config.lr_factors)
    pruning = PruningSchedule.of(config.pruning, inputs.module, plan.num_steps) if config.pruning else None
    strategy = choose_strategy(inputs)
    device, workers = strategy.settings.device, strategy.workers
    schedule = resolve_schedule(config.schedule, inputs.module)
    lr = LearningRate(peak_lr(config), schedule, plan.num_steps, plan.steps_per_epoch)
    if reason := lr.never_rises():
        ctx.notice(reason)
    warn_of_small_passes(config.parallel, ctx, inputs.module, plan.batch_size)
    best = Best(rule, _monitored(rule, inputs.data).higher_is_better) if (rule := config.early_stopping) else None
    optimizer = make_optimizer(config, strategy.named_parameters(), lr_factors, undecayed_parameters(inputs.module))
    average = WeightAverage(parameters_of(optimizer), config.ema.decay) if config.ema else None
    zeros = KeptZeros(pruned_weights(inputs.model), strategy.named_parameters(), pruning)
    rest = (device, TrainingProgress(), best, average, zeros)
    state = TrainingState(strategy.trained, optimizer, strategy.grad_scaler(), *rest)
    poll_every_s = min(POLL_EVERY_S, config.checkpoint_every_s or POLL_EVERY_S)
    return Training(
        *(ctx, inputs.model),
        state,
        _loop(config, inputs, plan, lr, strategy, distillation),
        TrainingMonitor(ctx, plan, lr, choice.precision, Utilization(device), workers, poll_every_s),
        Checkpointer(
            ctx,
            config.checkpoint_every_s,
            _digest_of_work(config, inputs, plan, choice),
            describe_environment(device) | {"comm": strategy.comm},
            workers,
            strategy.state_is_replicated,
        ),
        choice,
        StepProfile(ctx, config.profile.steps, device) if config.profile and workers.rank == 0 else None,
    )


def _digest_of_work(config: TrainConfig, inputs: TrainingInputs, plan: StepPlan, choice: PrecisionChoice) -> str:
    """Return what checkpoints must agree in. Device and threads as written: else, resuming gives a notice."""
    options = json.dumps({**config.keyed_options(), "device": config.device, "num_threads": config.num_threads})
    return hashlib.sha256(f"{options}{inputs.model.recipe.to_json()}{plan}{choice.precision}".encode()).hexdigest()


def _loop(
    config: TrainConfig,
    inputs: TrainingInputs,
    plan: StepPlan,
    lr: LearningRate,
    strategy: ParallelStrategy,
    distillation: TeacherModel | None,
) -> Loop:
    return Loop(
        *(inputs.data, plan, lr, strategy, _task(config, inputs.data), config.clip_grad_norm, _mixing(config)),
        distillation.loss(strategy.trained, strategy.settings, inputs.data) if distillation else None,
    )


@dataclass
class Training:
    """A training from its first step, or from a checkpoint, to its end."""

    ctx: Context
    model: Model
    state: TrainingState
    loop: Loop
    monitor: TrainingMonitor
    checkpointer: Checkpointer
    choice: PrecisionChoice
    profile: StepProfile | None

    def run(self) -> None:
        """Train to the end, and restore the best epoch's weights where early stopping is on."""
        if self.checkpointer.restore_newest(self.state):
            self.state.progress.restarts.append(self.monitor.steps_done(self.state.progress))
        self.monitor.resume()
        while not self._is_over:
            self.loop.train_epoch(self.state, self._after_step)
            # Several workers poll after a number of steps, and an epoch may have fewer.
            is_due = self.monitor.poll(self.state.progress, self.checkpointer.is_due)
            self._refuse_weights_not_finite()
            with self.state.average.applied() if self.state.average else nullcontext():
                self._finish_epoch()
            # Not at the end: resuming there would skip `consolidate`, which builds the network from all workers.
            if is_due and not self._is_over:
                self.checkpointer.write(self.state, self.monitor.steps_done(self.state.progress))
            self.monitor.resume()
        if self.profile:
            self.profile.stop()
        if self.state.best:
            self.loop.strategy.module.load_state_dict(self.state.best.tensors)
        elif self.state.average:
            self.state.average.exchange()

    @property
    def _is_over(self) -> bool:
        is_stopped = self.state.best is not None and self.state.best.is_over
        return is_stopped or self.state.progress.epoch >= self.loop.plan.epochs

    def _after_step(self, num_samples: int, loss: torch.Tensor) -> None:
        progress = self.state.progress
        if self.profile:
            self.profile.step_done()
        self.monitor.step_done(progress, num_samples, loss)
        is_due = self.checkpointer.is_due
        if self.monitor.is_time(is_due) and self.monitor.poll(progress, is_due):
            self.checkpointer.write(self.state, self.monitor.steps_done(progress))
            self.monitor.resume()

    def _finish_epoch(self) -> None:
        progress, plan, strategy = self.state.progress, self.loop.plan, self.loop.strategy
        last_step = self.monitor.steps_done(progress) - 1
        metrics: dict[str, float] = {"train_loss": progress.loss_sum / plan.samples_per_epoch}
        strategy.consolidate()
        if not progress.epoch:  # before more time is spent
            refuse_unstored_state(self.model, self.loop.data, strategy, plan.batch_size)
        if len(self.loop.data.splits["val"]):
            pass_size = strategy.pass_size(plan.batch_size)
            evaluated = (strategy.module, self.loop.data, "val", strategy.settings, pass_size, strategy.workers)
            figures, undefined = evaluate(*evaluated)
            self.monitor.check_figures(figures, last_step)
            for sentence in () if progress.epoch else undefined:
                self.ctx.notice(sentence)
            metrics |= {f"val_{name}": value for name, value in figures.items()}
        if self.state.best and self.state.zeros.are_all(last_step):  # fewer zeros make no better model
            self.state.best.update(metrics, strategy.module)
        progress.finish_epoch({"epoch": progress.epoch + 1, "lr": self.loop.lr.at(last_step), **metrics})
        self.monitor.epoch_done(progress)

    def _refuse_weights_not_finite(self) -> None:
        # A step's loss is that of the weights before it: it can't show what the last step did to them.
        trained = (parameter.detach() for parameter in parameters_of(self.state.optimizer))
        parameters = [torch.view_as_real(own) if own.is_complex() else own for own in trained]
        # Both are nan where any weight is; `isfinite` would take as much memory as the weights.
        limits = [limit for weights in parameters if weights.numel() for limit in torch.aminmax(weights)]
        if limits and not torch.stack(limits).isfinite().all().item():
            raise self.monitor.not_finite("weights became nan or inf", self.monitor.steps_done(self.state.progress) - 1)

    def report(self) -> None:
        """Record the metrics of the delivered model and of the training. Report one that learned nothing."""
        progress, plan, strategy, best = self.state.progress, self.loop.plan, self.loop.strategy, self.state.best
        delivered = progress.history[-1 - (best.epochs_since if best else 0)]
        metrics: dict[str, JSON] = {name: value for name, value in delivered.items() if name not in ("epoch", "lr")}
        if reason := no_better_than_trivial(self.loop.data, metrics, progress.history[0]):
            self.ctx.notice(reason)
        if best:
            metrics |= {"best_epoch": delivered["epoch"], "stopped_early": progress.epoch < plan.epochs}
        if self.choice.precision == "fp16":
            metrics["loss_scale"] = self.state.scaler.get_scale()
        metrics |= {f"{name}_step_ms": round(step_ms, 3) for name, step_ms in self.choice.step_ms.items()}
        if progress.restarts:
            metrics["restarted_at_epochs"] = [round(step / plan.steps_per_epoch, 3) for step in progress.restarts]
        if strategy.workers.size > 1:
            metrics["num_workers"] = strategy.workers.size
        self.ctx.metric(
            **metrics,
            primary_metric=self.loop.data.info.task.primary_metric.name,
            samples_per_s=progress.num_samples / progress.train_s,
            num_steps=self.monitor.steps_done(progress),
            epochs_done=progress.epoch,
            samples_per_step=min(plan.window, plan.samples_per_epoch),
            peak_lr=self.loop.lr.maximum(),
            schedule=self.loop.lr.schedule.name,
            precision=self.choice.precision,
            memory_format=strategy.settings.memory_format,
            device=strategy.settings.device.type,
            num_threads=torch.get_num_threads(),
            **strategy.metrics(),
            workers=self._worker_metrics(),
            history=list(progress.history),
        )

    def _worker_metrics(self) -> list[JSON]:
        """Return each worker's throughput, device utilization, and mean milliseconds of the parts of a step."""
        strategy, progress, utilization = self.loop.strategy, self.state.progress, self.monitor.utilization.mean()
        samples_per_s = progress.num_samples / progress.train_s / strategy.batch_shard.num
        own = [samples_per_s, math.nan if utilization is None else utilization, *strategy.times.means_ms()]
        names = ("samples_per_s", "device_utilization", *(f"{part}_ms" for part in PARTS))
        table = [dict(zip(names, values, strict=True)) for values in strategy.workers.all_gather(own)]
        measured = {name for name in names if any(row[name] > 0 for row in table)}
        return [
            {
                "worker": rank,
                **{name: round(value, 3) for name, value in row.items() if name in measured and value >= 0},
            }
            for rank, row in enumerate(table)
        ]


@contextmanager
def _actionable_errors(config: TrainConfig) -> Iterator[None]:
    """Turn torch's errors about the user's options into StageErrors that name the option to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StageError(
            "the device's memory is full: use a smaller batch_size and a larger accumulate, or precision bf16"
        ) from error
    except RuntimeError as error:
        if line := view_failure(error):
            other = ", or memory_format auto" if config.memory_format == "channels_last" else ""
            raise StageError(f"{line}: a view of memory in another order is impossible: use reshape{other}") from error
        if "Expected to have finished reduction" not in str(error):
            raise
        raise StageError(
            "some parameters of the network were unused in a step: set parallel.find_unused to true"
        ) from error
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise StageError(
            "a batch (the last of an epoch?) holds a single sample, which batch norm can't normalize: "
            "choose another batch_size"
        ) from error
