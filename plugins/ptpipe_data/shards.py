"""Tar shards in WebDataset's convention: images with their classes, or what `ptpipe shards` wrote of any data set.

Shape legend: N samples.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from ptpipe import Context, StageError, nearest
from ptpipe_data.classes import classification, refuse_single_class, report_absent
from ptpipe_data.image_folder import normalization
from ptpipe_data.labelled_images import image_info, images_of, labelled_images, labels_of
from ptpipe_data.paths import dataset_name
from ptpipe_data.shard_scanner import Sample, ScannedShards, ShardScanner
from ptpipe_data.shards_paths import DESCRIPTION, find_shards
from ptpipe_data.splitting import draw_missing_splits, draw_splits
from ptpipe_data.tar import TarMember
from ptpipe_torch import ArrayColumn, Column, ColumnInfo, Data, DatasetInfo, Split, Task
from ptpipe_torch.data.data_folder import AssetName, check_names
from ptpipe_torch.data.image_members import AnyFormat, ImageMembers
from ptpipe_torch.data.images import FORMATS
from ptpipe_torch.data.shards import ArrayMembers, TarColumn, TarMembers
from ptpipe_torch.files import open_regular

if TYPE_CHECKING:
    from ptpipe_data.image_config import ShardsConfig

_IMAGE_EXTENSIONS = frozenset(suffix[1:] for suffixes in FORMATS.values() for suffix in suffixes)
_TEST_FRACTION = 0.1
_MAX_NAME = 200
_NUMBER = re.compile(r"[0-9]{1,18}")
_MAX_LABEL_BYTES = 1 << 20
_STRAY = 0.05
"""Fraction of train whose classes, if they alone are no numbers, are mistakes."""
_IN_MEMORY_BYTES = 32
"""Arrays of at most so many bytes a sample, such as labels, are read once and kept."""
_IMAGE, _LABEL = "image", "label"
_FACTS = (
    "image_size",
    "resize",
    "channels",
    "normalize",
    "mean",
    "std",
    "max_pixels",
    "label",
    "class_names",
    "classes",
)
"""Options of facts that the description beside the shards has."""

SplitName: TypeAlias = Literal["train", "val", "test"]
"""Splits that have shards: calibration is drawn from them."""


class Description(BaseModel):
    """What `data.json` says of the shards beside it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Literal[1] = 1
    name: str
    inputs: dict[str, dict[str, Any]] = Field(min_length=1, max_length=1000)
    task: dict[str, Any]
    columns: dict[str, AnyFormat]
    """What the members KEY.COLUMN.EXTENSION hold."""
    splits: dict[SplitName, NonNegativeInt]
    """Number of samples."""
    assets: dict[AssetName, str] = {}
    """SHA-256 of files beside the shards."""

    def info(self) -> DatasetInfo:
        """Return the facts of the data set. Raises ValueError or StageError where they are none."""
        inputs = {name: ColumnInfo.from_json(content) for name, content in self.inputs.items()}
        info = DatasetInfo(self.name, inputs, Task.from_json(self.task))
        check_names(info)
        if self.columns.keys() != info.columns.keys():
            raise ValueError(f"its columns are {', '.join(self.columns)}, and those of its task and inputs others")
        return info


def load_shards(config: ShardsConfig, ctx: Context) -> Data:
    """Return the data set in `config.path`. Raises StageError, with shard and sample, where it is none."""
    root, shards = find_shards(config)
    scanner = ShardScanner(root, ctx, sum(map(len, shards.values())))
    if (root / DESCRIPTION).is_file():
        return _load_described(scanner, shards, config, ctx.seed)
    return _load_images(scanner, shards, config, ctx.seed)


