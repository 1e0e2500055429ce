"""Tell samples apart that have the same ids, by what was to be predicted.

Shape legend: N samples, S of a part, L tokens of the longest one, M words without a token, W words, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ptpipe_torch import Classification, Column, Split, Task, TokenClassification
from ptpipe_torch.task.own_functions import OwnFunctionsTask
from ptpipe_torch.task.token_classification import IGNORE, MISSED, TAGS

_PART_BYTES = 1 << 22
"""Of the targets that are read at a time."""


def targets_sha256(split: Split, task: Task) -> str | None:
    """Return the SHA-256 of the targets, in the order of the samples' ids; None where other samples may change them.

    Other samples of train may give classes other numbers, or words other tokens: of classes it has the names, of tags
    those of words, and of inputs nothing.
    """
    base = task.task if isinstance(task, OwnFunctionsTask) else task
    order_N, digest = np.argsort(split.ids, kind="stable").astype(np.int64), hashlib.sha256()
    if isinstance(base, TokenClassification):
        names_K = _names(base.class_names)
        for words_W in _tags_of_words(split, order_N, base.num_classes):
            digest.update(names_K[words_W].tobytes() + b"|")
        return digest.hexdigest()
    if any(column.lengths is not None for column in split.targets.values()):
        return None
    for name, column in sorted(split.targets.items()):
        for values_S in _parts(column, order_N):
            named_S = _names(base.class_names)[values_S] if isinstance(base, Classification) else values_S
            digest.update(np.ascontiguousarray(named_S).data)
        digest.update(f"|{name} {values_S.dtype.str} {values_S.shape[1:]}".encode())
    return digest.hexdigest()


def _parts(column: Column, order_N: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the targets of samples in an order, some at a time."""
    num_rows = max(1, _PART_BYTES // max(1, column.take(order_N[:1]).nbytes))
    for start in range(0, max(1, len(order_N)), num_rows):
        yield column.take(order_N[start : start + num_rows])


def _tags_of_words(split: Split, order_N: npt.NDArray[np.int64], num_classes: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the class of each word of a sample, (W,), whatever tokens stand for it."""
    tags, missed = split.targets[TAGS], split.targets.get(MISSED)
    for row in range(len(order_N)):
        tags_L = tags.take(order_N[row : row + 1])[0]
        places_W = (tags_L != IGNORE).nonzero()[0]
        words_W = tags_L[places_W]
        if missed is not None:
            missed_M = missed.take(order_N[row : row + 1])[0]
            missed_M = missed_M[missed_M != IGNORE]
            # A word that is missed stands before the token at its place.
            order_W = np.concatenate([missed_M // num_classes, places_W]).argsort(kind="stable")
            words_W = np.concatenate([missed_M % num_classes, words_W])[order_W]
        yield words_W


def _names(class_names: tuple[str, ...]) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each class's name, (K,)."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in class_names)
    return np.frombuffer(digests, np.uint64)
