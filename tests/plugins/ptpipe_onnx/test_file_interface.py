"""Files that take raw values and return probabilities and classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner

from ptpipe import Context, StageError
from ptpipe_data.table_columns import NumbersInfo
from ptpipe_onnx import QuantizeOnnxConfig, quantize_onnx
from ptpipe_onnx.check_command import check
from ptpipe_onnx.file_interface import raw_forms
from ptpipe_onnx.postprocessing import check_postprocessing, outputs_to_add
from ptpipe_onnx.preprocessing import check_preprocessing
from ptpipe_onnx.vectors import Vectors
from ptpipe_torch import (
    BATCH,
    ArrayInfo,
    Classification,
    Data,
    ImageInfo,
    InputForm,
    Model,
    MultiLabel,
    OnnxFile,
    RawForm,
    Regression,
    Signature,
    Task,
    TensorSpec,
)

from .conftest import NARROW, Exported

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]


def run(file: OnnxFile, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return all outputs, as a user of the file gets them."""
    session = ort.InferenceSession(str(file.path), providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, inputs), strict=True))


def raw_and_expected(data: Data, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored bytes of the test split (N, H, W, C), and the model's logits (N, K)."""
    (batch,) = data.batches("test", batch_size=300)
    with model.predictor() as predict:
        logits_NK = predict(batch.input_arrays())["logits"]
    return data.splits["test"].inputs["images"].values(), logits_NK


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "layout"), [(None, "nhwc"), ("fbgemm", "nhwc"), ("qnnpack", "nchw")])
def test_bytes_to_classes(
    backend: str | None, layout: str, run_export: Export, exported: Callable[..., Exported], digits: Data, events
) -> None:
    made = exported("cnn", backend)
    model = made.model
    (batch,) = digits.batches("test", batch_size=300)
    plain = run(made.file, **batch.input_arrays())
    named = model.with_recipe(signature=replace(model.signature, meanings=digits.info.signature.meanings))
    file = run_export(named, preprocessing=layout, postprocessing=True)
    pixels_NHWC, logits_NK = raw_and_expected(digits, model)
    found = run(file, images=pixels_NHWC if layout == "nhwc" else np.moveaxis(pixels_NHWC, 3, 1).copy())
    assert list(found) == ["logits", "probabilities", "classes"]
    if backend is None:
        np.testing.assert_allclose(found["logits"], logits_NK, atol=2e-5 * np.abs(logits_NK).max())
    else:  # the integers of both files are the same: bytes are far from where rounding to them changes
        assert (found["logits"] == plain["logits"]).all()
    expected_NK = torch.softmax(torch.from_numpy(found["logits"]).double(), 1).numpy()
    np.testing.assert_allclose(found["probabilities"], expected_NK, atol=1e-6)
    assert (found["classes"] == found["logits"].argmax(1)).all()
    assert found["classes"].dtype == np.int64
    assert file.signature == model.signature
    assert "images" in named.signature.meanings and "images" not in file.signature.meanings, "bytes are any data set's"
    assert str(file.own_signature) == (
        f"images (batch, {'16, 16, 1' if layout == 'nhwc' else '1, 16, 16'}) uint8 -> "
        "logits (batch, 10) float32, probabilities (batch, 10) float32, classes (batch) int64"
    )
    assert events.metrics["max_abs_preprocessing_difference"] < 1e-6


