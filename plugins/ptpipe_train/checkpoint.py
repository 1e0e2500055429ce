"""Checkpoint files in a stage's scratch folder: written atomically, verified when they are read.

A checkpoint is two files, `step-<number>.safetensors` and then `step-<number>.json`. The second holds a digest of the
first and one of itself, so that neither a partial write nor a flipped bit goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file

from ptpipe import atomic_path, write_atomically
from ptpipe_torch.files import file_digest

_FORMAT = 1
NUM_KEPT = 2
"""Checkpoints that stay on disk: where the newest is damaged, the one before is used."""
_TENSORS, _METADATA = ".safetensors", ".json"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training at a step: named tensors, and JSON metadata."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Damage:
    """A checkpoint that can't be read, and why."""

    name: str
    reason: str


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint durably, then remove all but the two newest. Raise OSError where the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    name = checkpoint_name(checkpoint.step)
    with atomic_path(folder / (name + _TENSORS)) as file:
        save_file(_unshared(checkpoint.tensors), file)
        tensors_sha256 = file_digest(file)
    content = {
        "format": _FORMAT,
        "step": checkpoint.step,
        "tensors_sha256": tensors_sha256,
        "metadata": checkpoint.metadata,
    }
    body = json.dumps(content, allow_nan=False)
    write_atomically(folder / (name + _METADATA), f"{_digest(body)}\n{body}\n".encode())
    kept = _names(folder)[:NUM_KEPT]
    _remove(file for file in folder.iterdir() if file.stem not in kept)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Read the checkpoint of that step. Raise OSError where it is missing, ValueError where it is damaged."""
    return _read(folder, checkpoint_name(step))


def read_checkpoints(folder: Path) -> Iterator[Checkpoint | Damage]:
    """Yield the checkpoints of a folder, newest first."""
    for name in _names(folder):
        try:
            yield _read(folder, name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield Damage(name, str(error))


def remove_checkpoint(folder: Path, name: str) -> None:
    """Remove the checkpoint of that name, if there is one."""
    _remove(folder.glob(f"{name}.*"))


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU, copied only where two share memory, which safetensors refuses to write."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    num_users = Counter(tensor.untyped_storage().data_ptr() for tensor in plain.values())
    return {
        name: tensor.clone() if num_users[tensor.untyped_storage().data_ptr()] > 1 else tensor
        for name, tensor in plain.items()
    }


def checkpoint_name(step: int) -> str:
    """Return the name of that step's files, without suffix."""
    return f"step-{step:012d}"


def _remove(files: Iterable[Path]) -> None:
    for file in list(files):
        file.unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    """Return the names of the checkpoints, newest first."""
    return sorted((file.stem for file in folder.glob(f"step-*{_METADATA}")), reverse=True)


def _read(folder: Path, name: str) -> Checkpoint:
    digest, _, body = (folder / (name + _METADATA)).read_text(encoding="utf-8").partition("\n")
    body = body.removesuffix("\n")
    if _digest(body) != digest:
        raise ValueError("its metadata is not as it was written")
    content = json.loads(body)
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']}, not {_FORMAT}")
    tensors = (folder / (name + _TENSORS)).read_bytes()
    if hashlib.sha256(tensors).hexdigest() != content["tensors_sha256"]:
        raise ValueError("its tensors are not as they were written")
    return Checkpoint(content["step"], load(tensors), content["metadata"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
