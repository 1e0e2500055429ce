"""`model.onnx`: tensors in other files. What a stranger may write there is in tests/attacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe import StageError
from ptpipe.testing import Bench
from ptpipe_torch import OnnxFile
from ptpipe_torch.model.onnx_bytes import is_self_contained
from ptpipe_zoo import OnnxModelConfig, onnx_external_data, onnx_model

pytest_plugins = ["ptpipe.testing"]

WEIGHTS_KD = np.random.default_rng(3).normal(size=(5, 144)).astype(np.float32)
BIAS_K = np.arange(5, dtype=np.float32)
NUM_BYTES = WEIGHTS_KD.nbytes + BIAS_K.nbytes


def write(folder: Path, location: str = "a.onnx.data") -> Path:
    """Write a linear layer, its weights in `location`, with the names of the data set."""
    value = helper.make_tensor_value_info
    ends = [value("images", TensorProto.FLOAT, ["N", 1, 12, 12]), value("logits", TensorProto.FLOAT, ["N", 5])]
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weights", "bias"], ["logits"], transB=1),
    ]
    weights = [numpy_helper.from_array(WEIGHTS_KD, "weights"), numpy_helper.from_array(BIAS_K, "bias")]
    graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / location).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "a.onnx", save_as_external_data=True, location=location, size_threshold=0)
    assert not is_self_contained(folder / "a.onnx")
    return folder / "a.onnx"


def edit(path: Path, **place: str) -> None:
    """Alter where the first tensor says that it is; an empty value removes an entry."""
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    entries = {**{entry.key: entry.value for entry in tensor.external_data}, **place}
    del tensor.external_data[:]
    for key, value in entries.items():
        if value:
            tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


@pytest.fixture
def load(bench: Bench, make_data: Any, tmp_path: Path) -> Callable[[], OnnxFile]:
    return lambda: bench.run(onnx_model, {"file": str(tmp_path / "a.onnx")}, data=make_data())


def assert_predicts(file: OnnxFile) -> None:
    images_NCHW = np.random.default_rng(4).normal(size=(3, 1, 12, 12)).astype(np.float32)
    with file.predictor(1) as predict:
        logits_NK = predict({"images": images_NCHW})["logits"]
    np.testing.assert_allclose(logits_NK, images_NCHW.reshape(3, 144) @ WEIGHTS_KD.T + BIAS_K, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("location", ["a.onnx.data", "weights/all.bin", "./weights.bin"])
def test_tensors_in_its_folder_are_put_into_the_file(
    load: Callable[[], OnnxFile], bench: Bench, tmp_path: Path, location: str
) -> None:
    path = write(tmp_path, location)
    before = path.read_bytes()
    file = load()
    assert is_self_contained(file.path) and path.read_bytes() == before
    assert bench.metrics == {"num_parameters": 5 * 145}
    onnx.checker.check_model(file.path, full_check=True)
    assert_predicts(file)


def test_a_folder_that_is_a_link_is_the_users_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real")
    (tmp_path / "linked").symlink_to("real")
    model, has_external_data = onnx_external_data.read(tmp_path / "linked" / "a.onnx")
    assert has_external_data
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), WEIGHTS_KD)


def test_without_a_length_a_tensor_is_the_rest_of_its_file(load: Callable[[], OnnxFile], tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "own.bin").write_bytes(b"head" + WEIGHTS_KD.tobytes())
    edit(path, location="own.bin", offset="4", length="")
    assert_predicts(load())


def link(folder: Path) -> None:
    (folder / "a.onnx.data").rename(folder / "b")
    (folder / "a.onnx.data").symlink_to("b")


def linked_folder(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "a.onnx.data").rename(folder / "real" / "b")
    (folder / "linked").symlink_to("real")
    edit(folder / "a.onnx", location="linked/b")


def pipe(folder: Path) -> None:
    (folder / "a.onnx.data").unlink()
    os.mkfifo(folder / "a.onnx.data")


def directory(folder: Path) -> None:
    (folder / "a.onnx.data").unlink()
    (folder / "a.onnx.data").mkdir()


def outside(folder: Path) -> None:
    (folder.parent / "b").write_bytes(bytes(NUM_BYTES))
    edit(folder / "a.onnx", location="sub/../../b")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "..": (outside, "it leads out of the folder"),
    "inside by ..": (lambda folder: edit(folder / "a.onnx", location="x/../a.onnx.data"), "it leads out of the folder"),
    "absolute": (
        lambda folder: edit(folder / "a.onnx", location=str(folder / "a.onnx.data")),
        "it leads out of the folder",
    ),
    "no place": (lambda folder: edit(folder / "a.onnx", location=""), "it names no file"),
    "a link": (link, "a symbolic link is on its path"),
    "a linked folder": (linked_folder, "a symbolic link is on its path"),
    "a pipe": (pipe, "not a regular file"),
    "a folder": (directory, "Is a directory"),
    "through a file": (lambda folder: edit(folder / "a.onnx", location="a.onnx.data/b"), "Not a directory"),
    "missing": (lambda folder: (folder / "a.onnx.data").unlink(), "No such file or directory"),
    "zero byte": (lambda folder: edit(folder / "a.onnx", location="a\0b"), "embedded null "),
    "beyond the end": (
        lambda folder: edit(folder / "a.onnx", offset="21", length="2880"),
        f"it has {NUM_BYTES} bytes, and offset 21 with length 2880 needs more",
    ),
    "starts beyond the end": (lambda folder: edit(folder / "a.onnx", offset="9999", length=""), "offset 9999 with"),
    "a truncated file": (lambda folder: os.truncate(folder / "a.onnx.data", 100), "it has 100 bytes, and offset 0"),
    "a negative offset": (lambda folder: edit(folder / "a.onnx", offset="-4"), "offset '-4' is no number of bytes"),
    "a negative length": (lambda folder: edit(folder / "a.onnx", length="-1"), "length '-1' is no number of bytes"),
    "a long number": (lambda folder: edit(folder / "a.onnx", offset="9" * 5000), "offset '99999999999999999999' is no"),
    "no number": (lambda folder: edit(folder / "a.onnx", offset="1_0"), "offset '1_0' is no number of bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    path = write(folder)
    alter, reason = REFUSED[case]
    alter(folder)
    (location,) = {
        entry.value
        for entry in onnx.load(path, load_external_data=False).graph.initializer[0].external_data
        if entry.key == "location"
    } or {""}
    for read in (onnx_external_data.read, onnx_external_data.digest):
        with pytest.raises(StageError) as raised:
            read(path)
        assert str(raised.value).startswith(f"{path} keeps the tensor 'weights' in {location!r}, which is not read: ")
        assert reason in str(raised.value) and str(raised.value).isprintable()
    with pytest.raises(StageError, match="keeps the tensor 'weights' in"):
        onnx_model.fingerprint(OnnxModelConfig(file=str(path)))


def test_more_than_one_file_can_hold_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    os.truncate(tmp_path / "a.onnx.data", 1 << 32)
    edit(path, length=str(2**31 - 100))
    with pytest.raises(StageError, match=r"a\.onnx has more than 2 GiB together with its tensors in other files"):
        onnx_external_data.read(path)


def test_a_change_of_either_file_is_in_the_key(tmp_path: Path) -> None:
    config = OnnxModelConfig(file=str(write(tmp_path)))
    first = onnx_model.fingerprint(config)
    assert onnx_model.fingerprint(config) == first
    data = bytearray((tmp_path / "a.onnx.data").read_bytes())
    data[5] ^= 1
    (tmp_path / "a.onnx.data").write_bytes(data)
    second = onnx_model.fingerprint(config)
    edit(tmp_path / "a.onnx", checksum="0")
    third = onnx_model.fingerprint(config)
    assert len({str(found) for found in (first, second, third)}) == 3
    assert second["external_data"] != first["external_data"] and second["file"] == first["file"]


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = onnx.load(path, load_external_data=False)
    tensors = onnx_external_data._external_data(path, model)
    assert len(next(tensors)[1]) == WEIGHTS_KD.nbytes
    os.truncate(tmp_path / "a.onnx.data", WEIGHTS_KD.nbytes + 4)
    with pytest.raises(StageError, match=r"tensor 'bias' in 'a\.onnx\.data', .*: it was changed while it was read"):
        next(tensors)
