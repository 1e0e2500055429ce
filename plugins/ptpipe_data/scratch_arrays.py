"""Arrays of decoded images that are mapped from files in the scratch folder of a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

MakeArray: TypeAlias = Callable[[str, tuple[int, ...]], npt.NDArray[np.uint8]]
"""Of a name and a shape."""


@contextmanager
def scratch_arrays(folder: Path) -> Iterator[MakeArray]:
    """Yield a function that makes an array; if the `with` raises, the files of all that were made are deleted.

    With an image repaired the stage has another key, and these files would not be used again.
    """
    paths: list[Path] = []

    def make(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        paths.append(folder / f"{name}.npy")
        return np.lib.format.open_memmap(paths[-1], "w+", np.uint8, shape)

    try:
        yield make
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
