"""Shape legend: N samples, C channels, H height, W width, K classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe import IntegrityError, StageError, host
from ptpipe_torch import OnnxFile

from ....signatures import classifier, logits_from

WEIGHTS_KD = np.random.default_rng(3).normal(size=(5, 12)).astype(np.float32)


def write(path: Path, *more_outputs: str) -> Path:
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("Gemm", ["flat", "weights"], ["logits"], transB=1),
        ],
        "linear",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3, 2, 2])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", None]) for name in ("logits", *more_outputs)],
        [numpy_helper.from_array(WEIGHTS_KD, "weights")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> OnnxFile:
    parity = {"top1_agreement": 0.75, "num_samples": 4}
    return OnnxFile(write(tmp_path / "any.onnx"), classifier((3, 2, 2), 5), "int8 dynamic", parity)


@pytest.mark.parametrize("num_threads", [None, 1, 3])
def test_it_predicts(file: OnnxFile, num_threads: int | None) -> None:
    images_NCHW = np.random.default_rng(4).normal(size=(7, 3, 2, 2)).astype(np.float32)
    with file.predictor(num_threads) as predict:
        logits_NK = logits_from(predict, images_NCHW)
        one_K = logits_from(predict, images_NCHW[:1])[0]
    assert logits_NK.dtype == np.float32
    np.testing.assert_allclose(logits_NK, images_NCHW.reshape(7, 12) @ WEIGHTS_KD.T, rtol=1e-5)
    np.testing.assert_allclose(one_K, logits_NK[0], rtol=1e-6)


def test_it_runs_on_as_many_threads_as_told(file: OnnxFile, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    seen = []
    make_session = ort.InferenceSession

    def watched(path: str, options: ort.SessionOptions, **more: object) -> ort.InferenceSession:
        seen.append((options.intra_op_num_threads, options.inter_op_num_threads))
        return make_session(path, options, **more)

    monkeypatch.setattr(ort, "InferenceSession", watched)
    for num_threads in (None, 1, 5):
        with file.predictor(num_threads):
            pass
    assert seen == [(host.num_threads(), 1), (1, 1), (5, 1)]


def test_it_comes_back_as_it_was_saved(file: OnnxFile, tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    file.save(folder)
    file.path.unlink()
    again = OnnxFile.load(folder)
    assert again.path.parent == folder
    assert again.signature == classifier((3, 2, 2), 5)
    assert (again.precision, again.format) == ("int8 dynamic", "onnx int8 dynamic")
    assert again.parity == {"top1_agreement": 0.75, "num_samples": 4}
    assert again.size_bytes == again.path.stat().st_size
    assert again.summary() == {
        "format": "onnx int8 dynamic",
        "size_bytes": again.size_bytes,
        "parity": {"top1_agreement": 0.75, "num_samples": 4},
    }
    with again.predictor() as predict:
        assert logits_from(predict, np.zeros((2, 3, 2, 2), np.float32)).shape == (2, 5)


@pytest.mark.parametrize(
    "info",
    ["", "[]", "{}", '{"signature": {}}', '{"signature": 3}', '{"signature": {"inputs": [], "outputs": []}}'],
)
def test_damaged_info_is_an_integrity_error(file: OnnxFile, tmp_path: Path, info: str) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    file.save(folder)
    assert json.loads((folder / "info.json").read_text())["signature"]["outputs"][0]["shape"] == ["batch", 5]
    (folder / "info.json").write_text(info)
    with pytest.raises(IntegrityError, match=r"info\.json"):
        OnnxFile.load(folder)


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_a_file_that_cannot_be_run_is_named_in_one_line(
    file: OnnxFile, content: bytes | None, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(StageError, match=r"ONNX Runtime can't run any\.onnx") as caught, file.predictor():
        pass
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_file_is_a_stage_error(tmp_path: Path) -> None:
    with (
        pytest.raises(StageError, match=r"gone\.onnx"),
        OnnxFile(tmp_path / "gone.onnx", classifier((3, 2, 2), 5)).predictor(),
    ):
        pass


def test_two_outputs_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "two.onnx", "flat")
    with (
        pytest.raises(StageError, match="has the outputs flat, logits, not logits"),
        OnnxFile(path, classifier((3, 2, 2), 5)).predictor(),
    ):
        pass


def test_an_error_of_a_run_is_one_line(file: OnnxFile, capfd: pytest.CaptureFixture[str]) -> None:
    with file.predictor() as predict:
        with pytest.raises(StageError, match=r"^ONNX Runtime can't run any\.onnx: .*invalid dimensions") as caught:
            logits_from(predict, np.zeros((2, 3, 2, 9), np.float32))
        assert logits_from(predict, np.zeros((2, 3, 2, 2), np.float32)).shape == (2, 5), "the session is still good"
    assert str(caught.value).isprintable()
    assert capfd.readouterr() == ("", "")


def test_logits_of_another_shape_are_refused(file: OnnxFile) -> None:
    wrong = OnnxFile(file.path, classifier((3, 2, 2), 6))
    with wrong.predictor() as predict, pytest.raises(StageError, match=r"other than logits \(batch, 6\) float32"):
        logits_from(predict, np.zeros((2, 3, 2, 2), np.float32))


def test_a_file_that_needs_another_is_not_saved(file: OnnxFile, tmp_path: Path) -> None:
    onnx.save(onnx.load(file.path), tmp_path / "apart.onnx", save_as_external_data=True, size_threshold=0)
    apart = OnnxFile(tmp_path / "apart.onnx", classifier((3, 2, 2), 5))
    (tmp_path / "stored").mkdir()
    with pytest.raises(StageError, match=r"apart\.onnx keeps tensors in other files, which are not read: write them"):
        apart.save(tmp_path / "stored")
    onnx.save_model(onnx.load(apart.path), apart.path)  # as the message says
    apart.save(tmp_path / "stored")
    assert OnnxFile.load(tmp_path / "stored").signature == classifier((3, 2, 2), 5)
