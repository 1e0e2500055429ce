"""A model's outputs as the targets of a data set: the work of `data.teacher_outputs`.

Shape legend: N distinct samples of all splits, S samples of one split, B of a batch, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError
from ptpipe_data.tasks import moments
from ptpipe_torch import ArrayColumn, Data, Deployable, Predictor, Split, TeacherOutputs, TensorSpec
from ptpipe_torch.data.column import SubsetColumn
from ptpipe_torch.model.deployable import check_output
from ptpipe_torch.task.teacher_outputs import TeacherInfo, TeacherOutput

if TYPE_CHECKING:
    from ptpipe_torch import InputForm


def with_teacher_outputs(ctx: Context, model: Deployable, data: Data) -> Data:
    """Return the data set with what the model returns as targets. Its splits share them, as they share samples."""
    name = ctx.input_names.get("model", ("the model",))[0]
    data.info.check_fit(name, model.signature)
    outputs = model.signature.with_sizes_of(data.info.signature.inputs).outputs
    compared = _compared(name, outputs)
    for spec in compared:
        TeacherInfo(dtype="float32").check_augment(spec.name, data.loader.augment)
    rows = _rows_of(data.splits)
    files = {spec.name: ctx.scratch / f"output_{number}.f32" for number, spec in enumerate(compared)}
    try:
        with model.predictor() as predict:
            _write(_Teacher(name, predict, compared, model.input_form), ctx, data, rows, files)
        arrays = _mapped(compared, files)
        task = _task(outputs, arrays, len(data.splits["train"]))
        columns = {of.name: ArrayColumn(arrays[of.name]) for of in compared}
        splits = {
            split: Split(of.ids, of.inputs, {own: SubsetColumn(column, rows[split]) for own, column in columns.items()})
            for split, of in data.splits.items()
        }
        return Data(replace(data.info, task=task), splits, data.loader, data.assets)
    except BaseException:
        for path in files.values():
            path.unlink(missing_ok=True)
        raise


def _compared(name: str, outputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the outputs that have floats. Raises StageError where there are none, or one has no fixed size."""
    compared = [spec for spec in outputs if spec.is_float]
    if not compared:
        raise StageError(f"{name} returns {', '.join(map(str, outputs))}: no floats that a network could learn")
    for spec in compared:
        if spec.symbols:
            raise StageError(
                f"{name} returns {spec}, whose {spec.symbols[0]} differs from batch to batch: only outputs of a fixed "
                "size can be targets"
            )
    return compared


def _rows_of(splits: Mapping[str, Split]) -> dict[str, npt.NDArray[np.int64]]:
    """Return for each split the rows of its samples, int64 (S,). A sample has one row; those of train come first."""
    names = list(splits)
    ids = np.concatenate([splits[name].ids for name in names])
    _, firsts, numbers = np.unique(ids, return_index=True, return_inverse=True)
    rows = np.argsort(np.argsort(firsts))[numbers]
    ends = np.cumsum([len(splits[name]) for name in names])
    return dict(zip(names, np.split(rows, ends[:-1]), strict=True))


class _Teacher:
    """Returns the compared outputs of batches."""

    def __init__(self, name: str, predict: Predictor, specs: Sequence[TensorSpec], input_form: InputForm) -> None:
        self._name, self._predict, self._specs, self._input_form = name, predict, specs, input_form

    def outputs(
        self, data: Data, split: str, order_S: npt.NDArray[np.int64]
    ) -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        """Yield the outputs by name, float32 (B, ...). Raises StageError where a value is not finite."""
        for batch in data.batches(split, order_N=order_S, input_form=self._input_form):
            returned = self._predict(batch.input_arrays())
            ids_B = data.splits[split].ids[batch.indices_N.numpy()]
            yield {spec.name: self._checked(spec, returned[spec.name], ids_B) for spec in self._specs}

    def _checked(self, spec: TensorSpec, output: npt.NDArray[Any], ids_B: npt.NDArray[np.str_]) -> npt.NDArray[Any]:
        check_output(self._name, spec, output, len(ids_B))
        with np.errstate(over="ignore"):  # of float64: infinity is refused
            values = np.ascontiguousarray(output, dtype=np.float32)
        finite_B = np.isfinite(values).reshape(len(ids_B), -1).all(axis=1)
        if not finite_B.all():
            raise StageError(f"{self._name}: the {spec.name} of sample {ids_B[int(finite_B.argmin())]} is not finite")
        return values


def _write(
    teacher: _Teacher,
    ctx: Context,
    data: Data,
    rows: Mapping[str, npt.NDArray[np.int64]],
    files: Mapping[str, Path],
) -> None:
    """Write each output of all samples to its file, row after row: a full disk is an OSError, not a fault in a map."""
    total = 1 + max(int(rows_S.max(initial=-1)) for rows_S in rows.values())
    num_done = 0
    with ExitStack() as stack:
        opened: dict[str, BinaryIO] = {name: stack.enter_context(path.open("wb")) for name, path in files.items()}
        for split, rows_S in rows.items():
            order_S = np.flatnonzero(rows_S >= num_done)
            for outputs in teacher.outputs(data, split, order_S):
                for name, values in outputs.items():
                    opened[name].write(values.data)
                num_done += len(values)
                ctx.progress(num_done, total, "samples")


def _mapped(specs: Sequence[TensorSpec], files: Mapping[str, Path]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the arrays, (N, ...), mapped from the files."""
    shapes = {spec.name: tuple(map(int, spec.sample_shape)) for spec in specs}
    return {name: np.memmap(files[name], np.float32, "c").reshape(-1, *shape) for name, shape in shapes.items()}


def _task(
    outputs: Sequence[TensorSpec], arrays: Mapping[str, npt.NDArray[np.float32]], num_train: int
) -> TeacherOutputs:
    """Return the task. Statistics are those of train, or of all samples where there is none."""
    every_output = []
    for spec in outputs:
        facts: dict[str, Any] = {"name": spec.name, "dtype": spec.dtype, "shape": spec.sample_shape}
        if spec.name in arrays:
            facts["channel_axis"], facts["std"] = _channels(arrays[spec.name][: num_train or None])
        every_output.append(TeacherOutput(**facts))
    return TeacherOutputs(every_output=tuple(every_output))


def _channels(values: npt.NDArray[np.float32]) -> tuple[int, tuple[float, ...]]:
    """Return a sample's axis of channels and the standard deviation of each.

    The second of a tensor's axes, as torch has it; of three axes the last one where it is the one whose values differ
    more in size: detectors return (B, K, P) or (B, P, K), with boxes and scores along K.
    """
    if values.ndim == 1:
        values = values[:, None]
    axes = (0, 1) if values.ndim == 3 else (0,)
    deviations = {axis: moments(values, 1 + axis)[1] for axis in axes}
    axis = max(axes, key=lambda of: float(np.ptp(np.log(deviations[of]))))
    return axis, tuple(deviations[axis].tolist())
