from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe_train.checkpoint import Checkpoint, Damage, read_checkpoints, remove_checkpoint, write_checkpoint


def make_checkpoint(step: int) -> Checkpoint:
    last = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.channels_last)
    tensors = {"w": last, "flag": torch.tensor(True), "count": torch.tensor(step), "rng": torch.arange(9).byte()}
    return Checkpoint(step, tensors, {"loss": 0.1 + 0.2, "history": [{"epoch": 1}], "none": None})


def steps(folder: Path) -> list[int | str]:
    return [found.step if isinstance(found, Checkpoint) else found.reason for found in read_checkpoints(folder)]


def test_round_trip(tmp_path: Path) -> None:
    want = make_checkpoint(12)
    write_checkpoint(tmp_path, want)
    (got,) = read_checkpoints(tmp_path)
    assert isinstance(got, Checkpoint)
    assert (got.step, got.metadata) == (12, want.metadata)
    assert got.tensors.keys() == want.tensors.keys()
    assert all(torch.equal(tensor, want.tensors[name]) for name, tensor in got.tensors.items())


def test_tensors_that_share_memory_are_stored_each(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    write_checkpoint(tmp_path, Checkpoint(1, {"a": shared, "b": shared, "c": shared[1:]}, {}))
    (got,) = read_checkpoints(tmp_path)
    assert isinstance(got, Checkpoint)
    assert got.tensors["c"].tolist() == [1, 2, 3]


def test_keeps_the_two_newest_and_nothing_else(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write_checkpoint(tmp_path, make_checkpoint(step))
    # What a kill between two files leaves behind.
    (tmp_path / "step-000000000101.safetensors").write_bytes(b"whole, but without its metadata")
    (tmp_path / "step-000000000102.safetensors.part").write_bytes(b"half")
    assert steps(tmp_path) == [100, 10]
    write_checkpoint(tmp_path, make_checkpoint(103))
    assert steps(tmp_path) == [103, 100]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_without_any(tmp_path: Path) -> None:
    assert steps(tmp_path / "nowhere") == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_byte_or_a_missing_end_is_seen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    write_checkpoint(folder, make_checkpoint(1))
    write_checkpoint(folder, make_checkpoint(2))
    file = folder / f"step-000000000002.{data.draw(st.sampled_from(['json', 'safetensors']))}"
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 2))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    file.write_bytes(content)
    damage, sound = read_checkpoints(folder)
    if isinstance(damage, Checkpoint):  # other digits of the same number: 0.30000000000000003 is 0.30000000000000004
        assert file.suffix == ".json" and damage.metadata == make_checkpoint(2).metadata
        return
    assert isinstance(damage, Damage)
    assert isinstance(sound, Checkpoint)
    assert sound.step == 1


def test_missing_tensors_are_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_checkpoint(1))
    (tmp_path / "step-000000000001.safetensors").unlink()
    (found,) = read_checkpoints(tmp_path)
    assert isinstance(found, Damage)
    remove_checkpoint(tmp_path, found.name)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, make_checkpoint(1))
    assert list(tmp_path.iterdir()) == []
