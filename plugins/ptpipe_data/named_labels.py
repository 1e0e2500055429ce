"""Labels that are names, in arrays of text: classes are numbered in the order of their names.

Shape legend: N samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ptpipe import StageError, nearest

if TYPE_CHECKING:
    from ptpipe_data.arrays import Columns, Source
    from ptpipe_torch import Split


def numbered(sources: Mapping[str, Source], columns: Columns) -> tuple[Mapping[str, Source], Columns]:
    """Return the sources with numbers in place of names, and the columns with the names, by default sorted.

    Both as they are where labels are no names. Raises StageError where a sample has none, or one of another class.
    """
    config, target = columns.config, columns.target
    if config.task != "classification" or target is None:
        return sources, columns
    labels = {split: source.arrays[target] for split, source in sources.items() if target in source.arrays}
    texts = {split: array for split, array in labels.items() if array.dtype.kind == "U"}
    if not texts:
        return sources, columns
    for split in labels.keys() - texts.keys():
        where, other = sources[split].name, sources[next(iter(texts))].name
        raise StageError(f"{where}: {target} holds {labels[split].dtype}, and names in {other}: both must be the same")
    names = config.names or tuple(np.unique(np.concatenate([array.ravel() for array in texts.values()])).tolist())
    numbers = {name: number for number, name in enumerate(names) if name}
    found = dict(sources)
    for split, array in texts.items():
        source, names_N = sources[split], array.ravel().tolist()
        if (row := next((row for row, name in enumerate(names_N) if name not in numbers), None)) is not None:
            close = nearest(names_N[row], numbers)
            hint = f"did you mean {close!r}?" if close else "leave it out" if config.names is None else "see `names`"
            raise StageError(f"{source.name}: row {row} of {target} is {names_N[row]!r}, which is no class ({hint})")
        numbers_N = np.array([numbers[name] for name in names_N], dtype=np.int64)
        found[split] = replace(source, arrays={**source.arrays, target: numbers_N.reshape(array.shape)})
    return found, replace(columns, config=config.model_copy(update={"names": tuple(names)}))


def refuse_unseen(splits: Mapping[str, Split], names: tuple[str, ...]) -> None:
    """Raise StageError where a sample's class, one of `names`, is that of no sample of train: none could learn it."""
    ((target, train),) = splits["train"].targets.items()
    for split in splits.values():
        labels_N = split.targets[target].values()
        unseen_N = ~np.isin(labels_N, train.values())
        if unseen_N.any():
            row = int(unseen_N.argmax())
            name = names[labels_N[row]]
            raise StageError(f"{split.ids[row]}: {target} is {name!r}, a class that no sample of train has: add some")
