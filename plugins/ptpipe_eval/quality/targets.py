"""Tell samples apart that have the same ids, by what was to be predicted."""

from __future__ import annotations

import hashlib

import numpy as np

from ptpipe_torch import Split, Task


def targets_sha256(split: Split, task: Task) -> str | None:
    """Return the SHA-256 of the targets, in the order of the samples' ids; None where the task can't tell them apart.

    Of the inputs it has nothing: a tokenizer or categories that are learned from other samples of train change them.
    """
    parts = task.target_bytes(split.targets, np.argsort(split.ids, kind="stable").astype(np.int64))
    if parts is None:
        return None
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
