import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe.errors import IntegrityError
from ptpipe.store.documents import read_document, write_document

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.dictionaries(st.text(max_size=5), VALUES, min_size=1, max_size=4), st.sampled_from([None, 1]))
def test_members_come_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, members: dict, indent: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "document.json"
    write_document(path, json.dumps(members, indent=indent))
    assert read_document(path) == members
    assert json.loads(path.read_text(encoding="utf-8")).keys() == members.keys() | {"sha256"}


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_document(path, json.dumps({"decision": "refused", "metrics": {"accuracy": 0.5}}, indent=1))
    content = path.read_bytes()
    for position in range(len(content) * 8):
        altered = bytearray(content)
        altered[position // 8] ^= 1 << position % 8
        path.write_bytes(altered)
        with pytest.raises(IntegrityError, match="was altered"):
            read_document(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_document(path, json.dumps({"decision": "refused"}))
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(IntegrityError):
            read_document(path)


def test_a_missing_file_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_document(tmp_path / "document.json")


def test_a_document_that_holds_no_json_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    for text in ('{"a": nothing}', '{"a": ' + "[" * 100_000 + "}"):
        write_document(path, text)
        with pytest.raises(IntegrityError, match="is no document"):
            read_document(path)


def test_a_link_is_damage(tmp_path: Path) -> None:
    write_document(tmp_path / "elsewhere", "{}")
    (tmp_path / "document.json").symlink_to("elsewhere")
    with pytest.raises(IntegrityError, match="was altered"):
        read_document(tmp_path / "document.json")
