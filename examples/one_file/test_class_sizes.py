"""Run with `pytest`."""
# ruff: noqa: D103  # a test says what it is in its name

import numpy as np
from class_sizes import class_sizes

from ptpipe.sections import DotPlot
from ptpipe_torch import ArrayColumn, ArrayInfo, Classification, Data, DatasetInfo, Split


def split(*labels: int) -> Split:
    ids = np.array([f"{len(labels)}/{number}" for number in range(len(labels))])
    inputs = {"size": ArrayColumn(np.zeros((len(labels), 1), dtype=np.float32))}
    return Split(ids, inputs, {"labels": ArrayColumn(np.array(labels, dtype=np.int64))})


def test_every_class_has_a_dot_for_each_split() -> None:
    info = DatasetInfo(
        "pets", {"size": ArrayInfo(dtype="float32", shape=(1,))}, Classification(class_names=("cat", "dog"))
    )
    section = class_sizes("data", Data(info, {"train": split(0, 1, 1), "test": split(1, 1)}))
    (plot,) = section.blocks
    assert isinstance(plot, DotPlot)
    assert plot.names == ("cat", "dog")
    assert [[dot.value for dot in series.dots] for series in plot.series] == [[1, 2], [0, 2]]
