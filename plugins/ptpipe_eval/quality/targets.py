"""Tell samples apart that have the same ids, by what was to be predicted."""

from __future__ import annotations

import hashlib

import numpy as np

from ptpipe_torch import Split

_PART = 1024
"""Samples that are read at a time."""


def targets_sha256(split: Split) -> str:
    """Return the SHA-256 of the targets, in the order of the samples' ids.

    Of the inputs it has nothing: a tokenizer or categories that are learned from other samples of train change them.
    """
    order_N = np.argsort(split.ids, kind="stable").astype(np.int64)
    digest = hashlib.sha256()
    for name, column in sorted(split.targets.items()):
        digest.update(name.encode())
        for start in range(0, len(order_N), _PART):
            rows = column.take(order_N[start : start + _PART])
            digest.update(f"{rows.dtype.str} {rows.shape}".encode())
            digest.update(rows.tobytes())
    return digest.hexdigest()
