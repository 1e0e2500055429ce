"""`model.torch`: models that a run delivered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptpipe import StageError
from ptpipe.testing import Bench
from ptpipe_torch import FunctionRef, Model, Recipe
from ptpipe_zoo import mlp, torch_model
from ptpipe_zoo.config import TorchModelConfig

from ...signatures import classifier

pytest_plugins = ["ptpipe.testing"]


@pytest.fixture
def folder(bench: Bench, make_data: Any, tmp_path: Path) -> Path:
    place = tmp_path / "net"
    place.mkdir()
    bench.run(mlp, {"hidden": [8]}, data=make_data()).save(place)
    return place


def test_it_is_the_model_that_was_saved(bench: Bench, folder: Path) -> None:
    model = bench.run(torch_model, {"folder": str(folder)})
    images_NCHW = np.ones((2, 1, 12, 12), np.float32)
    with Model.load(folder).predictor(1) as first, model.predictor(1) as second:
        np.testing.assert_array_equal(
            first({"images": images_NCHW})["logits"], second({"images": images_NCHW})["logits"]
        )
    assert model.format == "torch float32" and (folder / "tensors.safetensors").stat().st_size == model.size_bytes


def test_its_bytes_are_in_the_key(folder: Path) -> None:
    config = TorchModelConfig(folder=str(folder))
    before = torch_model.fingerprint(config)
    assert before.keys() == {"recipe.json", "tensors.safetensors"}
    (folder / "recipe.json").write_text((folder / "recipe.json").read_text() + " ")
    assert torch_model.fingerprint(config) != before
    (folder / "recipe.json").unlink()
    with pytest.raises(StageError, match=r"net is no folder with recipe\.json"):
        torch_model.fingerprint(config)


@pytest.mark.parametrize("content", ["", "{}", "[" * 10_000])
def test_another_file_is_no_model(bench: Bench, folder: Path, content: str) -> None:
    (folder / "recipe.json").write_text(content)
    with pytest.raises(StageError, match="net is no torch model that ptpipe wrote: not a model recipe"):
        bench.run(torch_model, {"folder": str(folder)})


def test_a_network_that_was_prepared_for_training_is_refused(bench: Bench, folder: Path) -> None:
    model = Model.load(folder)
    model.with_recipe(backend="qnnpack").save(folder)
    with pytest.raises(StageError, match="net has a network that was prepared for training in int8, and not converted"):
        bench.run(torch_model, {"folder": str(folder)})


def test_tensors_of_another_network(bench: Bench, folder: Path) -> None:
    (folder / "tensors.safetensors").unlink()
    with pytest.raises(
        StageError, match=r"net is no torch model that ptpipe wrote: tensors\.safetensors can't be read"
    ):
        bench.run(torch_model, {"folder": str(folder)})


def test_a_network_of_ones_own_needs_its_function_named(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\ndef make_net():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))\n"
    )
    recipe = Recipe(FunctionRef.in_file(file, "make_net", {}), classifier((1, 2, 2), 3))
    place = tmp_path / "net"
    place.mkdir()
    Model(recipe, {"1.weight": torch.zeros(3, 4), "1.bias": torch.zeros(3)}).save(place)
    with pytest.raises(StageError, match=r"needs mine\.py:make_net, and no option above names this function"):
        bench.run(torch_model, {"folder": str(place)})
    assert bench.run(torch_model, {"folder": str(place), "functions": [f"{file}:make_net"]}).format == "torch float32"


def test_a_shipped_int8_model_has_no_float_tensors(tmp_path: Path) -> None:
    """It is saved as it came, and comes back."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    recipe = Recipe(
        FunctionRef("a.b:c", {}), classifier((1, 2, 2), 3), backend="fbgemm", convert=(FunctionRef("a.b:d", {}),)
    )
    Model(recipe, {"w": torch.zeros(3)}, {"w": torch.zeros(3, dtype=torch.int8)}).save(tmp_path / "first")
    (tmp_path / "first" / "tensors.safetensors").unlink()
    Model.load(tmp_path / "first").save(tmp_path / "second")
    assert {file.name for file in (tmp_path / "second").iterdir()} == {"recipe.json", "int8.safetensors"}
    with pytest.raises(StageError, match="needs the float weights that an int8 model was made from"):
        _ = Model.load(tmp_path / "second").tensors
    assert Model.load(tmp_path / "second").size_bytes == (tmp_path / "first" / "int8.safetensors").stat().st_size
