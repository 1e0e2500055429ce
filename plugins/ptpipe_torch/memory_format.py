"""Choice of the memory format: channels-last for networks that convolve images, where their forward pass runs in it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ptpipe_torch.runtime import seeded

_TORCH = str(Path(torch.__file__).parent)
_NOT_A_VIEW = "view size is not compatible with input tensor's size and stride"


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


def to_preferred_format(
    module: nn.Module, inputs: Sequence[torch.Tensor], log: Callable[[str], None] = lambda line: None
) -> bool:
    """Convert the network to channels-last where it convolves images and runs in it, else to contiguous, in place.

    As `to_channels_last`, but imports torch's compiler (2 s) to see whether the network convolves.
    """
    with _ConvolutionRecorder() as recorder:
        is_channels_last = to_channels_last(module, inputs, log)
    if is_channels_last and not recorder.has_recorded:
        use_memory_format(module, torch.contiguous_format)
    return is_channels_last and recorder.has_recorded


def to_channels_last(
    module: nn.Module, inputs: Sequence[torch.Tensor], log: Callable[[str], None] = lambda line: None
) -> bool:
    """Convert the network to channels-last where it runs in it, else to contiguous, in place.

    Code such as `x.view(x.size(0), -1)` behind a convolution works in the contiguous format alone. So the forward pass
    is tried on `inputs`: two samples at least, as strides of a single image don't tell the formats apart. Observers see
    them: pass a copy of a network whose state counts. Random streams are restored. Where the trial fails, `log` is
    called with the reason. Returns whether the format is channels-last.
    """
    use_memory_format(module, torch.channels_last)
    try:
        with seeded(0, inputs[0].device), torch.no_grad():
            module(*inputs)
    except Exception as error:  # noqa: BLE001  # one that has another cause is raised again where the network is used
        log(f"memory_format contiguous: the network's forward pass fails in channels_last ({error})")
        use_memory_format(module, torch.contiguous_format)
        return False
    return True


def view_failure(error: BaseException) -> str | None:
    """Return the line of code whose `view` torch refused because of the memory format; None for another error."""
    if _NOT_A_VIEW not in str(error):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else str(error)


def use_memory_format(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Put the weights of a network into this format, in place.

    `Module.to` does so with tensors of five axes, too, such as masks of windows, for which torch has no such format.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=memory_format)
