"""Compare an exported model with its torch model at other sizes than the data set's, where an axis may have any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ptpipe import Context, StageError
from ptpipe_torch.data.raw_form import NORMALIZED, InputForm
from ptpipe_torch.model.axis_sizes import numbers_of, sized
from ptpipe_torch.model.model import Model
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.parity.comparison import Arrays, ComparedSamples, Exported, parities_of

_NUM_SAMPLES = 8


@dataclass(frozen=True)
class ResizedSamples(ComparedSamples):
    """Samples that were made smaller or larger along axes that may have any size: cut off, or continued with copies."""

    specs: tuple[TensorSpec, ...]
    """Of the model's inputs."""
    numbers: Mapping[str, int]
    """What the names of their symbols stand for."""

    def inputs(self, num_samples: int, form: InputForm = NORMALIZED) -> Arrays:
        return self._resized(super().inputs(num_samples, form))

    def batches(self, form: InputForm) -> Iterator[Arrays]:
        return map(self._resized, super().batches(form))

    def _resized(self, inputs: Arrays) -> Arrays:
        resized = dict(inputs)
        for spec in self.specs:
            for axis, size in enumerate(sized(spec.shape, self.numbers)):
                if isinstance(size, int) and size != resized[spec.name].shape[axis]:
                    places = np.arange(size) % resized[spec.name].shape[axis]
                    resized[spec.name] = resized[spec.name].take(places, axis)
        return resized


def check_other_sizes(ctx: Context, exported: Exported, model: Model, samples: ComparedSamples) -> None:
    """Compare two models that take normalized inputs at two other sizes than the data set's, where it has fixed ones.

    Raises StageError, with the sizes, where their outputs differ.
    """
    specs, columns = model.signature.inputs, samples.data.info.signature.inputs
    numbers = numbers_of((spec.shape, of.shape) for spec, of in zip(specs, columns, strict=True))
    if not numbers:
        return
    compared = []
    for others in _other_numbers(numbers):
        shapes = ", ".join(f"{spec.name} {sized(spec.sample_shape, others)}" for spec in specs if spec.symbols)
        resized = ResizedSamples(
            samples.data, samples.split, min(samples.max_samples, _NUM_SAMPLES), samples.seed, specs, others
        )
        try:
            for parity in parities_of(ctx, exported, model, resized).values():
                parity.check()
        except StageError as error:
            raise StageError(f"for samples of another size, {shapes}: {error}") from error
        compared.append(shapes)
    ctx.log(f"compared at other sizes, too: {' and '.join(compared)}")
    ctx.metric(num_other_sizes=len(compared))


def _other_numbers(numbers: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield other numbers for names of symbols: of a smaller picture, and of a larger square.

    The smaller ones are odd where the data set's are even: pictures that are halved differ in what is left.
    """
    smaller = {name: number * 2 // 3 + 1 + index for index, (name, number) in enumerate(numbers.items())}
    yield {name: number + (number - numbers[name] + 1) % 2 for name, number in smaller.items()}
    yield dict.fromkeys(numbers, max(numbers.values()) * 3 // 2)
