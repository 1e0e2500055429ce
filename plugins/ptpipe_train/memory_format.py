"""Choice of the memory format of a training."""

from __future__ import annotations

import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_torch import Data, Model
from ptpipe_torch.memory_format import to_preferred_format
from ptpipe_train.device import DeviceSettings, first_batch

_NUM_IMAGES = 2
_CHANNEL_BLOCK = 16
"""Of oneDNN's kernels at most."""


def uses_channels_last(option: str, ctx: Context, model: Model, data: Data, device: torch.device) -> bool:
    """Return what the option `memory_format` comes to; auto: whether the network convolves images and runs in it.

    Tried on real images with a second build of the network, so nothing of the first one changes. Raises StageError
    where channels-last is asked for and its gradients would be wrong.
    """
    if option == "contiguous" or (option == "auto" and not _may_convolve(model)):
        return False
    module = model.build_prepared()
    fault = _wrong_gradient(module) if device.type == "cpu" else None
    if option == "channels_last":
        if fault is not None:
            raise StageError(f"memory_format: {fault}: leave it auto, or set contiguous")
        return True
    if fault is not None:
        ctx.log(f"memory_format contiguous: {fault}")
        return False
    settings = DeviceSettings(device, channels_last=True)
    batch = first_batch(data, settings, _NUM_IMAGES)
    return to_preferred_format(module.to(device), batch.args, ctx.log)


def _may_convolve(model: Model) -> bool:
    """Return whether an input or a weight has the four axes of images, which is seen without building the network."""
    return any(len(spec.shape) == 4 for spec in model.signature.inputs) or any(
        tensor.dim() == 4 for tensor in model.tensors.values()
    )


def _wrong_gradient(module: nn.Module) -> str | None:
    """Return why a network must not be trained in channels-last on a CPU, or None.

    The weight gradient of a 1x1 convolution with a stride and fewer input channels than a block writes beyond its
    memory there: wrong gradients or a crash (https://github.com/uxlfoundation/oneDNN/issues/6035, torch 2.13).
    """
    for name, layer in module.named_modules():  # layers of several types convolve
        weight, stride = getattr(layer, "weight", None), getattr(layer, "stride", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 4 or not isinstance(stride, tuple):
            continue
        if set(weight.shape[2:]) == {1} and max(stride) > 1 and weight.shape[1] < _CHANNEL_BLOCK:
            return f"oneDNN's gradient of {name}, a 1x1 convolution with a stride, is wrong in channels_last"
    return None
