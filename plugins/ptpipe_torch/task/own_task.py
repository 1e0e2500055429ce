"""A task of a plugin's own: what its methods return is checked with a few samples, before hours depend on it.

Shape legend: B samples, R draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from ptpipe import StageError
from ptpipe_torch.task.own_functions import OwnFunctionsTask
from ptpipe_torch.task.ranking import with_ranking
from ptpipe_torch.task.task import Task

NUM_SAMPLES = 4
_RTOL, _ATOL = 1e-3, 1e-5
"""What the order of float32 additions may change."""


def check_own_task(
    task: Task,
    outputs: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    *,
    is_trained: bool = False,
) -> None:
    """Raise StageError where a method of a plugin's task returns something other than `Task` says.

    `outputs`, `targets`: of samples, of which the first `NUM_SAMPLES` are taken. `is_trained`: whether losses are
    needed, which a task of networks from elsewhere may not have. Built-in tasks are not checked.
    """
    if is_builtin(task):
        return
    with torch.no_grad():
        _OwnTask(task, *_part((outputs, targets), slice(NUM_SAMPLES))).check(is_trained=is_trained)


def is_builtin(task: Task) -> bool:
    """Return whether a task is one of those in this folder, whose tests check them."""
    return type(task).__module__.startswith("ptpipe_torch.")


def has_own_loss(task: Task) -> bool:
    """Return whether the loss is a plugin's or a function of the user's."""
    return not is_builtin(task) or (isinstance(task, OwnFunctionsTask) and task.loss is not None)


def depends_on_batch(task: Task, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the loss of a sample depends on the other samples of its batch.

    `outputs`, `targets`: of samples, which are compared with their two halves. A loss that draws random numbers, so
    that it is another each time, is not compared.
    """
    num_samples, sides = len(next(iter(outputs.values()))), (outputs, targets)
    half = num_samples // 2
    with torch.no_grad():
        whole_B, again_B = task.losses(*sides), task.losses(*sides)
        if not half or not torch.equal(whole_B, again_B):
            return False
        try:
            halves_B = torch.cat([task.losses(*_part(sides, part)) for part in (slice(half), slice(half, None))])
        except Exception:  # noqa: BLE001  # of so few samples; the training reports what fails there
            return False
    return not torch.allclose(whole_B, halves_B, _RTOL, _ATOL, equal_nan=True)


def _part(sides: Iterable[Mapping[str, torch.Tensor]], part: slice) -> tuple[dict[str, torch.Tensor], ...]:
    return tuple({name: of[part] for name, of in side.items()} for side in sides)


