"""What a data set as a whole is, and which models fit it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ptpipe import StageError
from ptpipe_torch.data.column_info import ColumnInfo
from ptpipe_torch.data.meaning import OTHER_WORDS, Misfit
from ptpipe_torch.model.axis_sizes import numbers_of
from ptpipe_torch.model.signature import Signature, TensorSpec, describe_meanings
from ptpipe_torch.task.task import Task


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a data set as a whole."""

    name: str
    """`mnist`; where a fallback was used, the one it is: `digits (in place of mnist)`."""
    inputs: Mapping[str, ColumnInfo]
    """The input columns by name, in the order of a network's arguments."""
    task: Task
    """What is asked of a model; it names the target columns."""

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        """The target columns by name."""
        return self.task.targets

    @property
    def columns(self) -> Mapping[str, ColumnInfo]:
        """All columns by name."""
        return {**self.inputs, **self.targets}

    @property
    def signature(self) -> Signature:
        """What a model of this data set takes and returns."""
        meanings = {name: info.meaning for name, info in self.inputs.items()} | dict(self.task.meanings)
        return Signature(
            tuple(info.spec(name) for name, info in self.inputs.items()),
            self.task.outputs,
            {name: tuple(meaning) for name, meaning in meanings.items() if meaning},
        )

    def check_names(self) -> None:
        """Raise StageError where the task says something of an output that no network returns."""
        outputs = [spec.name for spec in self.task.outputs]
        for fact in ("class_scores", "probability_functions", "meanings") if outputs else ():
            for name in getattr(self.task, fact):
                if name not in outputs:
                    task = type(self.task).__name__
                    raise StageError(f"{task}.{fact} names {name!r}, and its outputs are {', '.join(outputs)}")

    def check_fit(self, name: str, signature: Signature, *, retrained: bool = False) -> None:
        """Raise StageError, which calls the model `name`, where its inputs or outputs are not this data set's.

        They have the same names, dtypes and shapes (where an axis of the model may have any size, the data set's has
        one), and stand for the same as far as both sides say what: ids of one tokenizer, the same classes in the same
        order. `retrained`: outputs may have stood for other classes, and values may have been normalized otherwise.
        """
        self.check_inputs(name, signature, retrained=retrained)
        needed = self.signature
        if needed.outputs:
            returned = signature.with_sizes_of(needed.inputs).outputs
            _check_specs(f"{name} returns", returned, self.name, needed.outputs)
        for spec in needed.outputs:
            found_words, words = (of.meanings.get(spec.name, ()) for of in (signature, needed))
            is_other = found_words and words and found_words != words
            if is_other and (not retrained or sorted(found_words) == sorted(words)):
                _refuse(f"{name} returns {spec.name}", self.name, Misfit(found_words, words, OTHER_WORDS))

    def check_inputs(self, name: str, signature: Signature, *, retrained: bool = False) -> None:
        """Raise StageError, which calls the model `name`, where its inputs are not this data set's.

        `retrained`: see `check_fit`.
        """
        needed = self.signature
        _check_specs(f"{name} takes", signature.inputs, self.name, needed.inputs)
        for column, info in self.inputs.items():
            words = signature.meanings.get(column, ())
            if words and info.meaning and (misfit := info.misfit(words, retrained=retrained)):
                _refuse(f"{name} takes {column}", self.name, misfit)


def _check_specs(model: str, found: Sequence[TensorSpec], data: str, needed: Sequence[TensorSpec]) -> None:
    if not _fit(found, needed):
        found_text, needed_text = (", ".join(map(str, specs)) for specs in (found, needed))
        raise StageError(f"{model} {found_text}; {data} needs {needed_text}")


def _fit(found: Sequence[TensorSpec], needed: Sequence[TensorSpec]) -> bool:
    """Return whether a model has these tensors; an axis of its own may have any size where theirs has one."""
    names, needed_names = ([(spec.name, spec.dtype) for spec in specs] for specs in (found, needed))
    pairs = ((one.shape, other.shape) for one, other in zip(found, needed, strict=False))
    return names == needed_names and numbers_of(pairs) is not None


def _refuse(model: str, data: str, misfit: Misfit) -> NoReturn:
    found_text, needed_text = describe_meanings(misfit.found, misfit.needed)
    raise StageError(f"{model} of {found_text}; {data} has {needed_text}: {misfit.problem}")
