"""Convolutions of one tensor whose outputs are added are one, if its kernel has room for theirs.

Source: X. Ding et al., RepVGG: Making VGG-style ConvNets Great Again, CVPR 2021, section 3.3 (structural
re-parameterization).
Shape legend: C input channels, K output channels; a kernel has one to three axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Convolution:
    """A convolution with zeros around its input."""

    weight: torch.Tensor
    """Floats (K, C / groups, *kernel)."""
    bias_K: torch.Tensor
    groups: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros before the first element of each axis."""
    dilation: tuple[int, ...]

    @classmethod
    def identity(cls, num_channels: int, num_axes: int) -> Convolution:
        """Return the convolution that returns its input of `num_channels` channels and `num_axes` further axes."""
        ones, zeros = (1,) * num_axes, (0,) * num_axes
        return cls(torch.ones(num_channels, 1, *ones), torch.zeros(num_channels), num_channels, ones, zeros, ones)

    def scaled(self, factor_K: torch.Tensor, summand_K: torch.Tensor) -> Convolution:
        """Return the convolution whose output is `factor_K` times this one's and `summand_K`."""
        weight = self.weight.double() * factor_K.double().view(-1, *(1,) * (self.weight.dim() - 1))
        return replace(self, weight=weight, bias_K=self.bias_K.double() * factor_K.double() + summand_K.double())

    def normalized(
        self, gamma_K: torch.Tensor, beta_K: torch.Tensor, mean_K: torch.Tensor, variance_K: torch.Tensor, eps: float
    ) -> Convolution:
        """Return the convolution whose output is that of a batch norm, in eval mode, behind this one."""
        factor_K = gamma_K.double() / (variance_K.double() + eps).sqrt()
        return self.scaled(factor_K, beta_K.double() - mean_K.double() * factor_K)

    def times(self, factor: float) -> Convolution:
        """Return the convolution whose output is `factor` times this one's."""
        zeros_K = torch.zeros(len(self.bias_K))
        return self.scaled(zeros_K + factor, zeros_K)

    def plus(self, other: Convolution) -> Convolution | None:
        """Return the convolution whose output is the sum of both, for inputs where the outputs have one shape.

        It has this one's kernel, groups, stride and padding. None where there is no place for the other's weights.
        """
        places = [self._places(other, axis) for axis in range(len(self.stride))]
        wide = other._in_groups(self.groups)
        if self.stride != other.stride or None in places or wide is None or wide.shape[:2] != self.weight.shape[:2]:
            return None
        weight = self.weight.double().clone()
        weight[(slice(None), slice(None), *(place for place in places if place is not None))] += wide.double()
        return replace(self, weight=weight, bias_K=self.bias_K.double() + other.bias_K.double())

    def _in_groups(self, groups: int) -> torch.Tensor | None:
        """Return the weight of a convolution with so many groups that computes the same; None if there is none."""
        if self.groups % groups:
            return None
        num_outputs, num_own = self.weight.shape[:2]
        num_inputs = num_own * self.groups // groups
        output_K = torch.arange(num_outputs)
        first_K = output_K // (num_outputs // self.groups) * num_own % num_inputs
        weight = self.weight.new_zeros(num_outputs, num_inputs, *self.weight.shape[2:])
        weight[output_K[:, None], first_K[:, None] + torch.arange(num_own)] = self.weight
        return weight

    def _places(self, other: Convolution, axis: int) -> slice | None:
        """Return where in this kernel the elements of the other's are, along one axis; None if some are outside."""
        size, other_size = self.weight.shape[2 + axis], other.weight.shape[2 + axis]
        step = self.dilation[axis]
        other_step = other.dilation[axis] if other_size > 1 else step
        first = self.padding[axis] - other.padding[axis]
        last = first + (other_size - 1) * other_step
        if first < 0 or last > (size - 1) * step or first % step or other_step % step:
            return None
        return slice(first // step, last // step + 1, other_step // step)


def merged(first: Convolution, second: Convolution, *, mixed_sizes: bool) -> tuple[int, Convolution] | None:
    """Return which of two convolutions of one tensor has the kernel of their sum, 0 or 1, and the sum; None: neither.

    Of equal kernels, the first has. `mixed_sizes`: also of kernels of two sizes that are not both depthwise: rounded
    together to int8, their weights lose more than apart (decision 0065).
    """
    is_depthwise = first.weight.shape[1] == second.weight.shape[1] == 1
    if not (mixed_sizes or is_depthwise or first.weight.shape[2:] == second.weight.shape[2:]):
        return None
    for index, total in enumerate((first.plus(second), second.plus(first))):
        if total is not None:
            return index, total
    return None
