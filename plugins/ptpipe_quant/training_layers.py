"""Layers that fake-quantize their weights while training, with no work on whole activations beyond a float layer's.

torch.ao's convolution with batch norm scales the weights by gamma / sigma before rounding them, as int8 will have
them, and divides the whole output by it again so that batch norm sees the convolution's own. Here the rounded
weights are divided instead: the same function (a convolution is linear in its weights) with the same gradient, at
the weights' price. Source: R. Krishnamoorthi, arXiv 1806.08342, section 3.2.2 and figure 7.

Shape legend: K output channels, and whatever a layer's weights have more.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import torch
from torch import nn

from ptpipe_quant.torch_ao import fused_relu

F = nn.functional

_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
# Below this a channel's gamma is taken for 0: its weights would be divided by nearly nothing.
_TINY = 1e-12


class TrainingLayer(nn.Module):  # type: ignore[misc]  # torch comes without types
    """A convolution or linear layer, with what is fused with it, made of the parameters of torch.ao's own layer.

    While its batch norm is in training mode it normalizes by the batch's statistics; otherwise gamma, beta and the
    running statistics are folded into the weights and bias, which is the arithmetic of the int8 layer.
    """

    freeze_at: float
    relu: bool

    @classmethod
    def of(cls, layer: nn.Module, *, relu: bool, freeze_at: float) -> Self:
        """Share everything with this layer: parameters, buffers, fake quantization, hyperparameters."""
        twin = cls.__new__(cls)
        twin.__dict__.update(layer.__dict__)
        twin.relu, twin.freeze_at = relu, freeze_at
        return twin

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`."""
        if hasattr(self, "bn"):
            self.bn.train(self.training and fraction < self.freeze_at)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to activations."""
        if not hasattr(self, "bn"):
            y = self._apply_weights(x, self.weight_fake_quant(self.weight), self.bias)
        elif self.bn.training:
            factor_K, scaled = self._scaled_weights()
            divisor_K = torch.where(factor_K.abs() < _TINY, torch.full_like(factor_K, _TINY), factor_K)
            y = self.bn(self._apply_weights(x, scaled / self._along_outputs(divisor_K), self.bias))
        else:
            factor_K, scaled = self._scaled_weights()
            bias_K = 0 if self.bias is None else self.bias
            y = self._apply_weights(x, scaled, self.bn.bias + (bias_K - self.bn.running_mean) * factor_K)
        # In place: no layer's gradient needs its own output.
        return F.relu(y, inplace=True) if self.relu else y

    def _scaled_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        factor_K = self.bn.weight / torch.sqrt(self.bn.running_var + self.bn.eps)
        return factor_K, self.weight_fake_quant(self.weight * self._along_outputs(factor_K))

    def _along_outputs(self, values_K: torch.Tensor) -> torch.Tensor:
        return values_K.reshape(-1, *(1 for _ in self.weight.shape[1:]))

    def _apply_weights(self, x: torch.Tensor, weight: torch.Tensor, bias_K: torch.Tensor | None) -> torch.Tensor:
        if weight.dim() == 2:
            return F.linear(x, weight, bias_K)
        convolve = _CONVOLUTIONS[weight.dim()]
        return convolve(x, weight, bias_K, self.stride, self.padding, self.dilation, self.groups)


def training_layer(layer: nn.Module, freeze_at: float) -> TrainingLayer | None:
    """The quick twin of torch.ao's layer; None for layers that have none."""
    relu = fused_relu(layer)
    if relu is None or getattr(layer, "padding_mode", "zeros") != "zeros":
        return None
    return TrainingLayer.of(layer, relu=relu, freeze_at=freeze_at)


class _Freezing:
    """Mixed into a batch norm that no layer took in: lets it freeze with the others."""

    freeze_at: float

    def on_progress(self: Any, fraction: float) -> None:
        self.train(self.training and fraction < self.freeze_at)


def freezing_batch_norm(layer: nn.Module, freeze_at: float) -> nn.Module | None:
    """The same batch norm, which from this share of the training on uses its running statistics."""
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return None
    type_: Any = type(layer)
    frozen_type = _freezing(type_)
    twin = frozen_type.__new__(frozen_type)
    twin.__dict__.update(layer.__dict__)
    twin.freeze_at = freeze_at
    frozen: nn.Module = twin
    return frozen


@cache
def _freezing(type_: Any) -> Any:
    return type(f"Freezing{type_.__name__}", (_Freezing, type_), {})
