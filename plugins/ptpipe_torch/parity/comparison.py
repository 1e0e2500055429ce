"""Compare an exported model with its torch model on real samples.

Shape legend: N samples, K columns of an output.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ptpipe import JSON, Context, StageError
from ptpipe_torch.data.data import Data
from ptpipe_torch.data.dataset_info import DatasetInfo
from ptpipe_torch.data.order import epoch_order
from ptpipe_torch.data.raw_form import NORMALIZED, InputForm
from ptpipe_torch.data.tokens import TokensInfo, before_padding
from ptpipe_torch.int8.fx import float_network
from ptpipe_torch.memory_format import to_channels_last
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.model import Model
from ptpipe_torch.model.outputs import predicted
from ptpipe_torch.model.signature import BATCH, Signature, TensorSpec
from ptpipe_torch.parity.parity import Logits, Parity, has_floats, with_noise
from ptpipe_torch.parity.rankings import RankedTensors, Rankings, comparable
from ptpipe_torch.random_outputs import random_draws_of
from ptpipe_torch.runtime import released_memory
from ptpipe_torch.task.task import Task
from ptpipe_torch.task.unlabeled import Unlabeled

BATCH_SIZE = 64
_MAX_VALUES = 1 << 25
"""Of outputs that are compared: those of pictures have millions a sample, and several models' are held at a time."""
_NUM_TRIED = 8
_NOISY_DB = 10.0
"""Below it, a tenth of the signal's power is noise."""
_RATIOS = ("quantization_sqnr_db", "quantization_channel_sqnr_db")
_POOR_DB, _POOR_AGREEMENT = 15.0, 0.97
"""Scores of classes that are below both are poor: noise may be large where classes are far apart, and decides where two
are nearly equal."""
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""By the names of the tensors, in the order of the signature."""


@dataclass(frozen=True)
class ComparedSamples:
    """The samples that two models are compared on: at most so many of a split, in an order that the seed decides."""

    data: Data
    split: str
    max_samples: int
    seed: int

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """In the split, of shape (N,)."""
        return epoch_order(len(self.data.splits[self.split]), self.seed, 0)[: self.max_samples]

    @property
    def batch_size(self) -> int:
        """That of the data set at most, which its user has memory for."""
        return min(BATCH_SIZE, self.data.loader.batch_size)

    def inputs(self, num_samples: int, form: InputForm = NORMALIZED) -> Arrays:
        """Return the inputs of the first ones, as one batch."""
        order_N = self.positions[:num_samples]
        (batch,) = self.data.batches(self.split, order_N=order_N, batch_size=num_samples, input_form=form)
        return batch.input_arrays()

    def batches(self, form: InputForm) -> Iterator[Arrays]:
        """Yield inputs in batches; a single sample first, to test other batch sizes."""
        order_N = self.positions
        for part_N, batch_size in ((order_N[:1], 1), (order_N[1:], self.batch_size)):
            for batch in self.data.batches(self.split, order_N=part_N, batch_size=batch_size, input_form=form):
                yield batch.input_arrays()

    def fitting(self, predict: Predictor, form: InputForm) -> ComparedSamples:
        """Return as many of the samples as there is memory for all their outputs."""
        outputs = predict(self.inputs(_NUM_TRIED, form))
        return replace(self, max_samples=min(self.max_samples, num_comparable(outputs)))


def num_comparable(outputs: Arrays) -> int:
    """Return on how many samples two models can be compared whose outputs are like these, of some samples."""
    num_samples = len(next(iter(outputs.values())))
    return max(1, _MAX_VALUES * num_samples // max(1, sum(output.size for output in outputs.values())))


def _accept(outputs: Arrays) -> None:
    """Check nothing."""


@dataclass(frozen=True)
class Exported:
    """A model that was exported, and what is known of it."""

    model: Deployable
    name: str
    """In messages: `ONNX file`."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """The quantization step of each quantized output, where it is known."""
    are_layers_proven: bool = False
    """See `Parity`."""
    input_form: InputForm = NORMALIZED
    """What it predicts from."""
    check: Callable[[Arrays], None] = _accept
    """Checks the outputs of a batch that the torch model doesn't have."""
    int8: nn.Module | None = None
    """The network of `Model.build` of a static or QAT int8 model, where the exporter has it; not changed."""
    rankings: Sequence[RankedTensors] = ()
    """Further outputs of its predictors: what it ranks, one after the other."""


