"""A data set's folder in the store: JSON, and arrays as `.npy` files that are memory-mapped when read.

Splits drawn from the same source (val and calibration from the training images) share one file of pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_torch.data.data import LOADING_OPTIONS, DatasetInfo, LoaderOptions, Split
from ptpipe_torch.data.images import ArrayImages, FileImages, Images, SubsetImages, flatten

if TYPE_CHECKING:
    from ptpipe_torch.data.data import Data

_RECORD = "data.json"
_CHUNK_BYTES = 32 << 20


def write_data(data: Data, folder: Path) -> None:
    """Write a data set into an empty folder, without pixels that no split uses."""
    flat = {name: flatten(split.images) for name, split in data.splits.items()}
    sources = {id(source): source for source, _ in flat.values()}
    numbers = {key: number for number, key in enumerate(sources)}
    described, used = [], []
    for key, source in sources.items():
        used.append(
            np.unique(np.concatenate([positions for drawn_from, positions in flat.values() if drawn_from is source]))
        )
        described.append(_write_source(source, used[-1], folder / f"images_{numbers[key]}.npy"))
    for name, (source, positions_N) in flat.items():
        np.save(folder / f"{name}.positions.npy", np.searchsorted(used[numbers[id(source)]], positions_N))
        np.save(folder / f"{name}.labels.npy", data.splits[name].labels_N)
        np.save(folder / f"{name}.ids.npy", np.char.encode(data.splits[name].ids, "utf-8"))
    record = {
        "info": asdict(data.info),
        "loader": {name: value for name, value in asdict(data.loader).items() if name not in LOADING_OPTIONS},
        "sources": described,
        "splits": {name: numbers[id(source)] for name, (source, _) in flat.items()},
    }
    (folder / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def read_data(folder: Path) -> tuple[DatasetInfo, dict[str, Split], LoaderOptions]:
    """Inverse of `write_data`. Raises StageError where the original folder of an image folder is missing."""
    record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    sources = [
        _read_source(described, folder / f"images_{number}.npy") for number, described in enumerate(record["sources"])
    ]
    splits = {name: _read_split(sources[source], folder, name) for name, source in record["splits"].items()}
    info: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record["info"].items()
    }
    loader = record["loader"] | {"augment": tuple(record["loader"]["augment"])}
    return DatasetInfo(**info), splits, LoaderOptions(**loader)


def _write_source(source: Images, used: npt.NDArray[np.int64], path: Path) -> dict[str, Any]:
    if isinstance(source, FileImages):
        np.save(path, source.paths_N[used])
        geometry = {"size": source.size, "resize": source.resize, "channels": source.channels}
        return {"kind": "files", "root": str(source.root), **geometry}
    if isinstance(source, ArrayImages) and len(used) == len(source):
        np.save(path, source.pixels_NHWC)
        return {"kind": "array"}
    shape_HWC = source.take(used[:1]).shape[1:]
    chunk = max(1, _CHUNK_BYTES // max(1, int(np.prod(shape_HWC))))
    pixels_NHWC = np.lib.format.open_memmap(path, "w+", np.uint8, (len(used), *shape_HWC))
    for start in range(0, len(used), chunk):
        pixels_NHWC[start : start + chunk] = source.take(used[start : start + chunk])
    pixels_NHWC.flush()
    return {"kind": "array"}


def _read_source(described: Mapping[str, Any], path: Path) -> Images:
    if described["kind"] == "array":
        # Copy-on-write: torch wants writable arrays, and the file is read-only.
        return ArrayImages(np.load(path, mmap_mode="c"))
    root = Path(described["root"])
    if not root.is_dir():
        raise StageError(
            f"the images of this data set are gone: {root} is not there; put it back, or rerun the data stage"
        )
    return FileImages(root, np.load(path), described["size"], described["resize"], described["channels"])


def _read_split(source: Images, folder: Path, name: str) -> Split:
    ids, labels_N, positions_N = (np.load(folder / f"{name}.{array}.npy") for array in ("ids", "labels", "positions"))
    return Split(_decoded(ids), labels_N, SubsetImages(source, positions_N))


def _decoded(ids: npt.NDArray[np.bytes_]) -> npt.NDArray[np.str_]:
    try:
        return ids.astype(np.str_)  # many times faster than decoding, but ASCII only
    except UnicodeDecodeError:
        return np.char.decode(ids, "utf-8")