def test_a_stored_file(run_export: Export, int8_model: Make, digits: Data, tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    options = {"preprocessing": "nhwc", "postprocessing": True}
    run_export(int8_model("cnn", "fbgemm", narrow=NARROW), num_samples=32, **options).save(folder)
    shipped = OnnxFile.load(folder)
    _predicts_from_bytes(shipped, digits)
    metadata = {entry.key: entry.value for entry in onnx.load(shipped.path).metadata_props}
    assert metadata["signature"] == str(shipped.own_signature)
    assert (metadata["preprocessing"], metadata["postprocessing"]) == ("nhwc", "softmax")
    _is_checked_on_bytes(shipped)
    float_file = OnnxFile(shipped.path, shipped.signature, interface=shipped.interface)
    with pytest.raises(StageError, match="preprocessing or postprocessing inside"):
        quantize_onnx(QuantizeOnnxConfig(), Context("again", "quant.onnx", 7, tmp_path), float_file, digits)


def _predicts_from_bytes(file: OnnxFile, digits: Data) -> None:
    assert file.input_form == "nhwc"
    assert [spec.name for spec in file.own_signature.outputs] == ["logits", "probabilities", "classes"]
    (batch,) = digits.batches("test", batch_size=300, input_form=file.input_form)
    with file.predictor() as predict:
        found = predict(batch.input_arrays())
    assert {name: array.shape for name, array in found.items()} == {"logits": (300, 10)}


def _is_checked_on_bytes(file: OnnxFile) -> None:
    assert file.test_vectors is not None
    vectors = Vectors.load(file.test_vectors)
    assert vectors.inputs["images"].dtype == np.uint8
    assert vectors.inputs["images"].shape == (8, 16, 16, 1)
    assert vectors.outputs.keys() == {"logits", "probabilities"}
    assert vectors.tolerances["probabilities"].max_abs <= 1
    result = CliRunner().invoke(check, [str(file.path), "--json"], standalone_mode=False)
    found = json.loads(result.stdout)
    assert (result.return_value, found["reproduced"]) == (0, True)
    assert {of["max_abs_difference"] for of in found["outputs"].values()} == {0}


class Shifted(ImageInfo):
    """Says of its raw form what is not so."""

    def raw_form(self, name: str, form: InputForm) -> RawForm:
        own = super().raw_form(name, form)
        return replace(own, offset_C=tuple(offset + 0.01 for offset in own.offset_C))


def test_data_without_normalization_is_refused(digits: Data) -> None:
    info = replace(digits.info, inputs={"images": ArrayInfo(dtype="float32", shape=(1, 16, 16))})
    with pytest.raises(StageError, match=r"digits has no inputs that are normalized \(images\): leave"):
        raw_forms(Data(info, digits.splits), "nhwc", info.signature.inputs)


def test_another_normalization_is_found(run_export: Export, float_model: Make, digits: Data) -> None:
    infos = {"images": Shifted(shape_CHW=(1, 16, 16), mean=(0.31,), std=(0.38,))}
    data = Data(replace(digits.info, inputs=infos), digits.splits)
    with pytest.raises(StageError, match=r"preprocessing of images .* differs .* by 0\.01, where"):
        run_export(float_model("cnn"), data, preprocessing="nhwc", num_samples=8)


def test_numbers_of_a_table(tmp_path: Path) -> None:
    """Numbers that float32 can't tell from each other are normalized in float64."""
    seconds_N = 1.7e9 + np.arange(0, 9000, 37.0)
    raw_NF = np.stack([seconds_N, np.linspace(-3, 5, len(seconds_N))], axis=1)
    info = NumbersInfo(names=("time", "x"), mean=tuple(raw_NF.mean(0)), std=tuple(raw_NF.std(0)))
    stored_NF = ((raw_NF - raw_NF.mean(0)) / raw_NF.std(0)).astype(np.float32)
    form = info.raw_form("numbers", "nhwc")
    restored_NF = form.conversion(torch.from_numpy(stored_NF), False).numpy()
    np.testing.assert_allclose(restored_NF, raw_NF, atol=1e-3)
    assert str(form.spec) == "numbers (batch, 2) float64"
    for raw in (raw_NF, restored_NF):
        assert check_preprocessing({"numbers": form}, {"numbers": raw}, {"numbers": stored_NF}, 18) < 1e-6
    wrong = replace(form, dtype="float32")
    with pytest.raises(StageError, match="preprocessing of numbers"):
        check_preprocessing({"numbers": wrong}, {"numbers": raw_NF}, {"numbers": stored_NF + 0.1}, 18)


LOGITS = Signature((TensorSpec("images", "uint8", (BATCH, 4)),), (TensorSpec("logits", "float32", (BATCH, 3)),))


def test_what_can_be_added() -> None:
    (own,) = outputs_to_add(LOGITS, Classification(class_names=("a", "b", "c")))
    assert [str(spec) for spec in own.specs] == ["probabilities (batch, 3) float32", "classes (batch) int64"]
    (own,) = outputs_to_add(LOGITS, MultiLabel(label_names=("a", "b", "c")))
    assert [str(spec) for spec in own.specs] == ["probabilities (batch, 3) float32"]
    assert own.function == "sigmoid"
    taken = replace(LOGITS, outputs=(*LOGITS.outputs, TensorSpec("classes", "int64", (BATCH,))))
    (own,) = outputs_to_add(taken, Classification(class_names=("a", "b", "c")))
    assert [spec.name for spec in own.specs] == ["logits_probabilities", "logits_classes"]
    numbers = Regression(target_names=("y",), mean=(0.0,), std=(1.0,))
    predictions = Signature(LOGITS.inputs, numbers.outputs)
    with pytest.raises(StageError, match="Regression has no scores of classes or labels, and its predictions are in"):
        outputs_to_add(predictions, numbers)


@pytest.mark.parametrize("task", [Classification(class_names=("a", "b", "c")), MultiLabel(label_names=("a", "b", "c"))])
def test_wrong_further_outputs_are_found(task: Task) -> None:
    added = outputs_to_add(LOGITS, task)
    logits_NK = np.random.default_rng(0).normal(0, 20, (50, 3)).astype(np.float32)
    logits = torch.from_numpy(logits_NK)
    is_softmax = added[0].function == "softmax"
    right = {
        "logits": logits_NK,
        "probabilities": (logits.softmax(1) if is_softmax else logits.sigmoid()).numpy(),
        "classes": logits_NK.argmax(1),
    }
    check_postprocessing(added, right)
    other = right | {"probabilities": right["probabilities"][:, ::-1]}
    with pytest.raises(StageError, match="probabilities of the file differ from the"):
        check_postprocessing(added, other)
    if is_softmax:
        with pytest.raises(StageError, match="50 classes of the file are not those"):
            check_postprocessing(added, right | {"classes": logits_NK.argmin(1)})
