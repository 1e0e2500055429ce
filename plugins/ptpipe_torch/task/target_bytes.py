"""Targets as bytes that tell samples apart, whatever the other samples of a data set are.

Shape legend: N samples, S of a part, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ptpipe_torch.data.column import Column

_PART_BYTES = 1 << 22
"""Of the targets that are read at a time."""


def bytes_of(
    targets: Mapping[str, Column], order_N: npt.NDArray[np.int64], class_names: Sequence[str] = ()
) -> Iterator[bytes | memoryview]:
    """Yield the targets of samples, in an order. `class_names`: of the classes whose numbers they are, if any."""
    bits_K = name_bits(class_names)
    for name, column in sorted(targets.items()):
        for values_S in _parts(column, order_N):
            yield np.ascontiguousarray(bits_K[values_S] if class_names else values_S).data.cast("B")
        yield f"|{name} {values_S.dtype.str} {values_S.shape[1:]}".encode()


def name_bits(class_names: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return 64 bits for the name of each class, (K,): its number may be another with other samples."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in class_names)
    return np.frombuffer(digests, np.uint64)


def _parts(column: Column, order_N: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.generic]]:
    num_rows = max(1, _PART_BYTES // max(1, column.take(order_N[:1]).nbytes))
    for start in range(0, max(1, len(order_N)), num_rows):
        yield column.take(order_N[start : start + num_rows])
