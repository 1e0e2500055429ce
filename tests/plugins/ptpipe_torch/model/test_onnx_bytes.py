"""The tables of the reader against onnx's own description of the format; the attacks are in tests/attacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st

from ptpipe_torch.model.onnx_bytes import MESSAGES, is_self_contained


def leads_to_tensor(message: Descriptor, seen: frozenset[str] = frozenset()) -> bool:
    if message.name == "TensorProto":
        return True
    inner = (field.message_type for field in message.fields if field.message_type)
    return any(leads_to_tensor(other, seen | {message.name}) for other in inner if other.name not in seen)


def reachable(message: Descriptor, seen: set[str]) -> Iterator[Descriptor]:
    if message.name in seen or not leads_to_tensor(message):
        return
    seen.add(message.name)
    yield message
    for field in message.fields:
        if field.message_type:
            yield from reachable(field.message_type, seen)


def test_every_field_that_may_lead_to_a_tensor_is_looked_at() -> None:
    described = {
        message.name: {
            field.number: field.message_type.name
            for field in message.fields
            if field.message_type and leads_to_tensor(field.message_type)
        }
        for message in reachable(onnx.ModelProto.DESCRIPTOR, set())
    }
    assert described == MESSAGES


def test_the_numbers_of_a_tensor_are_those_of_onnx() -> None:
    fields = onnx.TensorProto.DESCRIPTOR.fields_by_name
    assert (fields["external_data"].number, fields["data_location"].number) == (13, 14)


def model(num_weights: int) -> onnx.ModelProto:
    weights = [onnx.numpy_helper.from_array(np.ones((3, 4)), f"w{number}") for number in range(num_weights)]
    return onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], weights))


@pytest.mark.parametrize("location", [None, onnx.TensorProto.DEFAULT, onnx.TensorProto.EXTERNAL])
def test_a_tensor_tells_where_it_is(tmp_path: Path, location: int | None) -> None:
    proto = model(3)
    if location is not None:
        proto.graph.initializer[1].data_location = location
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert is_self_contained(tmp_path / "m.onnx") is (location != onnx.TensorProto.EXTERNAL)


@given(st.binary(max_size=200))
def test_any_bytes_are_judged_or_refused(tmp_path_factory: pytest.TempPathFactory, more: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(model(1).SerializeToString()[: len(more) * 3] + more)
    try:
        assert is_self_contained(path) in (True, False)
    except ValueError as error:
        assert str(error).startswith("it")
