"""Checkpoints of a stage in its scratch folder: written whole or not at all, checked when they are read.

A checkpoint is two files, `step-<number>.safetensors` and then `step-<number>.json`. The second holds the digest of
the first and one of itself, so that neither a torn write nor a flipped bit is taken for a state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from ptpipe import write_atomically

_FORMAT = 1
KEPT = 2
_TENSORS, _FACTS = ".safetensors", ".json"


@dataclass(frozen=True)
class Checkpoint:
    """A state as it was written. `facts` are JSON."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Damage:
    """A checkpoint that can't be used, and why."""

    name: str
    reason: str


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write it durably, then remove all but the two newest. Raises OSError where the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()})
    body = json.dumps(
        {
            "format": _FORMAT,
            "step": checkpoint.step,
            "tensors_sha256": hashlib.sha256(content).hexdigest(),
            "facts": checkpoint.facts,
        },
        allow_nan=False,
    )
    name = checkpoint_name(checkpoint.step)
    write_atomically(folder / (name + _TENSORS), content)
    write_atomically(folder / (name + _FACTS), f"{_digest(body)}\n{body}\n".encode())
    kept = _names(folder)[:KEPT]
    _remove(file for file in folder.iterdir() if file.stem not in kept)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Read the one of that step. Raises ValueError or OSError where it isn't there or isn't as it was written."""
    return _read(folder, checkpoint_name(step))


def read_checkpoints(folder: Path) -> Iterator[Checkpoint | Damage]:
    """Yield what is there, newest first."""
    for name in _names(folder):
        try:
            yield _read(folder, name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield Damage(name, str(error))


def remove_checkpoint(folder: Path, name: str) -> None:
    """Remove one that would stand before those that are written now."""
    _remove(folder.glob(f"{name}.*"))


def checkpoint_name(step: int) -> str:
    """What its files are called."""
    return f"step-{step:012d}"


def _remove(files: Iterable[Path]) -> None:
    for file in list(files):
        file.unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    """Names of the checkpoints, newest first."""
    return sorted((file.stem for file in folder.glob(f"step-*{_FACTS}")), reverse=True)


def _read(folder: Path, name: str) -> Checkpoint:
    digest, _, body = (folder / (name + _FACTS)).read_text(encoding="utf-8").partition("\n")
    body = body.removesuffix("\n")
    if _digest(body) != digest:
        raise ValueError("its description is not as it was written")
    description = json.loads(body)
    if description["format"] != _FORMAT:
        raise ValueError(f"it is of format {description['format']}, not {_FORMAT}")
    content = (folder / (name + _TENSORS)).read_bytes()
    if hashlib.sha256(content).hexdigest() != description["tensors_sha256"]:
        raise ValueError("its tensors are not as they were written")
    return Checkpoint(description["step"], load(content), description["facts"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
