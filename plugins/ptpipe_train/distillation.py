"""Knowledge distillation: a network learns to return what its teacher returns, and to compute what it computes.

A teacher's forward pass runs in eval mode, without gradients, in the precision of the training. Losses are of single
samples, so that accumulated batches and any number of workers add up to the same step.

G. Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531 (outputs); A. Romero et al., FitNets,
arXiv 1412.6550 (features).
Shape legend: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import StageError, nearest
from ptpipe_torch import Batch, Data, Model, Task
from ptpipe_torch.memory_format import to_channels_last
from ptpipe_train.config import Distillation
from ptpipe_train.device import DeviceSettings, first_batch
from ptpipe_train.losses import float_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUM_TRIAL_SAMPLES = 2
_MAX_DISTANCE = 0.5
"""Of a layer from the same layer of the float network that it was prepared from; rounding makes some 0.05."""


@dataclass(frozen=True)
class TeacherModel:
    """A float model to learn from, and how."""

    model: Model
    options: Distillation

    def loss(self, student: nn.Module, settings: DeviceSettings, data: Data) -> DistillationLoss:
        """Return the loss of a network that is trained on a device. `student`: with the layers of `features`."""
        network = settings.place(self.model.build().requires_grad_(False))
        inputs = first_batch(data, settings, _NUM_TRIAL_SAMPLES).args
        is_channels_last = settings.channels_last and to_channels_last(network, inputs)
        return DistillationLoss(network, student, self.options, settings, data.info.task, is_channels_last)


def find_distillation(
    options: Distillation | None, student: Model, teacher: Model | None, data: Data
) -> TeacherModel | None:
    """Return the teacher, if there is one. Raises StageError where the student can't learn from it."""
    if teacher is None:
        if options:
            raise StageError("distillation needs a teacher, and the input `teacher` has none")
        return None
    if teacher.recipe.backend is not None or teacher.recipe.convert:
        raise StageError(f"the teacher must be a float model; it is {teacher.format}")
    if not data.info.task.can_be_distilled:
        raise StageError(
            f"distillation: the task {type(data.info.task).__name__} has no measure of how far outputs are from a "
            "teacher's: leave the teacher out"
        )
    data.info.check_fit("the teacher", teacher.signature)
    options = options or Distillation()
    if options.features:
        _check_features(options.features, student, teacher, data)
    return TeacherModel(teacher, options)


def _check_features(features: Mapping[str, str], student: Model, teacher: Model, data: Data) -> None:
    """Raise StageError for layers that can't be compared: tried on a few samples, with networks of their own."""
    inputs = first_batch(data, DeviceSettings(torch.device("cpu")), _NUM_TRIAL_SAMPLES).args
    with torch.no_grad():
        own, wanted = (
            _trial(model.build_prepared(), names, inputs, whose)
            for model, names, whose in (
                (student, features.keys(), "network"),
                (teacher, features.values(), "teacher"),
            )
        )
    is_prepared_teacher = bool(student.recipe.prepare) and student.recipe.builder == teacher.recipe.builder
    for (name, teacher_name), feature, target in zip(features.items(), own, wanted, strict=True):
        names = f"distillation.features: {name} of the network and {teacher_name} of the teacher"
        if feature.shape != target.shape:
            raise StageError(f"{names} have outputs of shape {tuple(feature.shape[1:])} and {tuple(target.shape[1:])}")
        distance = _squared_distances(feature, target).mean().sqrt().item()
        if is_prepared_teacher and not distance <= _MAX_DISTANCE:
            same = _layers_like(feature, teacher, inputs)
            raise StageError(
                f"{names} are different places: their outputs differ by {distance:.2g} of the latter's size before the "
                "training. In a prepared network, a convolution includes the batch norm and ReLU behind it; "
                + (f"here it is what {' and '.join(same)} of the teacher is" if same else "name another layer")
            )


