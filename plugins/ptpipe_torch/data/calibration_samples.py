"""Refuse calibration samples whose ranges would be meaningless.

Shape legend: B samples of a batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_torch.data.data import Batch, Data


def num_calibration_samples(kind: str, data: Data, split: str, max_samples: int | None) -> int:
    """Return how many of a split's first samples there are to calibrate on. `max_samples`: None: all.

    Raises StageError, which names the stage's `kind`, where there are not two that differ. What a network makes of them
    may be constant all the same: it has dead units.
    """
    found = len(data.splits[split])
    num_samples = min(max_samples or found, found)
    if num_samples < 2:
        raise StageError(
            f"{kind}: {split} has {found} sample{'s' * (found != 1)}, and ranges need two at least (hundreds to be of "
            "use): give the data stage a larger calibration_size, or calibrate on another split"
        )
    # Each against the first, one at a time: of real samples, the second one differs, and no others are read.
    first = _raw_inputs(data, split, 0)
    if all(_are_equal(first, _raw_inputs(data, split, position)) for position in range(1, num_samples)):
        raise StageError(
            f"{kind}: all {num_samples} samples of {split} are the same{_constants(first)}: calibrate on real ones"
        )
    return num_samples


def check_finite(kind: str, data: Data, split: str, batch: Batch) -> None:
    """Raise StageError, which names the stage's `kind` and the sample, where an input is NaN or infinite."""
    for name, tensor in batch.inputs.items():
        is_finite_B = tensor[: len(batch)].isfinite().reshape(len(batch), -1).all(dim=1)
        if not is_finite_B.all():
            sample = data.splits[split].ids[int(batch.indices_N[int(is_finite_B.int().argmin())])]
            raise StageError(
                f"{kind}: {name} of {sample} (split {split}) is not finite: mend the data, or leave the sample out"
            )


def _raw_inputs(data: Data, split: str, position: int) -> dict[str, npt.NDArray[np.generic]]:
    return {name: column.take(np.array([position])) for name, column in data.splits[split].inputs.items()}


def _are_equal(one: dict[str, npt.NDArray[np.generic]], other: dict[str, npt.NDArray[np.generic]]) -> bool:
    return all(np.array_equal(values, other[name]) for name, values in one.items())


def _constants(inputs: dict[str, npt.NDArray[np.generic]]) -> str:
    """Return the value of each input that has but one."""
    found = [
        f"{name} is {values.flat[0]}"
        for name, values in inputs.items()
        if values.size and (values == values.flat[0]).all()
    ]
    return f" ({', '.join(found)} throughout)" if found else ""