def _load_images(scanner: ShardScanner, shards: Mapping[str, Sequence[Path]], config: ShardsConfig, seed: int) -> Data:
    """Return images and their classes."""
    label_extension, _, label_field = config.label.partition(".")

    def choose(sample: Sample) -> Mapping[str, TarMember]:
        images = [member for extension, member in sample.items() if extension in _IMAGE_EXTENSIONS]
        if len(images) != 1:
            raise LookupError(f"{len(images)} images ({', '.join(sorted(_IMAGE_EXTENSIONS))}), not 1")
        if label_extension not in sample:
            raise LookupError(f"no .{label_extension}, where its class is (option `label`)")
        return {_IMAGE: images[0], _LABEL: sample[label_extension]}

    scanned = {split: scanner.scan(paths, choose) for split, paths in shards.items()}
    _refuse_empty(scanned, shards)
    texts = {split: list(_labels(found.of(_LABEL), label_field)) for split, found in scanned.items()}
    names = _class_names(texts, scanned["train"], config)
    format_ = ImageMembers(
        size=config.image_size, resize=config.shorter_side, channels=config.channels, max_pixels=config.max_pixels
    )
    found = {
        split: labelled_images(
            np.array(list(of.ids()), dtype=np.str_),
            TarColumn(of.of(_IMAGE), format_),
            _numbers(texts[split], names, of),
        )
        for split, of in scanned.items()
    }
    splits = draw_missing_splits(found, config, seed, test_fraction=_TEST_FRACTION)
    images, labels_N = images_of(splits["train"]), labels_of(splits["train"])
    refuse_single_class(scanner.root, names)
    report_absent(np.bincount(labels_N, minlength=len(names)), names, scanner.ctx)
    task = classification(names, config.classes, labels_N)
    info = image_info(
        dataset_name(scanner.root), task, images, *normalization(images, config), resizing=config.resizing
    )
    return Data(info, splits, config.loader_options())


def _refuse_empty(scanned: Mapping[str, ScannedShards], shards: Mapping[str, Sequence[Path]]) -> None:
    for split, found in scanned.items():
        if not len(found):
            raise StageError(f"{shards[split][0]}: the shards of {split} have no samples (files KEY.EXTENSION)")


def _labels(members: TarMembers, json_field: str) -> Iterator[int | str]:
    """Yield the class of each sample: a number or a name."""
    if (large := members.members_N3[:, 2] > _MAX_LABEL_BYTES).any():
        raise StageError(f"{members.root}: sample {members.keys_N[large][0].decode()} has a label of over 1 MB")
    for _, name, content in members.read(np.arange(len(members))):  # in the order in which they were listed
        try:
            label = json.loads(content)[json_field] if json_field else content.decode().strip()
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            what = f"its json has no field {json_field}" if json_field else "its class is no text"
            raise StageError(f"{name}: {what} ({type(error).__name__})") from error
        if isinstance(label, bool) or not isinstance(label, int | str) or not 0 < len(str(label)) <= _MAX_NAME:
            raise StageError(f"{name}: its class is {str(label)[:100]!r}, neither a number nor a name")
        if isinstance(label, int) and label < 0:
            raise StageError(f"{name}: its class is {label}; classes are numbered 0, 1, 2, ...")
        yield int(label) if isinstance(label, str) and _NUMBER.fullmatch(label) else label


def _class_names(
    labels: Mapping[str, Sequence[int | str]], train: ScannedShards, config: ShardsConfig
) -> tuple[str, ...]:
    """Return the names of the classes: numbers, unless train has names."""
    if config.class_names:
        return config.class_names
    named = [(id_, label) for id_, label in zip(train.ids(), labels["train"], strict=True) if isinstance(label, str)]
    if 0 < len(named) <= _STRAY * len(train):
        (id_, label), *_ = named
        raise StageError(
            f"{train.root}: {id_} has the class {label[:100]!r}, and nearly all others a number: mend it, or name all "
            "classes by class_names"
        )
    if named:
        return tuple(sorted({str(label) for label in labels["train"]}))
    every = {label for of in labels.values() for label in of if isinstance(label, int)}
    if max(every) > 2 * sum(map(len, labels.values())):
        raise StageError(f"classes are numbered 0, 1, 2, ..., and a sample has the class {max(every)}; see class_names")
    return tuple(map(str, range(max(every) + 1)))


