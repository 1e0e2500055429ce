"""Choice of the memory format of a training."""

from __future__ import annotations

import torch

from ptpipe import Context
from ptpipe_torch import Data, Model
from ptpipe_torch.memory_format import to_preferred_format
from ptpipe_train.device import DeviceSettings, first_batch

_NUM_IMAGES = 2


def prefers_channels_last(ctx: Context, model: Model, data: Data, device: torch.device) -> bool:
    """Return whether the network convolves images and its forward pass runs in channels-last.

    Tried on real images with a second build of the network, so nothing of the first one changes.
    """
    settings = DeviceSettings(device, channels_last=True)
    batch = first_batch(data, settings, _NUM_IMAGES)
    return to_preferred_format(model.build_prepared().to(device), batch.args, ctx.log)
