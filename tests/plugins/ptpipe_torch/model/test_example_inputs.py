"""Inputs for networks where no data is at hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptpipe_torch import BATCH, TensorSpec
from ptpipe_torch.model.example_inputs import NUM_PROBES, computes_the_same, probe_inputs, zeros

TOKENS = TensorSpec("tokens", "int64", (BATCH, "length"))
SIGNAL = TensorSpec("signal", "float32", (BATCH, 3, "length"))


def test_probes_of_any_length_have_one_that_no_network_was_traced_at() -> None:
    tokens_BL, signal_BCL = probe_inputs(lambda tokens, signal: signal.sum(1) + tokens, (TOKENS, SIGNAL))
    assert tokens_BL.shape == (NUM_PROBES, 11)
    assert signal_BCL.shape == (NUM_PROBES, 3, 11)


def test_axes_of_pictures_have_sizes_of_their_own() -> None:
    picture = TensorSpec("images", "float32", (BATCH, 3, "height", "width"))
    shapes = [zeros((picture,), 2, size)[0].shape[2:] for size in (16, 9, 8, 11)]
    assert len({*shapes}) == len({height for height, _ in shapes}) == len({width for _, width in shapes}) == 4
    assert shapes[0][1] - shapes[0][0] != shapes[1][1] - shapes[1][0] != 0
    assert len({-(-height // 32) for height, _ in shapes[:2]}) == 2, "recorded as constants after five halvings"


@pytest.mark.parametrize("shape", [(3, 32, "width"), (3, "side", "side"), (1, "depth", "height", "width")])
def test_inputs_of_many_axes_have_long_ones(shape: tuple[int | str, ...]) -> None:
    spec = TensorSpec("images", "float32", (BATCH, *shape))
    first, second = (zeros((spec,), 2, size)[0].shape for size in (16, 9))
    for axis, size in enumerate(spec.shape):
        if axis and isinstance(size, str):
            assert -(-first[axis] // 32) != -(-second[axis] // 32)
    assert first[spec.shape.index(spec.symbols[0])] % 2 == 1
    assert first.numel() <= 2 * 3 * 224**2


@pytest.mark.parametrize("factor", [2, 4, 8, 32, 64])
def test_multiples_are_multiples_at_each_size(factor: int) -> None:
    picture = TensorSpec("images", "float32", (BATCH, 1, f"{factor}*height", f"{factor}*width"))
    half = TensorSpec("halves", "float32", (BATCH, f"{factor // 2}*height" if factor > 2 else "height"))
    for size in (16, 9):
        images, halves = zeros((picture, half), 2, size)
        assert images.shape[2] == 2 * halves.shape[1] and images.shape[2] != images.shape[3]
        assert images.shape[2] % factor == images.shape[3] % factor == 0
    first, second = (zeros((picture,), 2, size)[0].shape for size in (16, 9))
    assert first[2] != second[2] and first[3] != second[3]


def test_a_network_that_does_not_take_that_length_gets_another() -> None:
    (signal_BCL,) = probe_inputs(lambda signal: signal.reshape(len(signal), -1, 8), (SIGNAL,))
    assert signal_BCL.shape == (NUM_PROBES, 3, 16)
    assert signal_BCL.any()


def test_what_a_network_raises_for_all_of_them_is_raised() -> None:
    def network(signal: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"{signal.shape[2]} samples")

    with pytest.raises(ValueError, match="16 samples"):
        probe_inputs(network, (SIGNAL,))


class Categories(nn.Module):
    """Takes the integers below 6."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(tokens, 6)


def test_a_traced_network_prints_nothing_of_integers_that_it_does_not_take(capfd) -> None:
    network = torch.fx.symbolic_trace(Categories())
    (tokens_BL,) = probe_inputs(network, (TOKENS,))
    assert tokens_BL.max() == 1
    assert not computes_the_same(network, nn.Flatten(), (TOKENS,))
    assert capfd.readouterr() == ("", "")


MASK = TensorSpec("mask", "bool", (BATCH, "length"))


def hidden_by(value: bool):
    def network(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tokens.float().masked_fill(mask == value, -torch.inf).softmax(1)

    return network


@pytest.mark.parametrize("value", [True, False])
def test_masks_hide_some_places_whatever_true_means(value: bool) -> None:
    tokens_BL, mask_BL = probe_inputs(hidden_by(value), (TOKENS, MASK))
    assert mask_BL.any(1).all() and not mask_BL.all(1).any() and tokens_BL.max() > 16
    (alone_BL,) = probe_inputs(lambda tokens: tokens, (TOKENS,))
    assert tokens_BL.equal(alone_BL), "others are drawn as without masks"


def test_masks_of_one_place_differ_between_others() -> None:
    (mask_BL1,) = probe_inputs(lambda mask: mask, (TensorSpec("mask", "bool", (BATCH, "length", 1)),))
    assert mask_BL1.any(1).all() and not mask_BL1.all(1).any()


@pytest.mark.parametrize("value", [True, False])
def test_masks_that_may_hide_nothing_hide_nothing(value: bool) -> None:
    mask_BL, scores_BL = probe_inputs(
        lambda mask, scores: scores.masked_fill(mask != value, torch.nan),
        (MASK, TensorSpec("x", "float32", (BATCH, 11))),
    )
    assert (mask_BL == value).all() and scores_BL.any()


def test_fixed_sizes_stay() -> None:
    spec = TensorSpec("image", "float32", (BATCH, 3, 8, 8))
    assert [value.shape for value in probe_inputs(lambda image: image, (spec,))] == [(NUM_PROBES, 3, 8, 8)]
    assert [value.shape for value in zeros((spec, SIGNAL), 2, 5)] == [(2, 3, 8, 8), (2, 3, 5)]
