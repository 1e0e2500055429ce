"""A model: captured, stored, rebuilt to the same bits, run, and refused where it was altered."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ptpipe import IntegrityError, StageError
from ptpipe_torch import FunctionRef, Model, Recipe, builder, transform
from ptpipe_torch.model.function_ref import FunctionRef as RegistryPart

from ....signatures import classifier, logits_from

HERE = __name__


@builder
def small(*, width: int = 4) -> nn.Module:
    """A convolution, batch norm, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 3)
    )


@transform
def doubled(module: nn.Module, *, times: int) -> nn.Module:
    """Put a layer behind it that multiplies."""
    return nn.Sequential(module, Times(times))


@builder
def secretive() -> nn.Module:
    """A network that keeps something else than tensors."""
    return Secretive()


@builder
def expanded() -> nn.Module:
    """A network with a buffer of one row that is repeated, as `torch.meshgrid` returns it."""
    module = nn.Linear(3, 3)
    module.register_buffer("grid", torch.arange(3.0).expand(3, 3))
    return module


class Times(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Secretive(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> str:
        return "secret"


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    module = small(width=5)
    module(torch.randn(32, 1, 8, 8))  # running statistics that are not the initial ones
    return Model.from_module(Recipe(FunctionRef.to(small, width=5), classifier((1, 8, 8), 3)), module)


def stored(model: Model, folder: Path) -> Model:
    folder.mkdir(parents=True)
    model.save(folder)
    return Model.load(folder)


def test_rebuilt_bit_by_bit(model, tmp_path) -> None:
    again = stored(model, tmp_path / "a")
    assert again.recipe == model.recipe
    for name, tensor in model.build().state_dict().items():
        assert torch.equal(tensor, again.build().state_dict()[name])
    assert not again.build().training
    x = np.random.default_rng(0).standard_normal((4, 1, 8, 8)).astype(np.float32)
    with model.predictor() as here, again.predictor(1) as there:
        assert np.array_equal(logits_from(here, x), logits_from(there, x))
    assert (again.format, again.signature) == ("torch float32", classifier((1, 8, 8), 3))


def test_capture_takes_a_copy(model) -> None:
    module = model.build()
    kept = model.with_state_dict_of(module)
    with torch.no_grad():
        module[0].weight.zero_()
    assert not torch.equal(kept.tensors["0.weight"], module[0].weight)


def test_the_size_is_that_of_the_file(model, tmp_path) -> None:
    again = stored(model, tmp_path / "a")
    assert again.size_bytes == model.size_bytes == (tmp_path / "a" / "tensors.safetensors").stat().st_size
    assert model.summary() == {"format": "torch float32", "size_bytes": model.size_bytes}


def test_expanded_buffers(tmp_path) -> None:
    model = Model.from_module(Recipe(FunctionRef.to(expanded), classifier((1, 1, 3), 3)), expanded())
    model.save(tmp_path)
    assert torch.equal(Model.load(tmp_path).build().get_buffer("grid"), torch.arange(3.0).repeat(3, 1))


def test_transforms_before_and_after_the_tensors(model) -> None:
    inner = model.build()
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        after = model.with_recipe(convert=(FunctionRef.to(doubled, times=3),)).build()
        assert torch.equal(after(x), 3 * inner(x))
        wrapped = doubled(small(width=5), times=2)
        recipe = Recipe(
            model.recipe.builder,
            classifier((1, 8, 8), 3),
            prepare=(FunctionRef.to(doubled, times=2),),
            backend="fbgemm",
        )
        prepared = Model.from_module(recipe, wrapped)
        assert torch.equal(prepared.build()(x), wrapped.eval()(x))
    assert prepared.format == "torch prepared fbgemm"
    assert (
        model.with_recipe(convert=(FunctionRef.to(doubled, times=3),), backend="x86").format == "torch int8 dynamic x86"
    )


def test_building_leaves_random_streams_alone(model) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model.build()
    assert torch.equal(torch.rand(1), expected)


def test_arrays_that_may_not_be_written_to(model) -> None:
    x = np.zeros((2, 1, 8, 8), dtype=np.float32)
    x.flags.writeable = False
    with model.predictor() as predict:
        assert logits_from(predict, x).shape == (2, 3)
        assert logits_from(predict, x).dtype == np.float32


def test_threads_are_restored(model) -> None:
    before = torch.get_num_threads()
    with model.predictor(num_threads=1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_state_that_is_not_tensors_is_refused() -> None:
    with pytest.raises(StageError, match=r"keeps _extra_state \(str\) in its state"):
        Model.from_module(Recipe(FunctionRef.to(secretive), classifier((1, 1, 1), 2)), Secretive())


@transform
def picky(module: nn.Module) -> nn.Module:
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            raise NotImplementedError("no linear layers")
    return module


def test_what_a_transform_refuses_is_no_damage(model) -> None:
    """Exit code 1 and the layer: exit code 5 is for bytes alone."""
    with pytest.raises(
        StageError, match=r":picky can't be applied: NotImplementedError: no .*; layer 4 \(Linear\) must"
    ):
        model.with_recipe(convert=(FunctionRef.to(picky),)).build()


def test_an_engine_that_is_not_there(model) -> None:
    alien = model.with_recipe(convert=(FunctionRef.to(doubled, times=1),), backend="tpu")
    with pytest.raises(StageError, match="does not support int8 backend tpu"):
        alien.build()


class TestAltered:
    """Files that are not what was written: IntegrityError, and nothing of theirs is run."""

    def recipe(self, model: Model, folder: Path, **changes: object) -> Model:
        stored(model, folder)
        content = json.loads((folder / "recipe.json").read_text()) | changes
        (folder / "recipe.json").write_text(json.dumps(content))
        return Model.load(folder)

    @pytest.mark.parametrize(
        "changes",
        [
            {"builder": "small"},
            {"builder": {"address": 3, "arguments": {}}},
            {"builder": {"address": "a:b", "arguments": []}},
            {"signature": None},
            {"signature": {"inputs": [], "outputs": []}},
            {"signature": {"inputs": [], "outputs": [], "state": []}},
            {"prepare": {}},
            {"convert": [1]},
            {"backend": 1},
        ],
    )
    def test_a_recipe_of_other_types(self, model, tmp_path, changes) -> None:
        with pytest.raises(IntegrityError, match="not a model recipe"):
            self.recipe(model, tmp_path / "a", **changes)

    @given(
        st.text()
        | st.recursive(st.none() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(json.dumps)
    )
    def test_a_recipe_of_anything(self, text) -> None:
        with pytest.raises(IntegrityError):
            Recipe.from_json(text)

    def test_a_recipe_of_great_depth(self) -> None:
        with pytest.raises(IntegrityError):
            Recipe.from_json("[" * 100_000)

    @pytest.mark.parametrize(
        "address", ["os:system", "builtins:eval", "torch.nn:Linear", f"{HERE}:doubled", "nowhere:f", "x"]
    )
    def test_a_recipe_that_names_other_code(self, model, tmp_path, address, monkeypatch) -> None:
        monkeypatch.setattr("os.system", lambda command: pytest.fail("was run"))
        altered = self.recipe(model, tmp_path / "a", builder={"address": address, "arguments": {"command": "true"}})
        with pytest.raises(IntegrityError):
            altered.build()

    @pytest.mark.parametrize("arguments", [{"depth": 3}, {"width": 4, "module": 1}])
    def test_arguments_that_the_builder_does_not_have(self, model, tmp_path, arguments) -> None:
        altered = self.recipe(model, tmp_path / "a", builder={"address": f"{HERE}:small", "arguments": arguments})
        with pytest.raises(IntegrityError, match=r"can't be applied as the recipe says"):
            altered.build()

    @pytest.mark.parametrize("arguments", [{"width": "wide"}, {"width": -1}, {"width": None}])
    def test_arguments_that_torch_refuses(self, model, tmp_path, arguments) -> None:
        """No check of bytes says that they were altered: the store's digests do."""
        altered = self.recipe(model, tmp_path / "a", builder={"address": f"{HERE}:small", "arguments": arguments})
        with pytest.raises(StageError, match=r":small can't be applied: (TypeError|RuntimeError): "):
            altered.build()

    def test_another_architecture(self, model, tmp_path) -> None:
        altered = self.recipe(model, tmp_path / "a", builder={"address": f"{HERE}:small", "arguments": {"width": 6}})
        with pytest.raises(IntegrityError, match=r"don't fit the network: .*size mismatch"):
            altered.build()

    def test_tensors_that_are_missing_or_too_many(self, model) -> None:
        for tensors in (
            {name: tensor for name, tensor in model.tensors.items() if name != "0.weight"},
            {**model.tensors, "more": torch.zeros(1)},
        ):
            with pytest.raises(IntegrityError, match="don't fit the network"):
                Model(model.recipe, tensors).build()

    @pytest.mark.parametrize("cut", [0, 4, 100, -1])
    def test_a_tensor_file_cut_short(self, model, tmp_path, cut) -> None:
        stored(model, tmp_path / "a")
        path = tmp_path / "a" / "tensors.safetensors"
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(IntegrityError, match=r"tensors.safetensors can't be read"):
            Model.load(tmp_path / "a").build()

    def test_a_pickle_in_place_of_the_tensors(self, model, tmp_path) -> None:
        stored(model, tmp_path / "a")
        torch.save({"0.weight": torch.zeros(1)}, tmp_path / "a" / "tensors.safetensors")
        with pytest.raises(IntegrityError):
            Model.load(tmp_path / "a").build()

    def test_files_that_are_gone(self, model, tmp_path) -> None:
        stored(model, tmp_path / "a")
        (tmp_path / "a" / "tensors.safetensors").unlink()
        with pytest.raises(IntegrityError):
            Model.load(tmp_path / "a").build()
        (tmp_path / "a" / "recipe.json").write_bytes(b"\xff\xfe")
        with pytest.raises(IntegrityError, match=r"recipe.json can't be read"):
            Model.load(tmp_path / "a")


def test_the_parts_of_this_file_are_found() -> None:
    assert HERE in sys.modules
    assert RegistryPart.to(small).resolve("builder") is small


@builder
def with_replaced_head(*, width: int) -> nn.Module:
    """A network whose first head is larger than all that remains of it."""
    network = small(width=4)
    network[4] = nn.Linear(144, width)
    network[4] = nn.Linear(144, 3)
    return network


def test_a_builder_may_drop_layers_but_not_allocate_far_more_than_is_stored() -> None:
    model = Model.from_module(
        Recipe(FunctionRef.to(with_replaced_head, width=1), classifier((1, 8, 8), 3)), small(width=4)
    )
    model.with_recipe(builder=FunctionRef.to(with_replaced_head, width=50_000)).build()
    with pytest.raises(IntegrityError, match=r"builds a network of over 1000.* values, far more than are stored"):
        model.with_recipe(builder=FunctionRef.to(with_replaced_head, width=1_000_000)).build()
    assert nn.Linear(1, 200_000_000, bias=False, device="meta").out_features, "other networks may be of any size"
