"""`model.mlp` on tables.

Shape legend: N rows, B of a batch, F numeric columns, C categorical columns, T outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from ptpipe import Context, StageError
from ptpipe_data.table_columns import CategoriesInfo, NumbersInfo
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Classification,
    ColumnInfo,
    Data,
    DatasetInfo,
    ImageInfo,
    Model,
    Regression,
    Split,
    Task,
)
from ptpipe_zoo import MlpConfig, mlp, nets

CLASSES = Classification(class_names=("a", "b", "c"))
NUMBERS = Regression(target_names=("u", "v"), mean=(100.0, -3.0), std=(20.0, 0.5))
TASKS = pytest.mark.parametrize("task", [CLASSES, NUMBERS], ids=["classification", "regression"])
VOCABULARY = (("x", "y"), tuple(f"v{number:03d}" for number in range(99)))


def numbers_info(num: int = 3) -> NumbersInfo:
    return NumbersInfo(names=tuple(f"n{place}" for place in range(num)), mean=(5.0,) * num, std=(2.0,) * num)


def categories_info() -> CategoriesInfo:
    return CategoriesInfo(names=("c", "d"), categories=VOCABULARY)


COLUMNS: dict[str, dict[str, ColumnInfo]] = {
    "numbers": {"numbers": numbers_info()},
    "categories": {"categories": categories_info()},
    "both": {"numbers": numbers_info(), "categories": categories_info()},
}
EVERY = pytest.mark.parametrize("inputs", COLUMNS.values(), ids=COLUMNS)


def table(inputs: Mapping[str, ColumnInfo], task: Task, num: int = 6) -> Data:
    """Random rows, of which the last has categories that train does not have."""
    random = np.random.default_rng(0)
    categories_NC = np.stack([random.integers(1, 1 + len(values), num) for values in VOCABULARY], axis=1)
    categories_NC[-1] = 0
    values = {"numbers": random.normal(5, 2, (num, 3)).astype(np.float32), "categories": categories_NC}
    targets = {
        "labels": random.integers(0, 3, num),
        "targets": random.normal((100, -3), (20, 0.5), (num, 2)).astype(np.float32),
    }
    split = Split(
        np.array([f"t.csv/{row}" for row in range(num)]),
        {name: ArrayColumn(values[name]) for name in inputs},
        {name: ArrayColumn(targets[name]) for name in task.targets},
    )
    return Data(DatasetInfo("table", inputs, task), {"train": split})


def args_of(data: Data) -> tuple[torch.Tensor, ...]:
    (batch,) = data.batches("train")
    return batch.args


def built(data: Data, ctx: Context, **options: Any) -> tuple[Model, nn.Module]:
    model = mlp(MlpConfig(**options), ctx, data)
    return model, model.build()


@TASKS
@EVERY
def test_it_takes_and_returns_what_the_data_set_needs(
    inputs: Mapping[str, ColumnInfo], task: Task, ctx: Context
) -> None:
    data = table(inputs, task)
    model, network = built(data, ctx, hidden=(8,))
    assert model.signature == data.info.signature
    outputs_BT = network(*args_of(data))
    assert outputs_BT.shape == (6, task.outputs[0].shape[1]) and outputs_BT.dtype == torch.float32
    assert outputs_BT.isfinite().all()
    with model.predictor() as predict:
        (batch,) = data.batches("train")
        np.testing.assert_allclose(
            predict(batch.input_arrays())[task.outputs[0].name], outputs_BT.numpy(force=True), rtol=1e-5, atol=1e-5
        )


@TASKS
@EVERY
def test_it_computes_what_it_says(inputs: Mapping[str, ColumnInfo], task: Task, ctx: Context) -> None:
    data = table(inputs, task)
    model, network = built(data, ctx, hidden=(7,))
    t, args = dict(model.tensors), args_of(data)
    prefix = "layers." if "categories" in inputs else ""
    parts = [args[0]] if "numbers" in inputs else []
    if "categories" in inputs:
        parts += [t[f"embeddings.{column}.weight"][args[-1][:, column]] for column in (0, 1)]
    hidden = F.relu(F.linear(torch.cat(parts, 1), t[f"{prefix}1.weight"], t[f"{prefix}1.bias"]))
    expected_BT = F.linear(hidden, t[f"{prefix}3.weight"], t[f"{prefix}3.bias"])
    if task is NUMBERS:
        expected_BT = expected_BT * torch.tensor(NUMBERS.std) + torch.tensor(NUMBERS.mean)
    torch.testing.assert_close(network(*args), expected_BT)


def test_categories_are_embedded_in_half_as_many_numbers_but_at_most_32(ctx: Context) -> None:
    model, _ = built(table(COLUMNS["both"], CLASSES), ctx)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors.items() if name.startswith("embeddings")}
    assert shapes == {"embeddings.0.weight": (3, 2), "embeddings.1.weight": (100, 32)}
    assert model.tensors["layers.1.weight"].shape == (256, 3 + 2 + 32)


@EVERY
def test_outputs_of_a_regression_have_the_targets_units(inputs: Mapping[str, ColumnInfo], ctx: Context) -> None:
    """Without a step of training: near the mean of each target, within a standard deviation or two."""
    data = table(inputs, NUMBERS)
    model, network = built(data, ctx)
    distance_BT = (network(*args_of(data)) - torch.tensor(NUMBERS.mean)) / torch.tensor(NUMBERS.std)
    assert 0 < distance_BT.abs().max() < 2
    scale, shift = (name for name in model.tensors if name.endswith(("scale", "shift")))
    assert model.tensors[scale].tolist() == [20, 0.5] and model.tensors[shift].tolist() == [100, -3]
    assert {"scale", "shift"}.isdisjoint(name.rpartition(".")[2] for name, _ in network.named_parameters())


@pytest.mark.parametrize(("inputs", "expected"), [("numbers", nn.Sequential), ("both", nets.MixedMlp)])
def test_outputs_of_a_classification_are_not_rescaled(inputs: str, expected: type, ctx: Context) -> None:
    _, network = built(table(COLUMNS[inputs], CLASSES), ctx)
    assert type(network) is expected
    assert not [module for module in network.modules() if isinstance(module, nets.Rescale)]


def test_dropout_and_no_hidden_layers(ctx: Context) -> None:
    _, network = built(table(COLUMNS["numbers"], NUMBERS), ctx, hidden=(4,), dropout=0.25)
    assert [type(layer) for layer in network] == [
        nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nets.Rescale,
    ]  # fmt: skip
    _, linear = built(table(COLUMNS["numbers"], CLASSES), ctx, hidden=())
    assert [type(layer) for layer in linear] == [nn.Flatten, nn.Linear]


@EVERY
def test_fx_traces_it(inputs: Mapping[str, ColumnInfo], ctx: Context) -> None:
    data = table(inputs, NUMBERS)
    _, network = built(data, ctx)
    traced = fx.symbolic_trace(network)
    assert traced(*args_of(data)).equal(network(*args_of(data)))
    assert sum(node.op == "placeholder" for node in traced.graph.nodes) == len(inputs)


@EVERY
def test_the_seed_alone_decides_the_weights(inputs: Mapping[str, ColumnInfo], ctx: Context) -> None:
    data = table(inputs, NUMBERS)
    torch.manual_seed(1)
    one, _ = built(data, ctx)
    expected = torch.rand(2)
    torch.manual_seed(1)
    same, _ = built(data, ctx)
    assert torch.rand(2).equal(expected), "torch's own random numbers are left alone"
    assert one.tensors.keys() == same.tensors.keys()
    assert all(tensor.equal(same.tensors[name]) for name, tensor in one.tensors.items())
    other, _ = built(data, Context("net", "model.mlp", 8, ctx.scratch))
    changed = {name for name, tensor in one.tensors.items() if not tensor.equal(other.tensors[name])}
    assert changed == {name for name in one.tensors if not name.endswith(("scale", "shift"))}


@TASKS
@EVERY
def test_it_survives_the_store(inputs: Mapping[str, ColumnInfo], task: Task, ctx: Context) -> None:
    data = table(inputs, task)
    model, network = built(data, ctx)
    folder = ctx.scratch / "model"
    folder.mkdir()
    model.save(folder)
    loaded = Model.load(folder)
    assert loaded.recipe == model.recipe
    assert loaded.build()(*args_of(data)).equal(network(*args_of(data)))


@TASKS
@EVERY
def test_every_weight_is_trained(inputs: Mapping[str, ColumnInfo], task: Task, ctx: Context) -> None:
    data = table(inputs, task)
    _, network = built(data, ctx, hidden=(16,))
    (batch,) = data.batches("train")
    losses_B = task.losses({task.outputs[0].name: network(*batch.args)}, batch.targets)
    losses_B.mean().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def image_info(shape_CHW: tuple[int, int, int] = (3, 4, 4)) -> ImageInfo:
    return ImageInfo(shape_CHW=shape_CHW, mean=(0.5,) * 3, std=(0.5,) * 3)


REFUSED: dict[str, dict[str, ColumnInfo]] = {
    "an image and numbers": {"images": image_info(), "numbers": numbers_info()},
    "two images": {"images": image_info(), "masks": image_info()},
    "numbers twice": {"numbers": numbers_info(), "others": numbers_info()},
    "categories twice": {"categories": categories_info(), "others": categories_info()},
    "categories first": {"categories": categories_info(), "numbers": numbers_info()},
    "a matrix": {"signal": ArrayInfo(dtype="float32", shape=(8, 9))},
    "a number without an axis": {"number": ArrayInfo(dtype="float32")},
    "numbers of any length": {"signal": ArrayInfo(dtype="float32", shape=("length",))},
    "integers of no vocabulary": {"tokens": ArrayInfo(dtype="int64", shape=(5,))},
    "bytes": {"bytes": ArrayInfo(dtype="uint8", shape=(5,))},
    "numbers and integers of no vocabulary": {
        "numbers": numbers_info(),
        "tokens": ArrayInfo(dtype="int64", shape=(5,)),
    },
}


@pytest.mark.parametrize("inputs", REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_take_is_refused_naming_the_signature(inputs: Mapping[str, ColumnInfo]) -> None:
    info = DatasetInfo("odd", inputs, CLASSES)
    with pytest.raises(StageError) as caught:
        nets.mlp_ref(MlpConfig(), info)
    assert str(caught.value).startswith("model.mlp takes ") and "odd has " in str(caught.value)
    for spec in (*info.signature.inputs, *info.signature.outputs):
        assert str(spec) in str(caught.value)


def test_numbers_as_they_are_are_taken(ctx: Context) -> None:
    """A column of one's own plugin that is neither standardized nor of a file."""
    info = DatasetInfo("vectors", {"vectors": ArrayInfo(dtype="float32", shape=(9,))}, NUMBERS)
    reference = nets.mlp_ref(MlpConfig(hidden=()), info)
    network = nets.build_seeded(reference, 1)
    assert network(torch.zeros(2, 9)).shape == (2, 2)


def test_images_with_numbers_as_targets_are_rescaled_too() -> None:
    info = DatasetInfo("faces", {"images": image_info()}, NUMBERS)
    network = nets.build_seeded(nets.mlp_ref(MlpConfig(hidden=(8,)), info), 1)
    distance_BT = (network(torch.rand(5, 3, 4, 4)) - torch.tensor(NUMBERS.mean)) / torch.tensor(NUMBERS.std)
    assert distance_BT.abs().max() < 3
