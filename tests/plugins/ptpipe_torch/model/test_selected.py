from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import IntegrityError, StageError
from ptpipe_torch import FunctionRef, Model, Recipe, Selected, builder

from ....signatures import classifier


@builder
def small_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model.from_module(Recipe(FunctionRef.to(small_net), classifier((1, 2, 2), 3)), small_net())


@pytest.fixture
def saved(tmp_path: Path, model: Model) -> Path:
    Selected("qat.model", model).save(tmp_path)
    return tmp_path


def test_it_behaves_as_the_model_does(saved: Path, model: Model) -> None:
    loaded = Selected.load(saved)
    assert isinstance(loaded.model, Model)
    assert (loaded.format, loaded.signature) == (model.format, model.signature)
    assert loaded.size_bytes == model.size_bytes
    assert loaded.summary() == {"selected": "qat.model", **model.summary()}
    images = np.ones((2, 1, 2, 2), np.float32)
    with loaded.predictor(1) as own, model.predictor(1) as other:
        assert (own({"images": images})["logits"] == other({"images": images})["logits"]).all()


def test_its_deliverables_are_those_of_the_model(saved: Path) -> None:
    assert Selected.deliverables(saved) == ("qat.model/recipe.json", "qat.model/tensors.safetensors")
    assert all((saved / name).is_file() for name in Selected.deliverables(saved))


def test_none_selected(tmp_path: Path) -> None:
    Selected().save(tmp_path)
    loaded = Selected.load(tmp_path)
    assert loaded.chosen is None and loaded.summary() == {} and Selected.deliverables(tmp_path) == ()
    assert loaded.with_options({}) is loaded and loaded.with_source_functions(["a.py:b"]) is loaded
    with pytest.raises(StageError, match=r"^no model was selected$"):
        _ = loaded.format


def test_the_functions_that_it_may_call_are_passed_on(model: Model) -> None:
    own = Selected("a", model).with_source_functions(["/x.py:f"])
    assert isinstance(own.model, Model) and own.model.recipe.builder.source_functions == ("/x.py:f",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ("[]", "is not that of a selected model"),
        ({"name": "a"}, "is not that of a selected model"),
        ({"name": "a", "type": 3}, "is not that of a selected model"),
        ({"name": "../a", "type": "ptpipe_torch.model.model:Model"}, "is no model's name"),
        ({"name": "a", "type": "os:system"}, "not a class of models"),
        ({"name": "a", "type": "antigravity:x"}, "its plugin is not loaded"),
        ({"name": "a", "type": "ptpipe_torch.model.deployable:Deployable"}, "not a class of models"),
        ({"name": "a", "type": "ptpipe_torch.data.data:Data"}, "not a class of models"),
    ],
)
def test_what_is_stored_chooses_no_code(saved: Path, content: object, message: str) -> None:
    (saved / "selection.json").write_text(content if isinstance(content, str) else json.dumps(content))
    for read in (Selected.load, Selected.deliverables):
        with pytest.raises(IntegrityError, match=message):
            read(saved)
