"""The classes that masks have.

Shape legend: K classes, V values of a pixel, N masks of a part, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError
from ptpipe_data.classes import report_absent
from ptpipe_torch import Column


def count_classes(train_masks: Column, class_names: Sequence[str], ignore: int, ctx: Context) -> npt.NDArray[np.int64]:
    """Return the number of train's pixels of each class that counts, (K,); report the classes without any.

    Raises StageError where nothing can be learned: no pixel counts, or all that do have the same class.
    """
    counts_V = np.zeros(256, dtype=np.int64)
    for row in range(len(train_masks)):  # one at a time: all of them may be more than memory
        counts_V += np.bincount(train_masks.take(np.array([row])).ravel(), minlength=256)
    num_ignored, counts_V[ignore] = counts_V[ignore], 0
    counts_K = counts_V[: len(class_names)]
    found = [name for name, count in zip(class_names, counts_K, strict=True) if count]
    if len(found) < 2 and num_ignored:
        only = f"the class {found[0]!r} and the ignored value" if found else "the ignored value"
        raise StageError(
            f"train's masks have nothing but {only} {ignore} (option `ignore`): if {ignore} is a class, number the "
            f"classes 0, 1, ... in the masks, or set `values` of data.segmentation_folder, as [0, {ignore}]"
        )
    is_counted_K = np.arange(len(class_names)) != ignore
    report_absent(counts_K[is_counted_K], [name for k, name in enumerate(class_names) if k != ignore], ctx)
    return counts_K
