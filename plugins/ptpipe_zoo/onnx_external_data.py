"""Tensors that an ONNX file keeps in other files of its folder, as torch.onnx.export writes them ("external data")."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, TensorProto

from ptpipe import StageError
from ptpipe_torch.files import open_beneath, open_regular
from ptpipe_torch.model.onnx_bytes import MESSAGES, is_self_contained

_MAX_BYTES = 2**31 - 1
"""protobuf's own limit."""
_MAX_DIGITS = 19
"""Of a number of bytes; longer ones are expensive to convert."""


def read(path: Path) -> tuple[ModelProto, bool]:
    """Return an ONNX file with all of its tensors inside, and whether some were in other files.

    Raises StageError for a file that is not ONNX or too large, and where a tensor is outside of the file's folder.
    """
    model = _read_alone(path)
    has_external_data = False
    for tensor, content in _external_data(path, model):
        has_external_data = True
        tensor.ClearField("data_location")
        tensor.ClearField("external_data")
        tensor.raw_data = content
    return model, has_external_data


def digest(path: Path) -> str:
    """Return the SHA-256 of all tensors that are in other files. Raises StageError as `read` does."""
    found = hashlib.sha256()
    for _, content in _external_data(path, _read_alone(path)):
        found.update(content)
    return found.hexdigest()


def _read_alone(path: Path) -> ModelProto:
    """Return an ONNX file as it is, without opening another one."""
    try:
        with open_regular(path) as file:
            if file.seek(0, 2) > _MAX_BYTES:
                raise StageError(f"{path} is larger than 2 GiB, which no ONNX file without other files can be")
        is_self_contained(path)  # also limits the depth of its graphs
        return onnx.load(path, load_external_data=False)
    except StageError:
        raise
    except Exception as error:  # protobuf's exceptions have no common base class
        reason = "".join(char if char.isprintable() else " " for char in str(error))
        raise StageError(f"{path} is no ONNX file that can be read: {' '.join(reason.split())[:300]}") from error


def _external_data(path: Path, model: ModelProto) -> Iterator[tuple[TensorProto, bytes]]:
    """Yield each tensor that is in another file, and its bytes. All are found and counted before one is read."""
    found = []
    for tensor in _external_tensors(model):
        with _opened(path, tensor) as file:
            found.append((tensor, *_byte_range(tensor, os.fstat(file.fileno()).st_size)))
    if path.stat().st_size + sum(length for _, _, length in found) > _MAX_BYTES:
        raise StageError(
            f"{path} has more than 2 GiB together with its tensors in other files, and is to become one file, which "
            "can't hold more: export a smaller network, or one in float16"
        )
    for tensor, offset, length in found:
        with _opened(path, tensor) as file:
            file.seek(offset)
            content = file.read(length)
            if len(content) < length:
                raise ValueError("it was changed while it was read")
        yield tensor, content


@contextmanager
def _opened(path: Path, tensor: TensorProto) -> Iterator[BufferedReader]:
    """Open the file that a tensor is in. Raises StageError where that, or what is done with the file, fails."""
    location = _place(tensor).get("location", "")
    try:
        with open_beneath(path.parent, location) as file:
            yield file
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StageError(
            f"{path} keeps the tensor {tensor.name[:100]!r} in {location[:100]!r}, which is not read: {reason} "
            "(put all files of the export into one folder, without links)"
        ) from error


def _place(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _byte_range(tensor: TensorProto, file_size: int) -> tuple[int, int]:
    """Return offset and length of a tensor in a file. Raises ValueError where they are not inside it."""
    place = _place(tensor)
    for key in ("offset", "length"):
        digits = place.get(key, "0")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
            raise ValueError(f"{key} {digits[:20]!r} is no number of bytes")
    offset = int(place.get("offset", 0))
    length = int(place.get("length", file_size - offset))
    if not 0 <= length <= file_size - offset:
        raise ValueError(f"it has {file_size} bytes, and offset {offset} with length {length} needs more")
    return offset, length


def _external_tensors(message: Any) -> Iterator[TensorProto]:
    """Yield the tensors in other files at any depth: of graphs, attributes, functions and training."""
    if isinstance(message, TensorProto):
        if message.data_location == TensorProto.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.number in MESSAGES[message.DESCRIPTOR.name]:
            for inner in value if isinstance(value, Sequence) else [value]:
                yield from _external_tensors(inner)
