"""Which weights are pruned: the layers, and the smallest of their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from ptpipe import StageError
from ptpipe_torch.pruning import dense_layers, largest, prunable_layers


class Tied(nn.Module):
    """A head that shares its weights with a table of embeddings, and other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.up = nn.Embedding(20, 8), nn.BatchNorm1d(8), nn.ConvTranspose1d(8, 8, 3)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 20)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("amount", [0.0, 0.3, 0.5, 0.99])
def test_the_smallest_weights_of_a_layer_are_those_that_torch_prunes(amount: float) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 7, 3)
    (keep,) = largest([layer.weight.detach()], amount)
    num_pruned = int(amount * layer.weight.numel())
    prune.l1_unstructured(layer, "weight", amount=num_pruned)
    assert torch.equal(keep, layer.weight_mask.bool())


def test_of_several_weights_together_the_smallest_are_pruned_and_of_equal_ones_the_first() -> None:
    one, other = torch.tensor([[3.0, -1.0], [1.0, 4.0]]), torch.tensor([1.0, -5.0, 0.5])
    keeps = largest([one, other], 3 / 7)
    assert [keep.tolist() for keep in keeps] == [[[True, False], [False, True]], [True, True, False]]


def test_layers_with_weights_of_their_own_are_pruned() -> None:
    assert list(prunable_layers(Tied(), [], "here")) == ["up", "block.0", "block.2"]
    assert list(prunable_layers(Tied(), ["block"], "here")) == ["up"]
    assert list(prunable_layers(Tied(), ["Linear"], "here")) == ["up"]


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (["blck"], r"^here: skip: no layer's name or type matches 'blck' \(did you mean 'block'\?\)"),
        (["block", "up"], "^here: no convolution or linear layer is left to prune"),
    ],
)
def test_patterns_that_match_nothing_or_all_are_refused(skip: list[str], message: str) -> None:
    with pytest.raises(StageError, match=message):
        prunable_layers(Tied(), skip, "here")


class Computed(nn.Module):
    """Layers whose weights are computed, beside one whose are not, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.spectral = nn.Linear(8, 8), parametrizations.spectral_norm(nn.Linear(8, 8))
        self.normed = parametrizations.weight_norm(nn.Conv1d(8, 8, 3))
        self.attention, self.norm = nn.MultiheadAttention(8, 2), nn.LayerNorm(8)


def test_layers_that_stay_dense_are_named() -> None:
    assert list(prunable_layers(Computed(), [], "here")) == ["plain", "attention.out_proj"]
    assert dense_layers(Computed(), [], "here") == ["spectral", "normed", "attention"]
    assert dense_layers(Computed(), ["normed", "MultiheadAttention"], "here") == ["spectral"]
    assert dense_layers(Tied(), [], "here") == []
