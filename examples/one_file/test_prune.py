"""Run with `pytest`."""
# ruff: noqa: D103  # a test says what it is in its name

from typing import Any

import pytest
import torch
from prune import prune
from torch import nn

from ptpipe import ManifestError, StageError
from ptpipe.testing import Bench
from ptpipe_torch import FunctionRef, Model, Recipe, Signature, TensorSpec, builder

pytest_plugins = ["ptpipe.testing"]


@builder
def one_layer() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))


def make_model(**changes: Any) -> Model:
    network = one_layer()
    network[1].weight.data = torch.tensor([[1.0, -2.0, 3.0, -4.0], [8.0, 7.0, -6.0, 5.0]])
    images = TensorSpec("images", "float32", ("batch", 1, 2, 2))
    logits = TensorSpec("logits", "float32", ("batch", 2))
    recipe = Recipe(FunctionRef.to(one_layer), Signature((images,), (logits,)), **changes)
    return Model.from_module(recipe, network)


def test_the_smallest_weights_become_zero(bench: Bench) -> None:
    pruned = bench.run(prune, {"amount": 0.4}, model=make_model())
    assert pruned.tensors["1.weight"].tolist() == [[0, 0, 0, -4], [8, 7, -6, 5]]
    assert bench.metrics == {"num_weights": 8, "num_zeros": 3}


def test_the_network_still_predicts(bench: Bench) -> None:
    network = bench.run(prune, {"amount": 0.4}, model=make_model()).build()
    assert network(torch.ones(1, 1, 2, 2)).tolist() == [[-4, 14]]


def test_an_int8_model_is_refused(bench: Bench) -> None:
    converted = make_model(convert=(FunctionRef("ptpipe_quant.some:transform"),))
    with pytest.raises(StageError, match="put it before quant"):
        bench.run(prune, model=converted)


def test_a_wrong_option_is_found_before_any_work(bench: Bench) -> None:
    with pytest.raises(ManifestError, match="amount"):
        bench.run(prune, {"amount": 1}, model=make_model())
