"""A data set's folder in the store: JSON, and arrays as `.npy` files that are memory-mapped when read.

Splits drawn from the same source (val and calibration from the training images) share one file of pixels.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ptpipe import IntegrityError, StageError
from ptpipe_torch.data.data import LOADING_OPTIONS, DatasetInfo, LoaderOptions, Split
from ptpipe_torch.data.images import ArrayImages, FileImages, Images, SubsetImages, flatten

if TYPE_CHECKING:
    from ptpipe_torch.data.data import Data

_RECORD = "data.json"
_CHUNK_BYTES = 32 << 20


class _Part(BaseModel):
    """A part of the record: the bounds keep a record that somebody else wrote from starting a thousand processes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Info(_Part):
    name: str
    class_names: tuple[str, ...]
    shape_CHW: tuple[PositiveInt, PositiveInt, PositiveInt]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class _Loader(_Part):
    batch_size: int = Field(ge=1, le=1_000_000)
    augment: tuple[str, ...]


class _Source(_Part):
    kind: Literal["array", "files"]
    root: str = ""
    size: int = Field(1, ge=1, le=8192)
    resize: int = Field(1, ge=1, le=8192)
    channels: Literal[1, 3] = 3
    max_pixels: int = Field(1, ge=1)


class _Record(_Part):
    info: _Info
    loader: _Loader
    sources: tuple[_Source, ...]
    splits: dict[Literal["train", "val", "test", "calibration"], NonNegativeInt]


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
    """Inverse of `write_data`.

    Raises StageError where the original folder of an image folder is missing, IntegrityError for anything but a data
    set's folder.
    """
    try:
        record = _Record.model_validate_json((folder / _RECORD).read_bytes())
        sources = [
            _read_source(described, folder / f"images_{number}.npy") for number, described in enumerate(record.sources)
        ]
        splits = {str(name): _read_split(sources[source], folder, name) for name, source in record.splits.items()}
    except StageError:
        raise
    except Exception as error:  # NumPy parses the headers of arrays with Python's own parser
        raise IntegrityError(f"not a stored data set: {' '.join(str(error).split())[:300]}") from error
    return DatasetInfo(**dict(record.info)), splits, LoaderOptions(**dict(record.loader))


def _write_source(source: Images, used: npt.NDArray[np.int64], path: Path) -> dict[str, Any]:
    if isinstance(source, FileImages):
        np.save(path, source.paths_N[used])
        numbers = {name: getattr(source, name) for name in ("size", "resize", "channels", "max_pixels")}
        return {"kind": "files", "root": str(source.root), **numbers}
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


def _read_source(described: _Source, path: Path) -> Images:
    if described.kind == "array":
        # Copy-on-write: torch wants writable arrays, and the file is read-only.
        return ArrayImages(_read_array(path, "u", 4, mmap_mode="c"))
    root = Path(described.root)
    if not root.is_dir():
        raise StageError(
            f"the images of this data set are gone: {root} is not there; put it back, or rerun the data stage"
        )
    numbers = (described.size, described.resize, described.channels, described.max_pixels)
    return FileImages(root, _read_array(path, "S", 1), *numbers)


def _read_split(source: Images, folder: Path, name: str) -> Split:
    ids, labels_N, positions_N = (
        _read_array(folder / f"{name}.{array}.npy", kind, 1)
        for array, kind in (("ids", "S"), ("labels", "iu"), ("positions", "i"))
    )
    if not len(ids) == len(labels_N) == len(positions_N):
        raise ValueError(f"ids, labels and positions of {name} differ in number")
    if len(positions_N) and not 0 <= positions_N.min() <= positions_N.max() < len(source):
        raise ValueError(f"{name} has positions outside of its {len(source)} images")
    return Split(_decoded(ids), labels_N, SubsetImages(source, positions_N))


def _read_array(path: Path, kinds: str, num_axes: int, mmap_mode: Literal["c"] | None = None) -> npt.NDArray[Any]:
    """Read an array of a file's size. `kinds`: letters of `numpy.dtype.kind`."""
    # Mapped first: a header may announce any size, which would be allocated. Not np.load: it also reads other formats.
    array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="c")
    if array.dtype.kind not in kinds or array.ndim != num_axes:
        raise ValueError(f"{path.name} holds {array.dtype} {array.shape}")
    return array if mmap_mode else np.array(array)


def _decoded(ids: npt.NDArray[np.bytes_]) -> npt.NDArray[np.str_]:
    try:
        return ids.astype(np.str_)  # many times faster than decoding, but ASCII only
    except UnicodeDecodeError:
        return np.char.decode(ids, "utf-8")
