"""One training from its options to the trained model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ptpipe import JSON, Context, StageError
from ptpipe_torch import Data, Model
from ptpipe_torch.distributed.worker_group import TIMEOUT_S, WorkerGroup, init_worker_group
from ptpipe_torch.runtime import freed_memory_kept, seeded, torch_threads
from ptpipe_train.evaluation import evaluate
from ptpipe_train.loop import Loop
from ptpipe_train.optimizer import make_optimizer, parameters_of, peak_lr
from ptpipe_train.parallel import Material, Way, choose_way
from ptpipe_train.plan import StepPlan
from ptpipe_train.profiling import StepProfile
from ptpipe_train.progress import Best, Progress
from ptpipe_train.saving import Saving
from ptpipe_train.schedule import LearningRate
from ptpipe_train.settings import (
    Settings,
    choose_settings,
    describe_environment,
    deterministic_kernels,
    has_fast_bf16,
)
from ptpipe_train.state import TrainingState
from ptpipe_train.step_times import PARTS, Utilization
from ptpipe_train.watch import LOOK_EVERY_S, Watch

if TYPE_CHECKING:
    from ptpipe_train import TrainConfig
    from ptpipe_train.parallel_options import Parallel

_FEW_IMAGES = 8
"""For batch norm: with fewer at once its statistics are mostly noise (Wu and He, 2018, "Group Normalization")."""


def train_supervised(config: TrainConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Train it. See `ptpipe_train.train`."""
    batch_size = config.batch_size or data.loader.batch_size
    _check(config, ctx, model, data, batch_size)
    parallel = config.parallel
    with (
        torch_threads(config.num_threads),
        freed_memory_kept(),
        _actionable_errors(),
        init_worker_group(
            ctx, parallel.comm or "auto", parallel.timeout_s or TIMEOUT_S, config.device != "cpu"
        ) as workers,
    ):
        module = model.build_prepared().train()
        settings = _settings(config, ctx, module)
        with seeded(_seed(ctx, workers), settings.device), deterministic_kernels(settings.device):
            way = choose_way(parallel, ctx, workers, Material(model, module, data, batch_size), settings)
            training = _set_up(config, ctx, model, way, data, batch_size)
            training.run()
            training.report()
            trained = model.with_state_dict_of(way.module)
            _refuse_disagreement(workers, trained)
            return trained


