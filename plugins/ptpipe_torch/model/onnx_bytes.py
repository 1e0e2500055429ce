"""Find references to other files in the bytes of an ONNX file, before a runtime opens it.

A tensor may name a file, an offset and a length instead of holding its values. Runtimes differ in which paths they
refuse, and onnxruntime takes one name for an address in its own memory. Only lengths and tags are read here: a file of
any size costs no memory, and nothing in it is executed.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from ptpipe_torch.files import open_regular

MESSAGES: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "TensorProto": {},
}
"""Of each message of onnx.proto, the numbers of the fields that may lead to a tensor, and their types."""
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_VARINT, _FIXED64, _MESSAGE, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 100
"""protobuf's own limit."""
_MAX_VARINT_BYTES = 10

Bytes = bytes | mmap.mmap


def is_self_contained(path: Path) -> bool:
    """Return whether no tensor of an ONNX file is stored in another file.

    Looks at all graphs: also those of attributes, functions and training. Raises ValueError for a file that is not
    ONNX, OSError for one that can't be read.
    """
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:  # can't be mapped
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return not _has_external_tensor(content)


def _has_external_tensor(content: Bytes) -> bool:
    kind, position, end = "ModelProto", 0, len(content)
    outer: list[tuple[str, int, int]] = []
    while True:
        if position == end:
            if not outer:
                return False
            kind, position, end = outer.pop()
            continue
        number, wire_type, start, position = _field(content, position, end)
        is_set = wire_type == _MESSAGE or position - start > 1 or content[start] != 0
        if kind == "TensorProto" and (number == _EXTERNAL_DATA or (number == _DATA_LOCATION and is_set)):
            return True
        if wire_type == _MESSAGE and number in MESSAGES[kind]:
            if len(outer) == _MAX_DEPTH:
                raise ValueError("its graphs are nested too deeply")
            outer.append((kind, position, end))
            kind, position, end = MESSAGES[kind][number], start, position


def _field(content: Bytes, position: int, end: int) -> tuple[int, int, int, int]:
    """Return number and wire type of the field at `position`, and where its value starts and ends."""
    tag, start = _varint(content, position, end)
    wire_type = tag & 7
    if wire_type == _VARINT:
        _, stop = _varint(content, start, end)
    elif wire_type == _MESSAGE:
        num_bytes, start = _varint(content, start, end)
        stop = start + num_bytes
    elif wire_type in (_FIXED32, _FIXED64):
        stop = start + (4 if wire_type == _FIXED32 else 8)
    else:
        raise ValueError(f"it has a field of wire type {wire_type}")
    if stop > end:
        raise ValueError("it is truncated")
    return tag >> 3, wire_type, start, stop


def _varint(content: Bytes, position: int, end: int) -> tuple[int, int]:
    """Return a number (protobuf.dev, "Encoding") and where it ends."""
    value = 0
    for number, place in enumerate(range(position, min(end, position + _MAX_VARINT_BYTES))):
        value |= (content[place] & 0x7F) << 7 * number
        if content[place] < 0x80:
            return value, place + 1
    raise ValueError("it is truncated")