def _layers_like(feature: torch.Tensor, teacher: Model, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Return the teacher's layers whose output is this one, but for rounding."""
    network = teacher.build()
    listener = FeatureListener(network, [name for name, _ in network.named_modules() if name], "teacher")
    with torch.no_grad():
        network(*inputs)
    return [
        name
        for name, value in listener.values.items()
        if isinstance(value, torch.Tensor)
        and value.shape == feature.shape
        and _squared_distances(feature, value).mean().sqrt().item() <= _MAX_DISTANCE
    ]


def _trial(network: nn.Module, names: Iterable[str], inputs: Sequence[torch.Tensor], whose: str) -> list[torch.Tensor]:
    """Return the outputs of layers. Raises StageError unless each is called once, for one float tensor of rows."""
    names = list(names)
    listener = FeatureListener(network, names, whose)
    network(*inputs)
    for name in names:
        if (num := listener.num_calls[name]) != 1:
            calls = "is never called" if num == 0 else f"is called {num} times"
            raise StageError(f"distillation.features: {name} of the {whose} {calls} in a forward pass; name another")
        value = listener.values[name]
        if not (isinstance(value, torch.Tensor) and value.is_floating_point() and len(value) == len(inputs[0])):
            raise StageError(f"distillation.features: {name} of the {whose} returns no tensor with a row a sample")
    return [listener.values[name] for name in names]


class FeatureListener:
    """Keeps what layers of a network returned last."""

    def __init__(self, network: nn.Module, names: Iterable[str], whose: str) -> None:
        """Listen to these layers. Raises StageError for one that the network doesn't have."""
        self.values: dict[str, Any] = {}
        self.num_calls = dict.fromkeys(names, 0)
        layers = dict(network.named_modules(remove_duplicate=False))
        for name in self.num_calls:
            if name not in layers or not name:
                close = nearest(name, layers)
                hint = f" (did you mean {close!r}?)" if close else ""
                raise StageError(f"distillation.features: the {whose} has no layer {name!r}{hint}")
            layers[name].register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, layer: nn.Module, args: Any, returned: Any) -> None:
        self.values[name] = returned
        self.num_calls[name] += 1


class DistillationLoss:
    """What a network's loss becomes with a teacher, which each worker has the whole of."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        options: Distillation,
        settings: DeviceSettings,
        task: Task,
        is_channels_last: bool,
    ) -> None:
        self._teacher, self._options, self._settings, self._task = teacher, options, settings, task
        self._is_channels_last = is_channels_last
        self._own = FeatureListener(student, options.features.keys(), "network")
        self._wanted = FeatureListener(teacher, options.features.values(), "teacher")

    def __call__(self, losses_B: torch.Tensor, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return each sample's loss. `losses_B`: the task's own; `outputs`: of the network for the batch."""
        options, task = self._options, self._task
        with torch.no_grad(), self._settings.autocast():
            returned = self._teacher(*self._inputs(batch))
        if options.weight:
            teacher_outputs = float_outputs(returned, task.outputs)
            soft_B = task.teacher_losses(outputs, teacher_outputs, batch.targets, options.temperature)
            losses_B = (1 - options.weight) * losses_B + options.weight * soft_B
        if options.features:
            losses_B = losses_B + options.feature_weight * self._feature_losses()
        return losses_B

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        if self._is_channels_last or not self._settings.channels_last:
            return batch.args
        return tuple(tensor.contiguous() for tensor in batch.args)

    def _feature_losses(self) -> torch.Tensor:
        pairs = self._options.features.items()
        losses = [_squared_distances(self._own.values[own], self._wanted.values[wanted]) for own, wanted in pairs]
        self._own.values.clear()
        self._wanted.values.clear()
        return torch.stack(losses).mean(0)


def _squared_distances(feature: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return each sample's squared distance, relative to the square of the target; float32 (B,).

    A target of zeros, as a ReLU may return for a sample, is not divided by: the distance is absolute there.
    """
    own, wanted = feature.float().flatten(1), target.float().flatten(1)
    squares_B = wanted.square().sum(1)
    is_zero_B = squares_B < torch.finfo(torch.float32).eps
    return (own - wanted).square().sum(1) / squares_B.masked_fill(is_zero_B, 1.0)