class _OwnTask:
    def __init__(self, task: Task, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        self.task = task
        self.sides = outputs, targets
        self.num_samples = len(next(iter(outputs.values())))

    def check(self, *, is_trained: bool) -> None:
        self._check_metrics()
        if is_trained:
            self._check_losses()
        self._check_rows("samples", self.task.samples(*self.sides), ("prediction", "score"))
        sums = self._sums()
        try:
            with np.errstate(all="ignore"):
                self._check_draws(self._figures(sums))
        except StageError:
            raise
        except (ArithmeticError, ValueError):  # 1 / 0, math.log(0): of so few samples, a figure may be undefined
            return

    def _refuse(self, method: str, problem: str) -> NoReturn:
        raise StageError(f"{type(self.task).__name__}.{method}() {problem}")

    def _check_metrics(self) -> None:
        names = [metric.name for metric in self.task.metrics]
        if not names or len(set(names)) < len(names):
            found = f"{', '.join(names)}: name each once" if names else "none: name at least one"
            raise StageError(f"{type(self.task).__name__}.metrics are {found}")

    def _check_losses(self) -> None:
        losses_B = self.task.losses(*self.sides)
        if isinstance(losses_B, torch.Tensor) and losses_B.shape == (self.num_samples,):
            return
        is_tensor = isinstance(losses_B, torch.Tensor)
        found = f"a tensor of shape {tuple(losses_B.shape)}" if is_tensor else f"a {type(losses_B).__name__}"
        self._refuse(
            "losses",
            f"returned {found} for {self.num_samples} samples: return a number for each, shape ({self.num_samples},). "
            "With reduction='none', torch's losses return one for each element: take the mean over the other axes",
        )

    def _sums(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the sums of all samples, which must be those of two halves together."""
        half = (self.num_samples + 1) // 2
        parts = [slice(0, half), slice(half, None)] if half < self.num_samples else [slice(None)]
        whole, *halves = (
            self._arrays("sums", self.task.sums(*_part(self.sides, part))) for part in (slice(None), *parts)
        )
        for name, total in whole.items():
            rows = [of[name] for of in halves if name in of]
            if len(rows) < len(halves) or any(of.shape != total.shape for of in rows):
                self._refuse("sums", f"must return {name} for every batch, of one shape: added up over the samples")
            together, size = np.sum(rows, axis=0), np.abs(rows).sum(axis=0)  # errors of both signs cancel each other
            if np.isfinite(total).all() and (abs(total - together) > _ATOL + _RTOL * size).any():
                self._refuse(
                    "sums",
                    f"does not add up: {name} of {self.num_samples} samples is {_text(total)}, and {_text(together)} "
                    "of their halves together: return sums, no means, of what other samples of a batch don't change",
                )
        return whole

    def _figures(self, sums: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, Any]:
        ranked = self.task.label_scores(*self.sides)
        figures = with_ranking(
            self.task, self.task.figures(sums, self.num_samples), None if ranked is None else ranked.numpy()
        )
        for metric in self.task.metrics:
            if metric.name not in figures:
                self._refuse("figures", f"returned no {metric.name}, which is one of its metrics")
            value = figures[metric.name]
            if not isinstance(value, int | float | None):
                kind = type(value).__name__
                self._refuse("figures", f"returned a {kind} as {metric.name}: return a number, as float(...) gives it")
        return figures

    def _check_draws(self, figures: Mapping[str, Any]) -> None:
        """Compare the metrics that intervals are drawn of with those that are shown."""
        rows = self.task.sample_sums(*self.sides)
        self._check_rows("sample_sums", rows)
        totals = {name: of.double().sum(0, keepdim=True).numpy() for name, of in rows.items()}
        for name, values_R in self.task.metric_values(totals, self.num_samples).items():
            if np.shape(values_R) != (1,):
                self._refuse("metric_values", f"returned {name} of shape {np.shape(values_R)} for 1 draw, not (1,)")
            shown = figures.get(name)
            if shown is None or not np.isfinite([*values_R, shown]).all():
                continue
            if not np.allclose(values_R, shown, _RTOL, _ATOL):
                self._refuse(
                    "metric_values",
                    f"returned {_text(values_R)} as {name} of what sample_sums() returns, and figures() "
                    f"{shown:g} of the same samples",
                )

    def _check_rows(self, method: str, returned: Mapping[str, torch.Tensor], needed: Iterable[str] = ()) -> None:
        for name in needed:
            if name not in returned:
                self._refuse(method, f"returned no {name}")
        for name, rows in self._arrays(method, returned).items():
            if rows.shape[:1] != (self.num_samples,):
                self._refuse(
                    method, f"returned {name} of shape {rows.shape} for {self.num_samples} samples: a row for each"
                )

    def _arrays(self, method: str, returned: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[np.float64]]:
        for name, of in returned.items():
            if not isinstance(of, torch.Tensor):
                self._refuse(method, f"returned {name} as {type(of).__name__}: return a tensor")
        return {name: of.detach().double().cpu().numpy() for name, of in returned.items()}


def _text(array: npt.NDArray[Any]) -> str:
    return ", ".join(f"{value:g}" for value in np.ravel(array)[:3])