def check_exportable(ctx: Context, model: Model, data: Data, split: str) -> None:
    """Raise StageError for a model that can't be exported yet, or whose export can't be compared on this data."""
    if model.recipe.backend and not model.recipe.convert:
        raise StageError(f"this model is prepared for int8 but not converted: put a quant.convert before {ctx.kind}")
    data.info.check_fit("the model", model.signature)
    if not model.recipe.backend and (reason := random_draws_of(model)):  # an int8 one was quantized
        raise StageError(reason)
    if not len(data.splits[split]):
        raise StageError(f"the data has no samples in {split} to compare the file with: choose another `split`")


def compare_outputs(ctx: Context, exported: Exported, model: Model, samples: ComparedSamples) -> dict[str, Parity]:
    """Return the parity of each output of a model by its name, and check the further ones that were exported.

    Gives a notice where quantization leaves little of an output. See `parities_of`.
    """
    parities = parities_of(ctx, exported, model, samples)
    _report_noise(ctx, parities)
    return parities


def parities_of(ctx: Context, exported: Exported, model: Model, samples: ComparedSamples) -> dict[str, Parity]:
    """Return the parity of each output of a model by its name, and check the further ones that were exported.

    Integers and truth values are left out: rounding decides between nearly equal classes, and they follow from floats.

    Where values are ranked, torch's networks compute with the positions that the exported model found. Raises
    StageError where they rank other values.

    The exported model has predicted all samples before torch's are built: each takes the memory of the weights at
    least once.
    """
    with exported.model.predictor() as predict:  # which returns its memory
        samples = samples.fitting(predict, exported.input_form)
        predicting = _Predicting(ctx, model.signature, samples, exported.rankings)

        def exported_outputs(inputs: Arrays) -> tuple[Arrays, ...]:
            outputs = predict(inputs)
            exported.check(outputs)
            return (predicting.with_order_kept(outputs),)

        found = predicting.outputs(exported_outputs, exported.input_form)
    with released_memory():
        of_torch = predicting.outputs_of_torch(model, exported.int8)
    _check_rankings(exported, model, found, of_torch)
    task = samples.data.info.task
    num_samples = len(samples.positions)
    parities = {}
    for spec in (spec for spec in model.signature.outputs if spec.name in found):
        rows, counted = [*found[spec.name], *of_torch[spec.name]], predicting.counted.get(spec.name)
        parity = _parity(exported, model, task, spec, rows, num_samples)
        parities[spec.name] = replace(parity, is_counted_N=np.concatenate(counted)) if counted else parity
    return parities


def _check_rankings(
    exported: Exported, model: Model, found: Mapping[str, list[Logits]], of_torch: Mapping[str, list[Logits]]
) -> None:
    for name in (of.comparable for of in exported.rankings if of.comparable in of_torch):
        spec, rows = TensorSpec("ranked_values", "float32", (BATCH,)), [*found[name], *of_torch[name]]
        try:
            _parity(exported, model, Unlabeled(), spec, rows, len(rows[0])).check()
        except StageError as error:
            raise StageError(f"where values are ranked (topk, sort): {error}") from error


