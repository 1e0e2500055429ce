"""The sum of two convolutions of one tensor, against one convolution with both weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from ptpipe_torch.merged_convolution import Convolution, merged

LAYERS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SIZE = 13
X = torch.randn(2, 4, 9, 9, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def layer(kernel: Any, stride: Any = 1, padding: Any = 0, dilation: int = 1, multiplier: int = 1) -> nn.Conv2d:
    return nn.Conv2d(4, 4 * multiplier, kernel, stride, padding, dilation, groups=4)


def convolution_of(layer: Any) -> Convolution:
    bias_K = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias
    return Convolution(layer.weight, bias_K, layer.groups, layer.stride, layer.padding, layer.dilation)


def computed(convolution: Convolution, x: torch.Tensor) -> torch.Tensor:
    functions: Any = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)
    options = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)
    parameters = (convolution.weight.double(), convolution.bias_K.double())
    return functions[len(convolution.stride) - 1](x, *parameters, *options)  # type: ignore[no-any-return]


@st.composite
def layers(draw: Any, num_axes: int, stride: int) -> nn.Module:
    kernel, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    padding, groups = draw(st.integers(0, ((kernel - 1) * dilation + 1) // 2)), draw(st.sampled_from([1, 2, 4]))
    return LAYERS[num_axes - 1](4, 8, kernel, stride, padding, dilation, groups, bias=draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 2), st.integers(1, 2))
def test_what_is_merged_computes_the_sum(data: Any, num_axes: int, stride: int) -> None:
    torch.manual_seed(0)
    terms = [convolution_of(data.draw(layers(num_axes, stride))) for _ in range(2)]
    x = torch.randn(2, 4, *(SIZE,) * num_axes, dtype=torch.double)
    with torch.no_grad():
        outputs = [computed(term, x) for term in terms]
        assume(outputs[0].shape == outputs[1].shape)
        found = merged(*terms, mixed_sizes=data.draw(st.booleans()))
        if found is not None:
            index, total = found
            assert total.weight.shape == terms[index].weight.shape
            torch.testing.assert_close(computed(total, x), outputs[0] + outputs[1])


PAIRS: dict[str, tuple[nn.Module, nn.Module | Convolution]] = {
    "pixels": (layer(3, padding=1), layer(1)),
    "strided": (layer(3, 2, 1), layer(1, 2)),
    "dilated in a larger kernel": (layer(7, padding=3), layer(3, padding=2, dilation=2)),
    "both dilated": (layer(5, padding=4, dilation=2), layer(3, padding=2, dilation=2)),
    "lines": (layer(3, padding=1), layer((1, 3), padding=(0, 1))),
    "several outputs for each channel": (layer(3, padding=1, multiplier=2), layer(1, multiplier=2)),
    "identity": (layer(5, padding=2), Convolution.identity(4, 2)),
    "pointwise": (nn.Conv2d(4, 4, 1), Convolution.identity(4, 2)),
    "one size": (nn.Conv2d(4, 4, 3, padding=1), layer(3, padding=1)),
    "dense": (nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 1, bias=False)),
    "dense and depthwise": (nn.Conv2d(4, 4, 3, padding=1), layer(1)),
    "grouped and depthwise": (nn.Conv2d(4, 8, 3, padding=1, groups=2), layer(1, multiplier=2)),
    "dense and identity": (nn.Conv2d(4, 4, 3, padding=1), Convolution.identity(4, 2)),
}


def pair(name: str) -> list[Convolution]:
    return [convolution_of(term) if isinstance(term, nn.Module) else term for term in PAIRS[name]]


@pytest.mark.parametrize("name", PAIRS)
def test_merges(name: str) -> None:
    with torch.no_grad():
        kept, other = pair(name)
        for order in ((kept, other), (other, kept)):
            found = merged(*order, mixed_sizes=True)
            assert found is not None
            assert order[found[0]] is kept
            torch.testing.assert_close(computed(found[1], X), computed(kept, X) + computed(other, X))


@pytest.mark.parametrize("name", ["pixels", "both dilated", "identity", "pointwise", "one size"])
def test_depthwise_kernels_and_those_of_one_size_always_merge(name: str) -> None:
    assert merged(*pair(name), mixed_sizes=False) is not None


@pytest.mark.parametrize("name", ["dense", "dense and depthwise", "dense and identity"])
def test_dense_kernels_of_several_sizes_stay_unless_asked(name: str) -> None:
    assert merged(*pair(name), mixed_sizes=False) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (layer((1, 3), padding=(0, 1)), layer((3, 1), padding=(1, 0))),  # neither has the room
        (layer(3, padding=2, dilation=2), layer(3, padding=1)),  # between the other's elements
        (layer(3, 2, 1), layer(3, (2, 1), 1)),
        (layer(3, padding=1, multiplier=2), layer(1)),
        (nn.Conv2d(1, 4, 3, padding=1), layer(1)),  # of another input
        (layer(3, padding=1), nn.Conv2d(4, 4, 1)),  # the larger kernel reads one channel for each output
    ],
)
def test_does_not_merge(first: Any, second: Any) -> None:
    assert merged(convolution_of(first), convolution_of(second), mixed_sizes=True) is None


def test_scaled() -> None:
    convolution, (factor_K, summand_K) = convolution_of(layer(3)), torch.randn(2, 4, dtype=torch.double)
    with torch.no_grad():
        expected = computed(convolution, X) * factor_K[:, None, None] + summand_K[:, None, None]
        torch.testing.assert_close(computed(convolution.scaled(factor_K, summand_K), X), expected)
