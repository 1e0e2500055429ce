"""Ordinary ways to write a network, each of which FX quantization took for another function, or failed on.

All take images of 3x12x12 and return logits of 5 classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

INPUT_SHAPE_CHW = (3, 12, 12)


class Net(nn.Module):
    """A network whose forward pass is a function of itself and the images."""

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.stem, self.fc = conv(3, 8), nn.Linear(8, 5)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def conv(inputs: int = 8, outputs: int = 8, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, **{"padding": 1, **options})


def logits(n: Any, x: torch.Tensor) -> torch.Tensor:
    return n.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


# A1: layers that are called several times.


def two_norms(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(n.stem(x))
    big, small = F.relu(n.one(n.conv(x))), F.relu(n.two(n.conv(F.max_pool2d(x, 2))))
    return logits(n, big) - 2 * logits(n, small)


def norm_behind_the_first(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(n.norm(n.conv(n.stem(x))))
    return logits(n, n.conv(x))


def relu_behind_the_first(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(n.conv(n.stem(x)))
    return logits(n, n.conv(x))


def linear_twice(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.adaptive_avg_pool2d(n.stem(x), 1).flatten(1)
    return n.fc(n.hidden(F.relu(n.hidden(x))))


def shared_norm(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.norm(n.stem(x))
    y = F.relu(n.norm(F.max_pool2d(x, 2)))
    return logits(n, n.norm(n.conv(y)) + y)


def called_alike(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.act(n.conv(n.stem(x)))
    return logits(n, n.act(n.conv(n.loud(x))))


SHARED = {
    "conv_with_two_norms": lambda: Net(two_norms, conv=conv(), one=nn.BatchNorm2d(8), two=nn.BatchNorm2d(8)),
    "conv_with_norm_once": lambda: Net(norm_behind_the_first, conv=conv(), norm=nn.BatchNorm2d(8)),
    "conv_with_relu_once": lambda: Net(relu_behind_the_first, conv=conv()),
    "linear_with_relu_once": lambda: Net(linear_twice, hidden=nn.Linear(8, 8)),
    "shared_norm": lambda: Net(shared_norm, conv=conv(), norm=nn.BatchNorm2d(8)),
    "called_alike": lambda: Net(called_alike, conv=conv(), loud=loud(), act=nn.LeakyReLU(0.1)),
}


def loud() -> nn.Module:
    """Multiplies by some 50: the two calls of a shared layer need different scales."""
    layer = nn.Conv2d(8, 8, 1, bias=False)
    with torch.no_grad():
        layer.weight.mul_(100)
    return layer


# A2: in-place operators whose effect others see.


def relu_as_statement(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    y = n.conv(x)
    y += x
    F.relu_(y)
    return logits(n, y)


def identity_seen(n: Any, x: torch.Tensor) -> torch.Tensor:
    identity = n.stem(x)
    y = n.relu(identity)
    return logits(n, n.conv(y) + identity)


def unet_skip(n: Any, x: torch.Tensor) -> torch.Tensor:
    skip = n.stem(x)
    y = F.interpolate(n.conv(F.max_pool2d(F.relu(skip, inplace=True), 2)), scale_factor=2)
    return logits(n, n.last(torch.cat([y, skip], 1)))


def clamp_as_statement(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(3 * x)
    x.clamp_(0, 1)
    return logits(n, n.conv(x))


def added_to_an_alias(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    other = n.identity(x)
    x += n.conv(x)
    return logits(n, torch.cat([other, x], 1)[:, 4:12])


def multiplied(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    y = x
    y *= n.conv(x).sigmoid()
    return logits(n, x)


def method_add(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    x.add_(n.conv(x)).mul_(2)
    return logits(n, n.conv(x))


def activation_seen(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(3 * x)
    y = n.conv(n.act(x))
    return logits(n, F.relu(y) + x)


def function_seen(name: str) -> Callable[..., Any]:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(3 * x)
        y = n.conv(getattr(F, name)(x, inplace=True))
        return logits(n, F.relu(y) + x)

    return body


def half_of_a_tensor(n: Any, x: torch.Tensor) -> torch.Tensor:
    one, two = n.stem(x).chunk(2, 1)
    one.relu_()
    return logits(n, torch.cat([one, two], 1))


def set_channel(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    x[:, 0] = 1
    return logits(n, n.conv(x))


_ACTIVATIONS = (nn.ReLU6, nn.Hardswish, nn.SiLU, nn.LeakyReLU, nn.Hardtanh, nn.ELU, nn.Hardsigmoid, nn.Mish)
IN_PLACE = {
    "relu_as_statement": lambda: Net(relu_as_statement, conv=conv()),
    "identity_seen": lambda: Net(identity_seen, conv=conv(), relu=nn.ReLU(inplace=True)),
    "unet_skip": lambda: Net(unet_skip, conv=conv(), last=conv(16)),
    "clamp_as_statement": lambda: Net(clamp_as_statement, conv=conv()),
    "added_to_an_alias": lambda: Net(added_to_an_alias, conv=conv(), identity=nn.Identity()),
    "multiplied": lambda: Net(multiplied, conv=conv()),
    "method_add": lambda: Net(method_add, conv=conv()),
    "half_of_a_tensor": lambda: Net(half_of_a_tensor),
    "set_channel": lambda: Net(set_channel, conv=conv()),
    **{
        f"module_{act.__name__}": lambda act=act: Net(activation_seen, conv=conv(), act=act(inplace=True))
        for act in _ACTIVATIONS
    },
    **{
        f"function_{name}": lambda name=name: Net(function_seen(name), conv=conv())
        for name in ("relu", "relu6", "hardswish", "silu", "leaky_relu", "hardtanh", "elu")
    },
}

# A3: padding modes.


def padded(n: Any, x: torch.Tensor) -> torch.Tensor:
    return logits(n, F.relu(n.norm(n.conv(F.relu(n.stem(x))))))


def pad_function(n: Any, x: torch.Tensor) -> torch.Tensor:
    return logits(n, n.conv(n.pad(F.pad(F.relu(n.stem(x)), (1, 1, 1, 1), mode="reflect"))))


PADDED = {
    f"padding_{mode}": lambda mode=mode: Net(
        padded, stem=conv(3, 8, padding_mode=mode), conv=conv(padding_mode=mode), norm=nn.BatchNorm2d(8)
    )
    for mode in ("reflect", "replicate", "circular")
} | {
    "padding_same": lambda: Net(padded, conv=conv(padding="same", padding_mode="reflect"), norm=nn.BatchNorm2d(8)),
    "zeros_same": lambda: Net(padded, conv=conv(padding="same", dilation=2), norm=nn.BatchNorm2d(8)),
    "zeros_uneven": lambda: Net(padded, conv=nn.Conv2d(8, 8, (4, 3), padding="same"), norm=nn.BatchNorm2d(8)),
    "padding_valid": lambda: Net(padded, conv=conv(padding="valid"), norm=nn.BatchNorm2d(8)),
    "pad_function": lambda: Net(pad_function, conv=conv(padding=0), pad=nn.ReplicationPad2d(1)),
}

# D: spellings that failed.


def viewed(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.max_pool2d(n.conv(F.relu(n.stem(x))), 4)
    return n.head(x.view(x.size(0), -1))


def mean_method(*arguments: Any, **named: Any) -> Callable[..., Any]:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        return n.fc(F.relu(n.small(F.relu(n.stem(x)))).mean(*arguments, **named).flatten(1))

    return body


def mean_function(n: Any, x: torch.Tensor) -> torch.Tensor:
    return n.fc(torch.mean(input=F.relu(n.stem(x)), dim=(-1, -2)))


def keywords(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(input=n.stem(input=x))
    x = F.adaptive_avg_pool2d(input=torch.add(input=n.conv(input=x), other=x), output_size=1)
    return n.fc(input=torch.flatten(input=x, start_dim=1))


def branching(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(n.stem(x))
    if x.shape[-1] > 8:
        x = F.max_pool2d(x, 2)
    if x.ndim == 4 and x.size(1) == 8:
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height * width).transpose(1, 2).reshape(-1, channels)
        assert len(x.shape) == 2
        return n.fc(x.reshape(batch, height * width, channels).mean(1))
    return logits(n, x)


def looked_up(n: Any, x: torch.Tensor) -> torch.Tensor:
    ids = (x.abs() * 10).long().clamp(0, 15)
    return logits(n, n.conv(n.table(ids[:, 0]).permute(0, 3, 1, 2)) + n.stem(x))


def masked(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    return logits(n, n.conv(x * (x > 0)))


def functional_weights(n: Any, x: torch.Tensor) -> torch.Tensor:
    return logits(n, F.relu(F.conv2d(F.relu(n.stem(x)), n.conv.weight, n.conv.bias, padding=1)))


def optional_mask(n: Any, x: torch.Tensor) -> torch.Tensor:
    return n.inner(n.stem(x))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return logits(self, x if mask is None else x * mask)


class OptionalInputs(Net):
    """The input itself has a default, as the tensors of transformers' networks have."""

    def forward(self, x: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> Any:
        assert x is not None
        return super().forward(x if mask is None else x * mask)


def normalized(layer: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(padded, conv=layer(conv()), norm=nn.BatchNorm2d(8))


def upsampled(n: Any, x: torch.Tensor) -> torch.Tensor:
    return logits(n, F.relu(n.norm(n.up(n.stem(x)))))


def space_to_depth(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.view(-1, 3, 6, 2, 6, 2).permute(0, 3, 5, 1, 2, 4).contiguous()
    return logits(n, F.relu(n.conv(x.view(-1, 12, 6, 6))))


SPELLED = {
    "view": lambda: Net(viewed, conv=conv(), head=nn.Linear(72, 5)),
    "mean_of_1x1": lambda: Net(mean_method([2, 3]), small=conv(stride=12)),
    "mean_tuple": lambda: Net(mean_method((-2, -1), keepdim=True), small=conv(stride=4)),
    "mean_keyword": lambda: Net(mean_method(dim=(2, 3)), small=conv(stride=4)),
    "mean_function": lambda: Net(mean_function),
    "keywords": lambda: Net(keywords, conv=conv()),
    "branch_on_a_size": lambda: Net(branching),
    "index": lambda: Net(looked_up, conv=conv(4), table=nn.Embedding(16, 4)),
    "mask": lambda: Net(masked, conv=conv()),
    "functional_weights": lambda: Net(functional_weights, conv=conv()),
    "default_argument": lambda: Net(optional_mask, inner=Inner()),
    "default_input": lambda: OptionalInputs(keywords, conv=conv()),
    "weight_norm": normalized(nn.utils.weight_norm),
    "parametrized_weight_norm": normalized(parametrizations.weight_norm),
    "spectral_norm": normalized(spectral_norm),
    "norm_of_the_batch": lambda: Net(padded, conv=conv(), norm=nn.BatchNorm2d(8, track_running_stats=False)),
    "norm_without_affine": lambda: Net(padded, conv=conv(), norm=nn.BatchNorm2d(8, affine=False)),
    "space_to_depth": lambda: Net(space_to_depth, conv=conv(12)),
    "transposed_with_norm": lambda: Net(upsampled, up=nn.ConvTranspose2d(8, 8, 3, 2), norm=nn.BatchNorm2d(8)),
}

# Numbers, alpha, and layers that torch can't convert.


def behind(*steps: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        for step in steps:
            x = step(x)
        return logits(n, n.conv(x))

    return lambda: Net(body, conv=conv())


def alpha(add: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        return logits(n, F.relu(add(n.conv(x), x)))

    return lambda: Net(body, conv=conv())


def read_twice(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = 2 * n.stem(x).sigmoid()
    return logits(n, n.conv(x) + n.other(x))


def with_layer(**layers: nn.Module) -> nn.Module:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        for name in layers:
            x = getattr(n, name)(x)
        return logits(n, n.conv(x))

    return Net(body, conv=conv(), **layers)


ARITHMETIC = {
    "twice_sigmoid": behind(lambda x: 2 * x.sigmoid()),
    "tanh_plus_one": behind(lambda x: torch.tanh(x) + 1),
    "hardsigmoid_minus_half": behind(lambda x: F.hardsigmoid(x) - 0.5),
    "softmax_by_a_number": behind(lambda x: torch.softmax(x, 1) / 0.25),
    "one_minus_sigmoid": behind(lambda x: 1 - torch.sigmoid(x)),
    "plus_three": behind(lambda x: x + 3),
    "plus_three_relu": behind(lambda x: F.relu(torch.add(x.tanh(), 3))),
    "a_hundred_times": behind(lambda x: torch.mul(x, 100), lambda x: x * 0.01),
    "channels_times": behind(lambda x: x.sigmoid() * x.size(1)),
    "method_with_a_number": behind(lambda x: x.sigmoid().mul(3).add(1)),
    "two_readers": lambda: Net(read_twice, conv=conv(), other=conv()),
    "hardswish_by_hand": behind(lambda x: 10 * x, lambda x: x * F.relu6(x + 3) / 6),
    "alpha_function": alpha(lambda x, y: torch.add(x, y, alpha=2)),
    "alpha_method": alpha(lambda x, y: x.add(y, alpha=-3)),
    "alpha_in_place": alpha(lambda x, y: x.add_(y, alpha=2)),
    "sub_alpha": alpha(lambda x, y: torch.sub(x, y, alpha=2)),
}
LAYERS = {
    "norm_twice": lambda: with_layer(one=conv(), two=nn.BatchNorm2d(8), three=nn.BatchNorm2d(8), act=nn.ReLU()),
    "norm_thrice": lambda: with_layer(two=nn.BatchNorm2d(8), three=nn.BatchNorm2d(8), four=nn.BatchNorm2d(8)),
    "instance_norm": lambda: with_layer(pool=nn.AvgPool2d(3, 3), norm=nn.InstanceNorm2d(8, affine=True)),
    "instance_norm_function": behind(F.instance_norm),
}

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **SHARED, **IN_PLACE, **PADDED, **SPELLED, **ARITHMETIC, **LAYERS
}  # fmt: skip


def build(name: str, seed: int = 0) -> nn.Module:
    """Build a network with random weights and batch norm statistics."""
    torch.manual_seed(seed)
    network = NETWORKS[name]()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for value, low, high in ((layer.weight, 0.5, 2.0), (layer.bias, -1.0, 1.0)):
                if value is not None:
                    nn.init.uniform_(value, low, high)
            if layer.running_mean is not None:
                layer.running_mean.uniform_(-0.5, 0.5)
                layer.running_var.uniform_(0.2, 1.5)
    return network.eval()
