"""What libraries do in a forward pass: kornia, MONAI, torchaudio, torch_geometric, x-transformers, rtdl.

All take images of 3x12x12 and return logits of 5 classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .spellings import Net, conv, logits


def checked(n: Any, x: torch.Tensor) -> torch.Tensor:
    """Refuses anything but floating-point tensors."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(x)}")
    if not x.is_floating_point():
        raise TypeError(f"expected floating-point numbers, got {x.dtype}")
    return logits(n, F.relu(n.conv(n.stem(x))))


def chosen(n: Any, x: Any) -> torch.Tensor:
    """Takes a tensor, a tuple of them, or a function that returns one."""
    x = n.stem(x() if callable(x) else x)
    sources, targets = (x, x) if isinstance(x, torch.Tensor) else x
    return logits(n, F.relu(n.conv(sources)) + targets)


def lengths(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(n.conv(n.stem(x)))
    return n.fc(x.reshape(len(x), len(x[0]), -1).mean(2))


def blurred(n: Any, x: torch.Tensor) -> torch.Tensor:
    """A fixed kernel, brought to the device and to the number of channels of what it filters."""
    x = F.relu(n.stem(x))
    assert x.is_floating_point(), x.dtype
    kernel = n.kernel.to(device=x.device, dtype=x.dtype).repeat(x.shape[1], 1, 1, 1)
    return logits(n, n.conv(F.conv2d(x, kernel, padding=1, stride=2, groups=x.shape[1])))


def derived(n: Any, x: torch.Tensor) -> torch.Tensor:
    """A kernel that is made where the images are."""
    kernel = torch.tensor([[-1.0, 0.0, 1.0]], device=x.device).expand(3, 1, 1, 3)
    x = torch.cat((x, F.conv2d(F.pad(x, [1, 1, 0, 0], "replicate"), kernel, groups=3)), 1)
    return logits(n, n.conv(F.relu(n.wide(x))))


def transformed(n: Any, x: torch.Tensor) -> torch.Tensor:
    """A spectrum of each row, in front of the layers."""
    spectrum = torch.fft.rfft(x, dim=-1)
    spectrum = spectrum.reshape(x.shape[:-1] + spectrum.shape[-1:]).transpose(-1, -2)
    return logits(n, F.relu(n.conv(n.stem(spectrum.abs()))))


def slopes(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.each(n.conv(F.prelu(n.stem(x), n.slope)))
    return logits(n, n.one(x))


def unpooled(n: Any, x: torch.Tensor) -> torch.Tensor:
    """Maxima go back to where they were, as in SegNet and ENet."""
    x, indices = n.pool(F.relu(n.stem(x)))
    y, others = F.max_pool2d(x, 2, return_indices=True)
    y = F.max_unpool2d(F.relu(n.conv(y)), others, 2)
    return logits(n, n.conv(n.unpool(y, indices)))


def tuples(n: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer that is switched off returns the tuple that it takes."""
    first, second = n.off((n.stem(x), n.conv(n.stem(x))))
    return logits(n, F.relu(first + second))


def rejoined(n: Any, x: torch.Tensor) -> torch.Tensor:
    """Joins what a function has split, without taking the parts out of their tuple."""
    x = torch.cat(F.relu(n.stem(x)).split([3, 5], 1), 1)
    x = torch.stack(x.chunk(2, 1), 2).flatten(1, 2)
    return logits(n, n.conv(torch.cat(torch.chunk(x, 2, 1), 1)))


def pooled_twice(n: Any, x: torch.Tensor) -> torch.Tensor:
    """Each branch pools for itself; means of 2 x 2 integers are ties in a quarter of all cases."""
    x = F.relu(n.stem(x))
    return logits(n, n.conv(F.avg_pool2d(x, 2)) + n.other(F.avg_pool2d(x, 2)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "checked": lambda: Net(checked, conv=conv()),
    "chosen": lambda: Net(chosen, conv=conv()),
    "lengths": lambda: Net(lengths, conv=conv()),
    "blurred": lambda: with_buffer(Net(blurred, conv=conv()), torch.full((1, 1, 3, 3), 1 / 9)),
    "derived": lambda: Net(derived, conv=conv(), wide=conv(6)),
    "transformed": lambda: Net(transformed, conv=conv()),
    "slopes": lambda: with_slope(Net(slopes, conv=conv(), each=nn.PReLU(8, 0.1), one=nn.PReLU())),
    "unpooled": lambda: Net(unpooled, conv=conv(), pool=nn.MaxPool2d(2, return_indices=True), unpool=nn.MaxUnpool2d(2)),
    "tuples": lambda: Net(tuples, conv=conv(), off=nn.Identity()),
    "rejoined": lambda: Net(rejoined, conv=conv()),
    "pooled_twice": lambda: Net(pooled_twice, conv=conv(), other=conv()),
}


def with_buffer(net: nn.Module, kernel: torch.Tensor) -> nn.Module:
    net.register_buffer("kernel", kernel)
    return net


def with_slope(net: nn.Module) -> nn.Module:
    net.slope = nn.Parameter(torch.tensor([0.3]))
    return net


def build(name: str) -> nn.Module:
    """Build a network in eval mode, with weights of its own seed."""
    torch.manual_seed(5)
    return NETWORKS[name]().eval()