def _numbers(labels: Sequence[int | str], names: Sequence[str], scanned: ScannedShards) -> npt.NDArray[np.int64]:
    """Return the number of each label's class. Raises StageError, with the sample, for what is no class."""
    known: dict[int | str, int] = {number: number for number in range(len(names))}
    # A name of digits is read as a number: `7` is the class of that name where there is one.
    known |= {int(name) if _NUMBER.fullmatch(name) else name: number for number, name in enumerate(names)}
    for id_, label in zip(scanned.ids(), labels, strict=True):
        if label not in known:
            close = nearest(str(label), names)
            hint = f"did you mean {close!r}?" if close else f"there are {', '.join(names[:20])}"
            raise StageError(f"{scanned.root}: {id_} has the class {str(label)[:100]!r}, which is none ({hint})")
    return np.array([known[label] for label in labels], dtype=np.int64)


def _load_described(
    scanner: ShardScanner, shards: Mapping[str, Sequence[Path]], config: ShardsConfig, seed: int
) -> Data:
    """Return the data set that `ptpipe shards` wrote."""
    path = scanner.root / DESCRIPTION
    try:
        description = Description.model_validate_json(path.read_bytes())
        info = description.info()
    except ValueError as error:
        raise StageError(f"{path} describes no shards: {' '.join(str(error).split())[:300]}") from error
    _refuse_decided(config, description, path)
    extensions = {name: _extensions(name, of) for name, of in description.columns.items()}

    def choose(sample: Sample) -> Mapping[str, TarMember]:
        return {name: _one_of(sample, wanted) for name, wanted in extensions.items()}

    found = {}
    for split, num_samples in description.splits.items():
        paths = shards.get(split, ())
        scanned = scanner.scan(paths, choose)
        if len(scanned) != num_samples:
            raise StageError(
                f"{scanner.root}: {len(paths)} shards of {split} have {len(scanned)} samples; {path.name} says "
                f"{num_samples}: some are missing"
            )
        if num_samples:
            found[split] = _described_split(scanned, description, info)
    if "train" not in found:
        raise StageError(f"{path} describes no shards of train")
    nothing = found["train"].subset(np.empty(0, dtype=np.int64))
    splits = draw_splits(found["train"], found.get("test", nothing), config, seed, val=found.get("val", nothing))
    return Data(info, splits, config.loader_options(), _assets(scanner.root, description.assets))


def _refuse_decided(config: ShardsConfig, description: Description, path: Path) -> None:
    """Raise StageError for an option of what was decided when the shards were written."""
    empty = [f"{name}_size" for name in ("val", "test") if not description.splits.get(name)]  # nothing is drawn for it
    for name in (*_FACTS, *empty):
        value = getattr(config, name)
        if value not in (type(config).model_fields[name].default, 0):
            raise StageError(f"{name} was decided when these shards were written: {path} has it; leave it out")


def _extensions(name: str, format_: AnyFormat) -> frozenset[str]:
    endings = _IMAGE_EXTENSIONS if isinstance(format_, ImageMembers) else {"npy"}
    return frozenset(f"{name}.{ending}".lower() for ending in endings)


def _one_of(sample: Sample, wanted: Iterable[str]) -> TarMember:
    for extension in wanted:
        if extension in sample:
            return sample[extension]
    raise LookupError(f"none of {', '.join(f'.{extension}' for extension in sorted(wanted))}")


def _described_split(scanned: ScannedShards, description: Description, info: DatasetInfo) -> Split:
    ids = np.array([unquote(key.decode()) for keys in scanned.keys for key in keys], dtype=np.str_)
    inputs, targets = (
        {name: _column(scanned.of(name), description.columns[name]) for name in side}
        for side in (info.inputs, info.targets)
    )
    return Split(ids, inputs, targets)


def _column(members: TarMembers, format_: AnyFormat) -> Column:
    column = TarColumn(members, format_)
    if format_.size_bytes is not None:
        column.take(np.flatnonzero(members.members_N3[:, 2] != format_.size_bytes)[:1])  # raises what is wrong with it
    if isinstance(format_, ArrayMembers) and format_.value_bytes <= _IN_MEMORY_BYTES:
        return ArrayColumn(column.values())
    return column


def _assets(root: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    assets = {}
    for name, digest in digests.items():
        try:
            with open_regular(root / name) as file:
                assets[name] = file.read()
        except OSError as error:
            raise StageError(f"{root / name}, a part of this data set, can't be read: {error.strerror}") from error
        if hashlib.sha256(assets[name]).hexdigest() != digest:
            raise StageError(f"{root / name} is not what was written with these shards")
    return assets
