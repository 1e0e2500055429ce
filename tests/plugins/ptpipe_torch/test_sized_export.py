"""Export of networks that branch on the size of an axis that has no fixed one.

Shape legend: N samples, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ptpipe_torch import BATCH, TensorSpec
from ptpipe_torch.largest_size import is_largest_size, takes
from ptpipe_torch.sized_export import export_sized

from ...networks import Applied, Joining

TOKENS = (TensorSpec("tokens", "int64", (BATCH, "length")),)
SIGNAL = (TensorSpec("signal", "float32", (BATCH, "length")),)
MAX_LENGTH = 24


class Decoder(nn.Module):
    """One layer of attention that does not see what follows, as nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 8), nn.Embedding(MAX_LENGTH, 8)
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.tril(torch.ones(MAX_LENGTH, MAX_LENGTH))[None])

    def forward(self, tokens_NL: torch.Tensor) -> torch.Tensor:
        length = tokens_NL.size(1)
        assert length <= MAX_LENGTH, f"{length} tokens, only {MAX_LENGTH} have positions"
        x_NLC = self.tokens(tokens_NL) + self.positions(torch.arange(length, device=tokens_NL.device))
        q_NLC, k_NLC, v_NLC = self.qkv(x_NLC).split(8, dim=2)
        scores_NLL = (q_NLC @ k_NLC.transpose(1, 2)).masked_fill(self.mask[:, :length, :length] == 0, -torch.inf)
        return scores_NLL.softmax(-1) @ v_NLC


def test_the_largest_size_is_that_of_the_positions() -> None:
    network = Decoder().eval()
    assert is_largest_size(network, TOKENS, MAX_LENGTH)
    assert not is_largest_size(network, TOKENS, MAX_LENGTH - 1)
    assert not is_largest_size(network, TOKENS, MAX_LENGTH + 1)
    assert not is_largest_size(Applied(torch.tanh), SIGNAL, MAX_LENGTH)
    assert takes(network, TOKENS, 1)


def test_what_a_tried_network_keeps_is_forgotten() -> None:
    class Keeping(nn.Module):
        last: torch.Tensor | None = None

        def forward(self, signal_NL: torch.Tensor) -> torch.Tensor:
            self.last = signal_NL
            return signal_NL

    network = Keeping()
    assert takes(network, SIGNAL, 3)
    assert network.last is None


def test_a_decoder_is_exported_for_every_length_that_it_takes() -> None:
    torch.manual_seed(0)
    network = Decoder().eval()
    program = export_sized(network, TOKENS)
    assert max(int(limits.upper) for limits in program.range_constraints.values() if limits.upper < 999) == MAX_LENGTH
    computing = program.module(check_guards=False)
    for length in (1, 2, 15, MAX_LENGTH - 1):
        tokens_NL = torch.randint(40, (3, length))
        torch.testing.assert_close(computing(tokens_NL), network(tokens_NL))


def test_a_length_for_which_a_branch_makes_no_difference() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape) + 1 if x.shape[1] - 1 == 5 else x + 1

    network = Applied(halves).eval()
    program = export_sized(network, SIGNAL)
    x = torch.randn(3, 9)
    torch.testing.assert_close(program.module(check_guards=False)(x), network(x))


