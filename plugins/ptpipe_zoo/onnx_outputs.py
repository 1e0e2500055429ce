"""The outputs of somebody's ONNX file, where the data set is unlabeled and asks for none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from onnx import ValueInfoProto

from ptpipe import StageError, nearest
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.outputs import unlike_rows
from ptpipe_torch.model.signature import BATCH, DTYPES, TensorSpec
from ptpipe_torch.ort import ort


def chosen_outputs(
    path: Path, values: Iterable[ValueInfoProto], given: Mapping[str, str], inputs: Collection[str]
) -> dict[str, str]:
    """Return a name for each output of the file: as the option says, else all under their own.

    Names are those of identifiers, and none of `inputs`: what can't stand in one becomes an underscore. Raises
    StageError for an output that the file doesn't have, or a name that is none.
    """
    found = [value.name for value in values]
    for name, new in given.items():
        if name not in found:
            close = nearest(name, found)
            hint = f"did you mean {close!r}?" if close else f"there are {', '.join(found)}"
            raise StageError(f"outputs: {name!r} is not in {path.name} ({hint})")
        if not new.isidentifier():
            raise StageError(f"outputs: {new!r} is no name of letters, digits and underscores")
        if new in inputs:
            raise StageError(f"outputs: {new!r} is an input of the data set: call the output otherwise")
    if given:
        return dict(given)
    names: dict[str, str] = {}
    for name in found:
        new = re.sub(r"\W", "_", name)
        new = new if new.isidentifier() else f"_{new}"
        while new in names.values() or new in inputs:
            new += "_"
        names[name] = new
    return names


def found_outputs(
    path: Path, inputs: Sequence[TensorSpec], outputs: Mapping[str, str], batch_size: int | None
) -> tuple[TensorSpec, ...]:
    """Return dtypes and shapes of a file's outputs, found by running it for one sample and for two.

    `outputs`: their names, by those that they have in the user's file. `batch_size`: the only one that it takes.
    Raises StageError where an output has no row for each sample, as the boxes that non-maximum suppression leaves.
    """
    sizes, names = (1, 2) if batch_size is None else (batch_size,), list(outputs.values())
    try:
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        runs = [
            session.run(names, {spec.name: of.numpy() for spec, of in zip(inputs, zeros(inputs, size), strict=True)})
            for size in sizes
        ]
    except Exception as error:  # ONNX Runtime raises classes of its own that share no base
        raise StageError(f"ONNX Runtime can't run {path.name}: {' '.join(str(error).split())[:300]}") from error
    specs = []
    for name, *arrays in zip(names, *runs, strict=True):
        if (shown := unlike_rows([array.shape for array in arrays], sizes)) is not None:
            others = ", ".join(f"{old}: {new}" for old, new in outputs.items() if new != name)
            hint = f": name those that count, outputs: {{{others}}}" if others else ""
            raise StageError(
                f"{path.name}: {name} has the shape {shown} samples, and not a row of one size for each{hint}"
            )
        if str(arrays[0].dtype) not in DTYPES:
            raise StageError(f"{path.name}: {name} is {arrays[0].dtype}; outputs are {', '.join(DTYPES)}")
        specs.append(TensorSpec(name, str(arrays[0].dtype), (BATCH, *arrays[0].shape[1:])))
    return tuple(specs)
