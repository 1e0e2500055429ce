"""What a comparison keeps for reports: recorded with the samples, stored, read back, refused where it is damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ptpipe import IntegrityError
from ptpipe_eval.quality.details import Details, ModelDetails, numbers_of, tables_of
from ptpipe_eval.quality.recorder import SampleRecorder
from ptpipe_torch import Classification, Regression

LABELS_N = np.arange(30) % 3


def recorder(task, outputs, targets, num_samples=30):
    own = SampleRecorder(task, num_samples)
    for start in range(0, num_samples, 7):
        rows = slice(start, start + 7)
        own.add(*({name: of[rows] for name, of in side.items()} for side in (outputs, targets)))
    return own


@pytest.fixture
def details():
    task = Classification(class_names=("a", "b", "c"))
    logits_NK = torch.nn.functional.one_hot(torch.from_numpy(LABELS_N), 3).float()
    own = recorder(task, {"logits": logits_NK}, {"labels": torch.from_numpy(LABELS_N)})
    model = own.details({"accuracy": 1.0, "confusion": [[10, 0], [0, 20]], "class_names": ["a", "b"]})
    return Details((model, ModelDetails()))


def test_classes_losses_and_tables_are_recorded(details):
    model = details.models[0]
    assert model.classes_N.tolist() == LABELS_N.tolist()
    assert model.losses_N.shape == (30,)
    assert model.losses_N == pytest.approx(np.log(np.e + 2) - 1)
    assert dict(model.tables) == {"confusion": [[10, 0], [0, 20]], "class_names": ["a", "b"]}
    assert model.numbers_NT is None


def test_predicted_numbers_are_recorded_beside_the_targets():
    task = Regression(target_names=("x", "y"), mean=(0.0, 0.0), std=(1.0, 1.0))
    targets_NT = torch.arange(60.0).view(30, 2)
    own = recorder(task, {"predictions": targets_NT + 1}, {"targets": targets_NT})
    assert own.details({}).numbers_NT.tolist() == (targets_NT + 1).tolist()
    assert own.targets().tolist() == targets_NT.tolist()
    assert own.details({}).classes_N is None


def test_predictions_with_several_numbers_for_a_sample_are_no_classes():
    class Rows(Classification):
        def samples(self, outputs, targets):
            return {**super().samples(outputs, targets), "prediction": outputs["logits"].long()}

    logits_NK = torch.zeros(30, 3)
    own = recorder(Rows(class_names=("a", "b", "c")), {"logits": logits_NK}, {"labels": torch.from_numpy(LABELS_N)})
    assert own.details({}).classes_N is None


def test_large_or_odd_tables_and_many_numbers_are_left_out():
    assert tables_of({"big": [[0] * 400] * 400, "nan": [float("nan")], "number": 3, "small": [1]}) == {"small": [1]}
    assert numbers_of([np.zeros((10, 200_000), dtype=np.float32)], 10) is None
    assert numbers_of([np.zeros((10, 2, 2), dtype=np.float32)], 10) is None


def test_they_come_back_as_they_were(details, tmp_path):
    details.save(tmp_path)
    again = Details.load(tmp_path, 2, 30)
    assert again.models[0].classes_N.tolist() == LABELS_N.tolist()
    assert again.models[0].losses_N.tobytes() == details.models[0].losses_N.tobytes()
    assert again.models[0].tables == details.models[0].tables
    assert again.models[1].losses_N is None
    assert again.targets_NT is None


def test_what_was_never_saved_is_unknown(tmp_path):
    assert Details.load(tmp_path, 2, 30) is None


@pytest.mark.parametrize("num_models, num_samples", [(3, 30), (2, 31)])
def test_those_of_another_comparison_are_refused(details, tmp_path, num_models, num_samples):
    details.save(tmp_path)
    with pytest.raises(IntegrityError, match="not the details of a comparison"):
        Details.load(tmp_path, num_models, num_samples)


@pytest.mark.parametrize(
    "change",
    [
        {"losses.0": np.zeros(30)},
        {"losses.0": np.zeros((30, 2), dtype=np.float32)},
        {"numbers.0": np.zeros(30, dtype=np.float32)},
        {"other": np.zeros(30, dtype=np.float32)},
    ],
)
def test_damaged_arrays_are_refused(details, tmp_path, change):
    details.save(tmp_path)
    save_file({**load_file(tmp_path / "details.safetensors"), **change}, tmp_path / "details.safetensors")
    with pytest.raises(IntegrityError):
        Details.load(tmp_path, 2, 30)


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", "[" * 100_000, json.dumps([{}])])
def test_damaged_tables_are_refused(details, tmp_path, text):
    details.save(tmp_path)
    (tmp_path / "details.json").write_text(text)
    with pytest.raises(IntegrityError):
        Details.load(tmp_path, 2, 30)