class Halving(nn.Module):
    """Computes half of the frames, and repeats and cuts them, as Squeezeformer does: no two sizes take as many."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.frames = nn.Conv1d(4, 4, 3, 2, 1), nn.Linear(4, 4)

    def forward(self, x_NLC: torch.Tensor) -> torch.Tensor:
        frames = self.frames(self.down(x_NLC.transpose(1, 2)).transpose(1, 2))
        return x_NLC + frames.repeat_interleave(2, 1)[:, : x_NLC.shape[1]]


def test_frames_that_are_halved_and_repeated() -> None:
    torch.manual_seed(0)
    network = Halving().eval()
    program = export_sized(network, (TensorSpec("x", "float32", (BATCH, "length", 4)),))
    computing = as_in_a_file(program)
    for length in (3, 4, 31, 32):
        x_NLC = torch.randn(3, length, 4)
        with torch.no_grad():
            torch.testing.assert_close(computing(x_NLC), network(x_NLC))


def above_four(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1) if x.shape[1] > 4 else x.sum(1)


def of_one_length(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[1] - 1 == 5 else x


def of_even_lengths(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[1] % 2 else x * 1


def of_long_ones(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1) if x.shape[1] < 100 else x.sum(1)


def of_sums_with_a_remainder(x: torch.Tensor) -> torch.Tensor:
    """What is left of a sum: as an expression of Python's, without parentheses, it would be that of the last term."""
    return x * 1 if (x.shape[1] // 2 + 2) % 3 else x + 1


@pytest.mark.parametrize(
    "function", [above_four, of_one_length, of_even_lengths, of_long_ones, of_sums_with_a_remainder]
)
def test_a_branch_that_makes_a_difference_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(Exception, match=r"Constraints violated \(length\)"):
        export_sized(Applied(function).eval(), SIGNAL)


def as_in_a_file(program: torch.export.ExportedProgram) -> nn.Module:
    """Return what a program computes, without its assertions."""
    computing = program.module(check_guards=False)
    for assertion in computing.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        computing.graph.erase_node(assertion)
    computing.recompile()
    return computing


PICTURES = (TensorSpec("images", "float32", (BATCH, 2, "height", "width")),)


@pytest.mark.parametrize("factor", ["", "4*"])
def test_pictures_of_any_height_and_width(factor: str) -> None:
    torch.manual_seed(0)
    network = Joining(2).eval()
    spec = TensorSpec("images", "float32", (BATCH, 2, f"{factor}height", f"{factor}width"))
    computing = as_in_a_file(export_sized(network, (spec,)))
    for height, width in ((4, 8), (64, 64), (12, 200), *(() if factor else ((3, 5), (33, 64)))):
        images_NCHW = torch.randn(3, 2, height, width)
        with torch.no_grad():
            torch.testing.assert_close(computing(images_NCHW), network(images_NCHW))


def cropped(x: torch.Tensor) -> torch.Tensor:
    halves = nn.functional.avg_pool2d(x, 2, ceil_mode=True)
    return torch.cat([halves.repeat_interleave(2, 3)[..., : x.shape[3]].repeat_interleave(2, 2), x], 1)


@pytest.mark.parametrize("network", [Joining(2), Applied(cropped)])
def test_one_axis_of_any_size(network: nn.Module) -> None:
    """Branches and sizes that are other ones for half of all widths."""
    spec = TensorSpec("images", "float32", (BATCH, 2, 8, "width"))
    computing = as_in_a_file(export_sized(network.eval(), (spec,)))
    for width in (4, 7, 64, 101):
        images_NCHW = torch.randn(3, 2, 8, width)
        with torch.no_grad():
            torch.testing.assert_close(computing(images_NCHW), network(images_NCHW))


def test_smaller_pictures_than_a_network_takes_are_none_of_the_programs() -> None:
    network = nn.Sequential(nn.ReflectionPad2d(3), nn.Conv2d(2, 2, 3)).eval()
    program = export_sized(network, PICTURES)
    smallest = {int(limits.lower) for limits in program.range_constraints.values()}
    assert 4 in smallest
    images_NCHW = torch.randn(2, 2, 4, 9)
    with torch.no_grad():
        torch.testing.assert_close(program.module(check_guards=False)(images_NCHW), network(images_NCHW))


def of_even_heights(x: torch.Tensor) -> torch.Tensor:
    return x * 1 if x.shape[2] % 2 == 0 else x + 1


def of_third_residues(x: torch.Tensor) -> torch.Tensor:
    """What is assumed is false for three of four heights, of which one makes no difference."""
    return x * (x.shape[2] % 4) if x.shape[2] % 4 else x * 1


def of_squares(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[2] == x.shape[3] else x * 1


def of_small_ones(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[3] > 1000 else x * 1


@pytest.mark.parametrize("function", [of_even_heights, of_third_residues, of_squares, of_small_ones])
def test_a_branch_on_a_pictures_size_that_makes_a_difference_is_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(Exception, match=r"Constraints violated"):
        export_sized(Applied(function).eval(), PICTURES)


class OneEncoder(nn.Module):
    """Computes on two signals at once, as networks of optical flow do, and takes the results apart."""

    def __init__(self, take_apart: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.take_apart = take_apart

    def forward(self, a_NL: torch.Tensor, b_NL: torch.Tensor) -> torch.Tensor:
        first, second = self.take_apart(torch.cat([a_NL, b_NL]).tanh(), len(a_NL))
        return first - 2 * second


@pytest.mark.parametrize(
    "take_apart",
    [
        lambda both, _num: both.chunk(2),
        lambda both, _num: torch.chunk(both, chunks=2, dim=-2),
        lambda both, num: both.split(num),
        lambda both, num: torch.split(both, num, dim=0),
        lambda both, num: torch.split(both, [num, num]),
    ],
)
def test_a_batch_of_any_size_is_taken_apart(
    take_apart: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]],
) -> None:
    network = OneEncoder(take_apart)
    module = export_sized(network, [TensorSpec(name, "float32", (BATCH, 4)) for name in "ab"]).module()
    for num in (1, 2, 5):
        inputs = torch.randn(2, num, 4)
        assert torch.equal(module(*inputs), network(*inputs))
