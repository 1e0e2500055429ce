"""QAT layers that fake-quantize their weights without more passes over activations than a float layer makes.

torch's `ConvBn2d` for QAT scales the weights by gamma / sigma before it rounds them, as in int8, and divides the
whole output by it again to recover the convolution's own output for batch norm. Here the rounded weights are divided
instead: the same function (a convolution is linear in its weights) with the same gradient, at the cost of the
weights' size. Source: R. Krishnamoorthi, arXiv 1806.08342, section 3.2.2 and figure 7.

Shape legend: K output channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
from torch import nn

from ptpipe_quant.fake_quant import WeightFakeQuant
from ptpipe_torch.int8.layers import fused_relu
from ptpipe_torch.int8.output_scales import multiply_outputs

F = nn.functional

_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
# A channel whose |gamma / sigma| is below this counts as switched off: dividing by it would overflow.
_TINY = 1e-12


class QatLayer(nn.Module):
    """A convolution or linear layer, with its fused batch norm and ReLU, that shares a torch QAT layer's parameters.

    While its batch norm is in training mode it normalizes by the batch's statistics; otherwise gamma, beta and the
    running statistics are folded into the weights and bias, which is the arithmetic of the int8 layer.
    """

    freeze_at: float
    relu: bool
    weight: nn.Parameter
    bias: nn.Parameter | None
    bn: Any  # one of torch's batch norms; only layers fused with one have it
    weight_fake_quant: Callable[[torch.Tensor], torch.Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, layer: nn.Module, *, relu: bool, freeze_at: float) -> Self:
        """Return a layer that shares parameters, buffers, fake quantization and hyperparameters with this one."""
        twin = cls.__new__(cls)
        twin.__dict__.update(layer.__dict__)
        twin.relu, twin.freeze_at = relu, freeze_at
        return twin

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`."""
        if hasattr(self, "bn"):
            self.bn.train(self.training and fraction < self.freeze_at)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float | None = None) -> torch.Tensor:
        """Apply the layer to activations. `scale`: what the output is multiplied by, one value or one per channel."""
        if hasattr(self, "bn") and self.bn.training:
            y = self._normalized_by_batch(x)
            y = y if scale is None else multiply_outputs(y, scale, -1 if self.weight.dim() == 2 else 1)
        else:
            factor_K, bias_K = self._factor_and_bias(scale)
            weight = self.weight_fake_quant(self.weight) if factor_K is None else self._folded_weights(factor_K)
            y = self._apply_weights(x, weight, bias_K)
        # In place: the gradient of a convolution or batch norm does not need its output.
        return F.relu(y, inplace=True) if self.relu else y

    def _normalized_by_batch(self, x: torch.Tensor) -> torch.Tensor:
        # Without a factor behind it, which may be zero: weights with a scale per channel are rounded the same.
        factor_K = self._factor()
        divisor_K = torch.where(factor_K.abs() < _TINY, torch.full_like(factor_K, _TINY), factor_K)
        y: torch.Tensor = self.bn(self._apply_weights(x, self._folded_weights(factor_K, divisor_K), self.bias))
        return y

    def _factor_and_bias(self, scale: torch.Tensor | float | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what the weights are multiplied by, None if by nothing, and the bias of the int8 layer."""
        factor_K: torch.Tensor | None = None
        bias_K: torch.Tensor | None = self.bias
        if hasattr(self, "bn"):
            factor_K = self._factor()
            bias_K = self.bn.bias + ((0 if bias_K is None else bias_K) - self.bn.running_mean) * factor_K
        if scale is not None:
            # A number is filled in, not copied to an accelerator, which its graphs could not record.
            scale_K = scale.reshape(-1) if isinstance(scale, torch.Tensor) else self.weight.new_full((1,), scale)
            factor_K = scale_K if factor_K is None else factor_K * scale_K
            bias_K = None if bias_K is None else bias_K * scale_K
        return factor_K, bias_K

    def _factor(self) -> torch.Tensor:
        """Return by what the batch norm multiplies each output."""
        factor_K: torch.Tensor = self.bn.weight / torch.sqrt(self.bn.running_var + self.bn.eps)
        return factor_K

    def _folded_weights(self, factor_K: torch.Tensor, divisor_K: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weights times the factor, rounded, and divided by `divisor_K` after that."""
        factor = self._along_outputs(factor_K)
        divisor = None if divisor_K is None else self._along_outputs(divisor_K)
        if type(self.weight_fake_quant) is WeightFakeQuant:  # a learned range has gradients of its own
            return self.weight_fake_quant.folded(self.weight, factor, divisor)
        scaled = self.weight_fake_quant(self.weight * factor)
        return scaled if divisor is None else scaled / divisor

    def _along_outputs(self, values_K: torch.Tensor) -> torch.Tensor:
        return values_K.reshape(-1, *(1 for _ in self.weight.shape[1:]))

    def _apply_weights(self, x: torch.Tensor, weight: torch.Tensor, bias_K: torch.Tensor | None) -> torch.Tensor:
        if weight.dim() == 2:
            return F.linear(x, weight, bias_K)
        convolve = _CONVOLUTIONS[weight.dim()]
        return convolve(x, weight, bias_K, self.stride, self.padding, self.dilation, self.groups)


def qat_layer(layer: nn.Module, freeze_at: float) -> QatLayer | None:
    """Return the faster equivalent of a torch QAT layer; None for layers that have none."""
    relu = fused_relu(layer)
    if relu is None or getattr(layer, "padding_mode", "zeros") != "zeros":
        return None
    return QatLayer.of(layer, relu=relu, freeze_at=freeze_at)


class _FreezingBatchNorm:
    """Mixin of a batch norm that no layer is fused with."""

    freeze_at: float

    def on_progress(self: Any, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`."""
        self.train(self.training and fraction < self.freeze_at)


def freeze_batch_norm(layer: Any, freeze_at: float) -> None:
    """Let a batch norm use its running statistics after this fraction of the training, in place."""
    type_: Any = type(layer)
    layer.__class__ = _freezing(type_)
    layer.freeze_at = freeze_at


@cache
def _freezing(type_: Any) -> Any:
    return type(f"Freezing{type_.__name__}", (_FreezingBatchNorm, type_), {})