def _refuse_disagreement(workers: WorkerGroup, model: Model) -> None:
    """Every worker must end with the same network: what is delivered is that of rank 0."""
    if workers.size == 1:
        return
    digest = hashlib.sha256()
    for name, tensor in sorted(model.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if not workers.all_equal(digest.digest()):
        raise StageError(
            "the workers ended with different networks: something in the network or in its data differs from worker to "
            "worker (a random number drawn without torch? a parameter that not all use?)"
        )


def _settings(config: TrainConfig, ctx: Context, module: nn.Module) -> Settings:
    settings = choose_settings(config.device, config.precision, config.memory_format, module)
    if config.precision == "bf16" and not has_fast_bf16(settings.device):
        ctx.notice("precision bf16: this processor has no bf16 instructions; fp32 may well be quicker")
    if config.precision == "fp16" and settings.device.type == "cpu":
        # Measured on one that has fp16 instructions: small_cnn takes 150 times as long as in bf16.
        ctx.notice("precision fp16: torch's kernels for a CPU are very slow in it; bf16 is quicker by far")
    return settings


def _seed(ctx: Context, workers: WorkerGroup) -> int:
    """Of dropout: each worker has a stream of its own."""
    return ctx.seed if workers.rank == 0 else int(np.random.SeedSequence([ctx.seed, workers.rank]).generate_state(1)[0])


def _check(config: TrainConfig, ctx: Context, model: Model, data: Data, batch_size: int) -> None:
    """Raise StageError where model and data can't be trained so."""
    config.parallel.degrees.check(ctx.num_workers)
    try:
        config.parallel.check_batch_size(batch_size)
    except ValueError as error:
        raise StageError(str(error)) from None
    if model.recipe.convert:
        converts = ", ".join(part.address for part in model.recipe.convert)
        raise StageError(f"an int8 model can't be trained (it was converted by {converts}): train what was prepared")
    if model.num_classes != data.info.num_classes:
        raise StageError(f"the model has {model.num_classes} classes and {data.info.name} {data.info.num_classes}")
    if model.input_shape_CHW != data.info.shape_CHW:
        raise StageError(
            f"the model is for images of shape {model.input_shape_CHW}, {data.info.name} has {data.info.shape_CHW}"
        )
    if not len(data.splits["train"]):
        raise StageError(f"{data.info.name} has no train samples")
    if config.early_stopping and not len(data.splits["val"]):
        raise StageError(f"early_stopping needs a val split, and {data.info.name} has none")


def _warn_of_tiny_parts(parallel: Parallel, ctx: Context, module: nn.Module, batch_size: int) -> None:
    num_images = batch_size // parallel.parts
    if parallel.parts == 1 or parallel.sync_bn or num_images >= _FEW_IMAGES:
        return
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        ctx.notice(
            f"batch norm sees {num_images} images at once, for a batch of {batch_size} goes through the network in "
            f"{parallel.parts} parts; accuracy may suffer with fewer than {_FEW_IMAGES}"
        )


def _set_up(config: TrainConfig, ctx: Context, model: Model, way: Way, data: Data, batch_size: int) -> Training:
    settings = way.settings
    plan = StepPlan(config.epochs, len(data.splits["train"]), batch_size, config.accumulate, ctx.seed)
    lr = LearningRate(peak_lr(config), config.schedule, plan.num_steps, plan.steps_per_epoch)
    if lr.greatest() < 0.9 * lr.peak:
        ctx.notice(f"the learning rate never rises to {lr.peak:g}: the warmup is too long for {plan.num_steps} steps")
    _warn_of_tiny_parts(config.parallel, ctx, way.module, batch_size)
    best = Best(config.early_stopping) if config.early_stopping else None
    optimizer = make_optimizer(config, way.trained)
    state = TrainingState(way.trained, optimizer, way.scaler(), settings.device, Progress(), best)
    work = hashlib.sha256(f"{config.model_dump_json()}{model.recipe.to_json()}{plan}".encode()).hexdigest()
    return Training(
        ctx,
        state,
        Loop(data, plan, lr, way, config.label_smoothing, config.clip_grad_norm),
        Watch(
            ctx,
            plan,
            lr,
            config.precision,
            Utilization(settings.device),
            way.workers,
            min(LOOK_EVERY_S, config.checkpoint_every_s or LOOK_EVERY_S),
        ),
        Saving(
            ctx,
            config.checkpoint_every_s,
            work,
            describe_environment(settings.device) | {"comm": way.comm},
            way.workers,
            way.state_is_shared,
        ),
        StepProfile(ctx, config.profile.steps, settings.device) if config.profile and way.workers.rank == 0 else None,
    )


@dataclass
class Training:
    """A training from its first step, or from a checkpoint, to its end."""

    ctx: Context
    state: TrainingState
    loop: Loop
    watch: Watch
    saving: Saving
    profile: StepProfile | None

    def run(self) -> None:
        """Train to the end and put the best weights back where early stopping asks for it."""
        self.saving.restore_newest(self.state)
        self.watch.resume()
        while not self._is_over:
            self.loop.train_epoch(self.state, self._after_step)
            # Also here: a team looks up after so many steps, and an epoch may have fewer.
            is_due = self.watch.look(self.state.progress, self.saving.is_due)
            self._finish_epoch()
            # None of the end: going on from there would bring together no network of what several workers hold.
            if is_due and not self._is_over:
                self.saving.write(self.state, self.watch.steps_done(self.state.progress))
            self.watch.resume()
        if self.profile:
            self.profile.stop()
        self._refuse_weights_not_finite()
        if self.state.best:
            self.loop.way.module.load_state_dict(self.state.best.tensors)

    @property
    def _is_over(self) -> bool:
        is_stopped = self.state.best is not None and self.state.best.is_over
        return is_stopped or self.state.progress.epoch >= self.loop.plan.epochs

    def _after_step(self, num_samples: int, loss: torch.Tensor) -> None:
        progress = self.state.progress
        if self.profile:
            self.profile.step_done()
        self.watch.step_done(progress, num_samples, loss)
        is_due = self.saving.is_due
        if self.watch.is_time(is_due) and self.watch.look(progress, is_due):
            self.saving.write(self.state, self.watch.steps_done(progress))
            self.watch.resume()

    def _finish_epoch(self) -> None:
        progress, plan = self.state.progress, self.loop.plan
        last_step = self.watch.steps_done(progress) - 1
        figures: dict[str, float] = {"train_loss": progress.loss_sum / plan.num_samples}
        way = self.loop.way
        way.gather()
        if len(self.loop.data.splits["val"]):
            self._refuse_weights_not_finite()
            score = evaluate(way.module, self.loop.data, "val", way.settings, plan.batch_size, way.workers)
            if not math.isfinite(score.loss):
                raise self.watch.not_finite(f"the loss on val became {score.loss}", last_step)
            figures |= {"val_loss": score.loss, "val_top1": score.top1}
        if self.state.best:
            self.state.best.see(figures, way.module)
        progress.finish_epoch({"epoch": progress.epoch + 1, "lr": self.loop.lr.at(last_step), **figures})

    def _refuse_weights_not_finite(self) -> None:
        # The loss is that of the weights before a step: it can't show what the last one did to them.
        finite = [parameter.detach().isfinite().all() for parameter in parameters_of(self.state.optimizer)]
        if finite and not torch.stack(finite).all().item():
            raise self.watch.not_finite("weights became nan or inf", self.watch.steps_done(self.state.progress) - 1)

    def report(self) -> None:
        """Record the figures of what was trained."""
        progress, plan, best = self.state.progress, self.loop.plan, self.state.best
        delivered = progress.history[-1 - (best.epochs_since if best else 0)]
        facts: dict[str, JSON] = {name: value for name, value in delivered.items() if name not in ("epoch", "lr")}
        if best:
            facts |= {"best_epoch": delivered["epoch"], "stopped_early": progress.epoch < plan.epochs}
        if self.loop.way.settings.precision == "fp16":
            facts["loss_scale"] = self.state.scaler.get_scale()
        self.ctx.metric(
            **facts,
            images_per_s=progress.num_images / progress.train_s,
            num_steps=self.watch.steps_done(progress),
            epochs_done=progress.epoch,
            samples_per_step=min(plan.window, plan.num_samples),
            peak_lr=self.loop.lr.greatest(),
            precision=self.loop.way.settings.precision,
            memory_format=self.loop.way.settings.memory_format,
            device=self.loop.way.settings.device.type,
            num_threads=torch.get_num_threads(),
            **self.loop.way.facts(),
            **({"num_workers": self.loop.way.workers.size} if self.loop.way.workers.size > 1 else {}),
            workers=self._workers(),
            history=list(progress.history),
        )

    def _workers(self) -> list[JSON]:
        """What each worker did a second, how busy its device was, and where the time of its steps went."""
        way, progress, utilization = self.loop.way, self.state.progress, self.watch.utilization.mean()
        images_per_s = progress.num_images / progress.train_s / way.share.num
        own = [images_per_s, math.nan if utilization is None else utilization, *way.times.means_ms()]
        names = ("images_per_s", "device_utilization", *(f"{part}_ms" for part in PARTS))
        table = [dict(zip(names, figures, strict=True)) for figures in way.workers.all_gather(own)]
        told = {name for name in names if any(row[name] > 0 for row in table)}
        return [
            {"worker": rank, **{name: round(value, 3) for name, value in row.items() if name in told and value >= 0}}
            for rank, row in enumerate(table)
        ]


@contextmanager
def _actionable_errors() -> Iterator[None]:
    """Turn what torch says of the user's settings into StageErrors."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StageError(
            "the device's memory is full: use a smaller batch_size and a greater accumulate, or precision bf16"
        ) from error
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise StageError(
            "some parameters of the network went unused in a step: set parallel.find_unused to true"
        ) from error
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise StageError(
            "a batch (the last of an epoch?) holds a single sample, which batch norm can't normalize: "
            "choose another batch_size"
        ) from error