def _report_noise(ctx: Context, parities: Mapping[str, Parity]) -> None:
    """Give a notice for each output of an int8 model of which quantization leaves little."""
    for name, parity in parities.items():
        figures = {figure: value for figure, value in parity.figures.items() if isinstance(value, float)}
        agreement = figures.get("quantization_top1_agreement")
        decibels = min((figures[name] for name in _RATIOS if name in figures), default=math.inf)
        if agreement is None:
            is_poor, classes, remedy = decibels < _NOISY_DB, "", ""
        else:
            is_poor = decibels < _POOR_DB and agreement < _POOR_AGREEMENT
            classes, remedy = f", and another class for {1 - agreement:.1%}", ", which quant.analyze finds"
        if is_poor:
            ctx.notice(
                f"{name}: int8 leaves {decibels:.1f} dB of signal over noise{classes}, compared with the float network "
                f"on {parity.num_samples} samples: calibrate on samples like those in use, or keep layers float "
                f"(`skip`){remedy}"
            )


@dataclass
class _Predicting:
    """Predicts the samples by several models, one after the other."""

    ctx: Context
    signature: Signature
    samples: ComparedSamples
    rankings: Sequence[RankedTensors] = ()
    order: list[list[torch.Tensor]] = field(default_factory=list)
    """The positions that the exported model found, in each batch."""
    num_done: int = 0
    counted: Mapping[str, list[npt.NDArray[np.bool_]]] = field(default_factory=dict)
    """What `counted_rows` says of each batch that was predicted last, by the names of outputs."""

    def with_order_kept(self, outputs: Arrays) -> Arrays:
        """Keep the positions that the exported model found in a batch; return its outputs with the values ranked."""
        self.order.append([torch.from_numpy(outputs[of.positions]) for of in self.rankings])
        values = [(of, torch.from_numpy(outputs[of.values])) for of in self.rankings]
        return {**outputs, **{of.comparable: comparable(ranked, ranked, of.axis).numpy() for of, ranked in values}}

    def outputs_of_torch(self, model: Model, int8: nn.Module | None) -> dict[str, list[Logits]]:
        """Return outputs of the model; for an int8 one also of its float network, and its own of noisy inputs."""
        generator, order = np.random.default_rng(self.samples.seed), iter(self.order)
        with torch_predictors(model, int8) as (predict, float_predict):

            def outputs(inputs: Arrays) -> tuple[Arrays, ...]:
                of = partial(self._in_order, next(order))
                if float_predict is None:
                    return (of(predict, inputs),)
                return of(predict, inputs), of(float_predict, inputs), of(predict, with_noise(inputs, generator))

            return self.outputs(outputs, NORMALIZED)

    def outputs(self, predict: Callable[[Arrays], tuple[Arrays, ...]], form: InputForm) -> dict[str, list[Logits]]:
        """Return each output by its name: of all samples, from each model whose outputs `predict` returns."""
        num_samples, info = len(self.samples.positions), self.samples.data.info
        names = [spec.name for spec in self.signature.outputs if spec.is_float]
        batches, self.counted = defaultdict[str, list[list[Logits]]](list), {name: [] for name in names}
        for inputs in self.samples.batches(form):
            predictions = predict(inputs)
            for name in names:
                batches[name].append([output_rows(info.task, name, outputs[name]) for outputs in predictions])
                if (is_counted_N := counted_rows(info, name, inputs)) is not None:
                    self.counted[name].append(is_counted_N)
            for name in (of.comparable for of in self.rankings):
                if all(name in outputs for outputs in predictions):
                    batches[name].append([_ranked_rows(outputs[name]) for outputs in predictions])
            self.num_done += len(next(iter(inputs.values())))
            self.ctx.progress(self.num_done, 2 * num_samples, "predictions")
        return {name: [np.concatenate(rows) for rows in zip(*of, strict=True)] for name, of in batches.items()}

    def _in_order(self, order: Sequence[torch.Tensor], predict: Predictor, inputs: Arrays) -> Arrays:
        """Return what a torch model predicts with the positions of `order`, and the values that it ranks itself."""
        if order:
            with Rankings(order) as rankings:
                outputs = predict(inputs)
            are_the_same = [own.shape for own in rankings.positions] == [given.shape for given in order]
            if are_the_same:  # else the exported model has left one out whose result is not used
                values = zip(self.rankings, rankings.values, strict=True)
                return {**outputs, **{of.comparable: ranked.numpy() for of, ranked in values}}
        return predict(inputs)


