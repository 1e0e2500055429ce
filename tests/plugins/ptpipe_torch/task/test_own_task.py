"""A task of a plugin's own is refused before work depends on it, with the method that returns the wrong thing.

Shape legend: B samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ptpipe import StageError
from ptpipe_torch import BATCH, ArrayInfo, Classification, Metric, Task, TensorSpec
from ptpipe_torch.task.own_task import check_own_task, depends_on_batch
from ptpipe_torch.task.task import exact_sums

OUTPUTS = {"letters": torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 1]])}
TARGETS = {"text": torch.tensor([[1.0, 0], [0, 0], [1, 1], [1, 0], [0, 0], [1, 0]])}


class Spelling(Task):
    """Networks spell words: the fraction of wrong letters, which no mean over words is."""

    targets = property(lambda self: {"text": ArrayInfo(dtype="float32", shape=(2,))})
    outputs = property(lambda self: (TensorSpec("letters", "float32", (BATCH, 2)),))
    metrics = property(
        lambda self: (Metric("wrong", higher_is_better=False, is_fraction=True), Metric("loss", higher_is_better=False))
    )

    def losses(self, outputs: Any, targets: Any) -> Any:
        return (outputs["letters"] - targets["text"]).square().mean(1)

    def sums(self, outputs: Any, targets: Any) -> Any:
        wrong_B = (outputs["letters"] != targets["text"]).sum(1)
        return {
            "wrong": wrong_B.sum(),
            "letters": (targets["text"] + 1).double().sum(),
            "loss": self.losses(outputs, targets).double().sum(),
        }

    def figures(self, sums: Any, num_samples: int) -> Any:
        return {"wrong": float(sums["wrong"]) / float(sums["letters"]), "loss": float(sums["loss"]) / num_samples}

    def samples(self, outputs: Any, targets: Any) -> Any:
        return {"prediction": outputs["letters"], "score": -self.losses(outputs, targets)}


def test_a_task_that_keeps_its_word_passes() -> None:
    check_own_task(Spelling(), OUTPUTS, TARGETS)
    one = ({name: of[:1] for name, of in side.items()} for side in (OUTPUTS, TARGETS))
    check_own_task(Spelling(), *one)


@dataclass
class Mistake:
    method: str
    change: Callable[[Any], Any]
    message: str


def without(name: str) -> Callable[[Any], Any]:
    return lambda returned: {key: value for key, value in returned.items() if key != name}


MISTAKES = [
    Mistake("losses", lambda losses_B: losses_B.mean(), "losses() returned a tensor of shape () for 4 samples"),
    Mistake("losses", lambda losses_B: losses_B[:, None], "losses() returned a tensor of shape (4, 1) for 4 samples"),
    Mistake("losses", lambda _: None, "losses() returned a NoneType for 4 samples: return a number for each"),
    Mistake("sums", lambda sums: {**sums, "wrong": 3}, "sums() returned wrong as int: return a tensor"),
    Mistake("figures", without("loss"), "figures() returned no loss, which is one of its metrics"),
    Mistake("figures", lambda of: {**of, "loss": torch.tensor(1.0)}, "figures() returned a Tensor as loss: return a"),
    Mistake("samples", without("prediction"), "samples() returned no prediction"),
    Mistake("samples", lambda of: {**of, "score": of["score"][:3]}, "returned score of shape (3,) for 4 samples"),
    Mistake("samples", lambda of: {**of, "score": of["score"].tolist()}, "returned score as list: return a tensor"),
    Mistake(
        "sample_sums", lambda of: {**of, "loss": of["loss"][:1]}, "sample_sums() returned loss of shape (1,) for 4"
    ),
    Mistake("sample_sums", lambda of: {**of, "loss": of["loss"] * 2}, "metric_values() returned 0.5 as loss of what"),
    Mistake("metric_values", lambda of: {**of, "loss": 0.5}, "metric_values() returned loss of shape () for 1 draw"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.message[:40])
def test_a_mistake_is_named(mistake: Mistake) -> None:
    right = getattr(Spelling, mistake.method)
    task = type("Wrong", (Spelling,), {mistake.method: lambda *given: mistake.change(right(*given))})()
    with pytest.raises(StageError, match=re.escape(mistake.message)) as caught:
        check_own_task(task, OUTPUTS, TARGETS, is_trained=True)
    assert str(caught.value).startswith("Wrong.")


def test_means_do_not_add_up() -> None:
    class Averaging(Spelling):
        def sums(self, outputs: Any, targets: Any) -> Any:
            return {name: of.double() / len(targets["text"]) for name, of in super().sums(outputs, targets).items()}

    with pytest.raises(
        StageError,
        match=r"^Averaging\.sums\(\) does not add up: wrong of 4 samples is 0\.5, and 1 of their halves toge",
    ):
        check_own_task(Averaging(), OUTPUTS, TARGETS)


@pytest.mark.parametrize(("names", "found"), [((), "none: name at least one"), (("a", "a"), "a, a: name each once")])
def test_metrics_have_names_of_their_own(names: tuple[str, ...], found: str) -> None:
    metrics = property(lambda self: tuple(Metric(name, higher_is_better=True) for name in names))
    task = type("Nameless", (Spelling,), {"metrics": metrics})()
    with pytest.raises(StageError, match=f"^Nameless.metrics are {found}$"):
        check_own_task(task, OUTPUTS, TARGETS)


def test_figures_may_be_undefined_for_few_samples() -> None:
    class Whole(Spelling):
        def figures(self, sums: Any, num_samples: int) -> Any:
            return {**super().figures(sums, num_samples), "loss": 1 / max(0, num_samples - 4)}

    class Undefined(Spelling):
        def figures(self, sums: Any, num_samples: int) -> Any:
            return {**super().figures(sums, num_samples), "loss": float(np.nan)}

    check_own_task(Whole(), OUTPUTS, TARGETS)
    check_own_task(Undefined(), OUTPUTS, TARGETS)


UNDEFINED = {
    "figures of None": {"figures": lambda of: {**of, "loss": None}},
    "math.log(0)": {"figures": lambda of: {**of, "loss": math.log(0.0)}},
    "draws of NaN": {"metric_values": lambda of: {**of, "loss": np.array([np.nan])}},
}


@pytest.mark.parametrize("changes", UNDEFINED.values(), ids=UNDEFINED)
def test_what_is_undefined_for_few_samples_is_no_mistake(changes: dict[str, Callable[[Any], Any]]) -> None:
    def changed(right: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda *given: change(right(*given))

    methods = {name: changed(getattr(Spelling, name), change) for name, change in changes.items()}
    check_own_task(type("Undefined", (Spelling,), methods)(), OUTPUTS, TARGETS)


def test_sums_that_cancel_each_other_add_up_as_far_as_they_are_rounded() -> None:
    class Prices(Spelling):
        def sums(self, outputs: Any, targets: Any) -> Any:
            errors = 1e5 * (outputs["letters"] - targets["text"])
            return {**super().sums(outputs, targets), "bias": errors.sum().double()}

    outputs = {"letters": torch.tensor([[-5.7, 3.7], [-8.9, -15.1], [3.7, 14.6], [9.4, -1.7]])}
    task, targets = Prices(), {"text": torch.zeros(4, 2)}
    bias, *halves = (
        float(task.sums({"letters": outputs["letters"][part]}, {"text": targets["text"][part]})["bias"])
        for part in (slice(None), slice(0, 2), slice(2, None))
    )
    assert abs(bias - sum(halves)) > 1e-3
    check_own_task(task, outputs, targets)


def test_sums_are_added_in_64_bits() -> None:
    class Short(Spelling):
        def sums(self, outputs: Any, targets: Any) -> Any:
            sums = super().sums(outputs, targets)
            return {**sums, "loss": sums["loss"].float(), "wrong": sums["wrong"].int()}

    check_own_task(Short(), OUTPUTS, TARGETS)
    found, expected = exact_sums(Short(), OUTPUTS, TARGETS), Spelling().sums(OUTPUTS, TARGETS)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # of equal dtypes


def test_a_loss_that_depends_on_the_batch_is_found() -> None:
    class Compared(Spelling):
        def losses(self, outputs: Any, targets: Any) -> Any:
            losses_B = super().losses(outputs, targets)
            return losses_B - losses_B.mean()

    class Drawn(Spelling):
        def losses(self, outputs: Any, targets: Any) -> Any:
            return super().losses(outputs, targets) * torch.rand(len(targets["text"]))

    class Paired(Spelling):
        def losses(self, outputs: Any, targets: Any) -> Any:
            if len(targets["text"]) < 4:
                raise ValueError("no pair in the batch")
            return super().losses(outputs, targets)

    assert depends_on_batch(Compared(), OUTPUTS, TARGETS)
    assert not depends_on_batch(Paired(), OUTPUTS, TARGETS)
    assert not depends_on_batch(Spelling(), OUTPUTS, TARGETS)
    assert not depends_on_batch(Drawn(), OUTPUTS, TARGETS)
    one = tuple({name: of[:1] for name, of in side.items()} for side in (OUTPUTS, TARGETS))
    assert not depends_on_batch(Compared(), *one)


def test_losses_matter_where_a_network_is_trained() -> None:
    class Judge(Spelling):
        def losses(self, outputs: Any, targets: Any) -> Any:
            raise StageError("networks for it are trained elsewhere")

        def sums(self, outputs: Any, targets: Any) -> Any:
            return Spelling().sums(outputs, targets)

        def samples(self, outputs: Any, targets: Any) -> Any:
            return Spelling().samples(outputs, targets)

    check_own_task(Judge(), OUTPUTS, TARGETS)
    with pytest.raises(StageError, match="networks for it are trained elsewhere"):
        check_own_task(Judge(), OUTPUTS, TARGETS, is_trained=True)


def test_built_in_tasks_are_not_called() -> None:
    check_own_task(Classification(class_names=("a", "b")), OUTPUTS, {"nothing": torch.zeros(0)})
