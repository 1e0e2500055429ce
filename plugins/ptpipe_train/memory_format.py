"""Choice of the memory format: channels-last for networks that convolve images.

Shape legend: N images of a batch, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ptpipe import Context
from ptpipe_torch import Data, Model
from ptpipe_torch.runtime import seeded
from ptpipe_train.device import DeviceSettings, first_batch

_NUM_IMAGES = 2
"""Strides of a single image don't tell the memory formats apart."""


class _ConvolutionRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Records whether an ATen convolution of images (a 4-d input) is executed inside the `with`.

    The type of a layer doesn't tell: convolutions of prepared networks are layers of other types, and networks may
    call `torch.nn.functional.conv2d` directly.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.has_recorded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in func.name() and args and isinstance(args[0], torch.Tensor) and args[0].dim() == 4:
            self.has_recorded = True
        return func(*args, **(kwargs or {}))


def prefers_channels_last(ctx: Context, model: Model, data: Data, device: torch.device) -> bool:
    """Return whether the network convolves images and its forward pass runs in channels-last.

    Tried on real images with a second build of the network, so nothing of the first one changes. Code such as
    `x.view(x.size(0), -1)` behind a convolution works in the contiguous format alone.
    """
    settings = DeviceSettings(device, channels_last=True)
    recorder = _ConvolutionRecorder()
    try:
        module = settings.place(model.build_prepared())
        images_NCHW = first_batch(data, settings, _NUM_IMAGES).images_NCHW
        with seeded(ctx.seed, device), torch.no_grad(), recorder:
            module(images_NCHW)
    except RuntimeError as error:
        # Where the memory format is not the cause, training fails the same way and reports it.
        ctx.log(f"memory_format contiguous: the network's forward pass fails in channels_last ({error})")
        return False
    return recorder.has_recorded