class Compared(Protocol):
    """An output that was compared."""

    @property
    def figures(self) -> Mapping[str, JSON]:
        """What is recorded of it."""


def figures_of(outputs: Mapping[str, Compared]) -> dict[str, JSON]:
    """Return what is recorded of all outputs; of several, with their names."""
    return {
        name if len(outputs) == 1 else f"{output}.{name}": value
        for output, compared in outputs.items()
        for name, value in compared.figures.items()
    }


def _parity(
    exported: Exported, model: Model, task: Task, spec: TensorSpec, rows: list[Logits], num_samples: int
) -> Parity:
    """Return the parity of one output. `rows`: those of each model."""
    exported_NK, torch_NK, *of_int8 = rows
    num_features = spec.sample_shape[1] if len(spec.sample_shape) == 2 else None
    float_NK, rerounded_NK = of_int8 or (None, None)
    return Parity(
        exported_NK,
        torch_NK,
        float_NK,
        None if task.output_scale else exported.steps.get(spec.name),
        are_class_scores=spec.name in task.class_scores,
        are_layers_proven=exported.are_layers_proven,
        rerounded_NK=rerounded_NK if has_floats(model.signature) else None,
        exported=exported.name,
        num_samples=num_samples,
        num_features=num_features if isinstance(num_features, int) else None,
    )


def output_rows(task: Task, name: str, output: npt.NDArray[Any]) -> Logits:
    """Return an output in its natural unit, as rows of the scores of classes, else of its second axis."""
    output = task.in_natural_units(output)
    axis = task.class_scores.get(name, 1)
    rows = output.reshape(len(output), -1) if output.ndim < 3 else np.moveaxis(output, axis, -1)
    return rows.reshape(-1, rows.shape[-1]).astype(np.float32, copy=False)


def counted_rows(info: DatasetInfo, name: str, inputs: Arrays) -> npt.NDArray[np.bool_] | None:
    """Return which of the `output_rows` of an output are of a token, not of the padding behind a text; None: all are.

    `inputs`: those of a batch. Only where each token has scores of classes are rows such of tokens.
    """
    tokens = {own: of for own, of in info.inputs.items() if isinstance(of, TokensInfo)}
    lengths = {of.length for of in tokens.values()}
    of_tokens = {spec.name for spec in info.task.outputs if lengths & {*spec.sample_shape[:1]}}
    if name not in of_tokens or info.task.class_scores.get(name) != 2:
        return None
    return before_padding(inputs, {own: of.padding_id for own, of in tokens.items()}).reshape(-1)


def _ranked_rows(values: npt.NDArray[Any]) -> Logits:
    """Return values along the last axis as rows; what masks some (-inf) counts as 0."""
    rows = values.reshape(-1, values.shape[-1]).astype(np.float32)
    return np.where(np.isfinite(rows), rows, np.float32(0))


@contextmanager
def torch_predictors(model: Model, int8: nn.Module | None = None) -> Iterator[tuple[Predictor, Predictor | None]]:
    """Yield a predictor of a model and one of the float network of an int8 model; None for a float model.

    `int8`: see `Exported`.
    """
    if not model.recipe.backend:
        with model.predictor() as predict:
            yield predict, None
        return
    int8 = model.build() if int8 is None else int8
    network = float_network(model.build_prepared())
    to_channels_last(network, zeros(model.signature.inputs, 2))

    def float_predict(inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        return predicted(network, inputs, model.signature)

    with model.predictor(built=int8) as predict:
        yield predict, float_predict
