"""The steps of generated networks, each in the spellings that users have for it.

A step takes two whole numbers that choose among its spellings; 0 is the plainest. Shape legend: as in `writer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .writer import Inapplicable, StepWriter, Writer

T = TypeVar("T")
IMAGE_STEPS: dict[str, StepWriter] = {}
"""Steps on maps (N, C, H, W)."""
TOKEN_STEPS: dict[str, StepWriter] = {}
"""Steps on sequences (N, L, D)."""
VECTOR_STEPS: dict[str, StepWriter] = {}
"""Steps on features (N, D)."""


def step(*registries: dict[str, StepWriter]) -> Callable[[StepWriter], StepWriter]:
    def register(function: StepWriter) -> StepWriter:
        for registry in registries:
            registry[function.__name__] = function
        return function

    return register


def pick(options: Sequence[T], number: int) -> T:
    return options[number % len(options)]


def require(condition: bool) -> None:
    if not condition:
        raise Inapplicable


# Activations: those whose result is assigned, and those that also change their input in place.
_LAYERS = (
    "nn.ReLU()", "nn.ReLU(inplace=True)", "nn.ReLU6()", "nn.ReLU6(inplace=True)", "nn.Hardtanh()", "nn.Hardswish()",
    "nn.Hardswish(inplace=True)", "nn.SiLU()", "nn.SiLU(inplace=True)", "nn.Sigmoid()", "nn.Tanh()", "nn.GELU()",
    "nn.LeakyReLU(0.1)", "nn.LeakyReLU(0.1, inplace=True)", "nn.ELU()", "nn.Hardsigmoid()", "nn.PReLU()",
    "nn.Softplus()", "nn.Mish()", "nn.Hardtanh(0, 6)", "nn.ELU(inplace=True)", "nn.Hardtanh(-2, 2, inplace=True)",
)  # fmt: skip
_EXPRESSIONS = (
    "F.relu(x)", "torch.relu(x)", "x.relu()", "F.relu6(x)", "F.hardtanh(x)", "x.clamp(0, 1)", "torch.clamp(x, min=0)",
    "x.clamp(min=0, max=6)", "torch.clamp(x, 0.0, 6.0)", "x.clip(-1, 1)", "F.hardswish(x)", "F.silu(x)", "x.sigmoid()",
    "torch.sigmoid(x)", "x.tanh()", "torch.tanh(x)", "F.gelu(x)", "F.leaky_relu(x, 0.1)", "F.elu(x)",
    "F.hardsigmoid(x)", "F.softplus(x)", "x * torch.sigmoid(x)", "x * F.relu6(x + 3) / 6", "torch.maximum(x, -x)",
    "F.relu(input=x)", "F.relu(x).square()", "torch.where(x > 0, x, 0.1 * x)",
)  # fmt: skip
_IN_PLACE = (
    "F.relu_(x)", "F.relu(x, inplace=True)", "x.relu_()", "torch.relu_(x)", "x.clamp_(0, 1)", "x.clamp_(min=0)",
    "F.hardtanh_(x)", "F.relu6(x, inplace=True)", "F.hardswish(x, inplace=True)", "F.silu(x, inplace=True)",
    "x.sigmoid_()", "x.tanh_()", "F.leaky_relu_(x, 0.1)", "torch.clamp_(x, -1, 1)", "F.elu_(x)",
    "F.hardsigmoid(x, True)",
)  # fmt: skip


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def relu(w: Writer, a: int, b: int) -> None:
    shared = w.shared_layer("relu", "nn.ReLU()") if a % 8 < 2 else w.shared_layer("relu_", "nn.ReLU(inplace=True)")
    _activate(w, pick((f"{shared}(x)", f"{shared}(x)", *_EXPRESSIONS[:3], *_IN_PLACE[:3]), a), b)


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def activation(w: Writer, a: int, b: int) -> None:
    number = 12 * a + b
    spelling = pick((*_LAYERS, *_EXPRESSIONS, *_IN_PLACE), number)
    if spelling in _LAYERS:
        spelling = f"{w.layer('act', spelling)}(x)"
    _activate(w, spelling, a + b)


def _activate(w: Writer, spelling: str, b: int) -> None:
    """Write `x = F.relu_(x)`, or the call alone where that changes `x`."""
    layer = w.layer_named(spelling.partition("(")[0]) if spelling.startswith("self.") else None
    is_in_place = getattr(layer, "inplace", False) or spelling in _IN_PLACE
    w.do(spelling if is_in_place and b % 2 else f"x = {spelling}")


_KERNELS = (
    "3, padding=1", "1", "3", "3, stride=2, padding=1", "3, padding=1, groups={C}", "3, padding=1, groups=2",
    "3, padding=2, dilation=2", "5, padding=2", "(1, 3), padding=(0, 1)", "3, padding='same'", "1, stride=2",
    "3, stride=2, padding=1, groups={C}",
)  # fmt: skip


def new_convolution(w: Writer, a: int, b: int, bias: bool = True) -> str:
    """Add a convolution; its number of output channels is chosen by `a`, its kernel by `b`."""
    num_in, options = w.shape[0], pick(_KERNELS, b).format(C=w.shape[0])
    num_out = pick((num_in, 8, 4, num_in, 6, 12), a)
    if "groups" in options:
        num_out = num_in if num_in % 2 or a % 2 == 0 else 2 * num_in
        require(num_in % 2 == 0 or "groups=2" not in options)
    return w.layer("conv", f"nn.Conv2d({num_in}, {num_out}, {options}{'' if bias else ', bias=False'})")


@step(IMAGE_STEPS)
def convolution(w: Writer, a: int, b: int) -> None:
    w.do(f"x = {new_convolution(w, a, b, bias=(a + b) % 3 > 0)}(x)")


@step(IMAGE_STEPS)
def unit(w: Writer, a: int, b: int) -> None:
    """Convolution, batch norm and activation."""
    w.do(f"x = {new_convolution(w, a, b, bias=b % 5 == 1)}(x)")
    batch_norm(w, 0, 0)
    relu(w, a + b, a)


@step(IMAGE_STEPS)
def sequential(w: Writer, a: int, b: int) -> None:
    num_in, num_out = w.shape[0], pick((w.shape[0], 8, 6), b)
    activation = pick(_LAYERS, a)
    parts = f"nn.Conv2d({num_in}, {num_out}, 3, padding=1), nn.BatchNorm2d({num_out}), {activation}"
    w.do(f"x = {w.layer('unit', f'nn.Sequential({parts})')}(x)")


@step(IMAGE_STEPS)
def repeated_convolution(w: Writer, a: int, b: int) -> None:
    """Call a layer that was called before."""
    fitting = [name for name in w.convolutions if w.layer_named(name).in_channels == w.shape[0]]
    require(bool(fitting))
    w.do(f"x = {pick(fitting[::-1], a)}(x)")


@step(IMAGE_STEPS)
def shared_head(w: Writer, a: int, b: int) -> None:
    """One convolution on two scales, with followers of its own on each."""
    channels = w.shape[0]
    conv = w.layer("conv", f"nn.Conv2d({channels}, {channels}, 3, padding=1, bias={bool(b % 2)})")
    small = w.new_name("small")
    w.do(f"{small} = {_followed(w, f'{conv}(F.max_pool2d(x, 2))', a)}")
    w.do(f"x = {_followed(w, f'{conv}(x)', b)}")
    w.do(f"x = x + {small}.mean([2, 3], keepdim=True)")


def _followed(w: Writer, call: str, number: int) -> str:
    norm = f"nn.BatchNorm2d({w.shape[0]})"
    form = pick(("{}", "F.relu({})", "{norm}({})", "torch.relu({norm}({}))", "F.relu6({})", "{}.sigmoid()"), number)
    return form.format(call, norm=w.layer("norm", norm) if "norm" in form else "")


@step(IMAGE_STEPS)
def batch_norm(w: Writer, a: int, b: int) -> None:
    options = pick(("", "", "", ", eps=1e-3", ", affine=False", ""), a)
    fitting = [name for name in w.norms if w.layer_named(name).num_features == w.shape[0]]
    again = bool(fitting) and b % 6 == 5
    w.do(f"x = {fitting[-1] if again else w.layer('norm', f'nn.BatchNorm2d({w.shape[0]}{options})')}(x)")


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def save(w: Writer, a: int, b: int) -> None:
    w.save()


_MERGES = (
    "x = x + {}", "x += {}", "x = torch.add(x, {})", "x = {} + x", "x = x * {}", "x = x - {}", "x.add_({})",
    "x = F.relu(x + {})", "x *= {}", "x = torch.maximum(x, {})", "x = (x + {}).relu_()", "{0} += x\nx = {0}",
    "x = torch.add(x, {}, alpha=2)", "x = torch.stack([x, {}]).mean(0)", "x = torch.mul(x, {})", "x = x * {}.sigmoid()",
    "x = F.relu(torch.add(x, {}), inplace=True)", "x = x.add({}).relu()",
)  # fmt: skip


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def merge(w: Writer, a: int, b: int) -> None:
    """Combine `x` with a tensor of the same shape that was saved before."""
    fitting = [name for name in w.saved if w.shape_of(name) == w.shape]
    require(bool(fitting))
    w.do(pick(_MERGES, 12 * a + b).format(pick(fitting[::-1], a)))


@step(IMAGE_STEPS)
def concatenate(w: Writer, a: int, b: int) -> None:
    fitting = [name for name in w.saved if w.shape_of(name)[1:] == w.shape[1:]]
    require(bool(fitting) and w.shape[0] < 20)
    form = pick(("torch.cat([x, {}], 1)", "torch.cat(({}, x), dim=1)", "torch.cat([x, x, {}], dim=-3)"), b)
    w.do(f"x = {form.format(pick(fitting[::-1], a))}")


@step(IMAGE_STEPS)
def residual(w: Writer, a: int, b: int) -> None:
    """A skip around two convolutions."""
    skip, channels = w.save("identity"), w.shape[0]
    for number in range(2):
        code = f"nn.Conv2d({channels}, {channels}, 3, padding=1, groups={channels if (a + number) % 4 == 3 else 1})"
        w.do(f"x = {w.layer('conv', code)}(x)")
        if b % 3:
            batch_norm(w, 0, 0)
        if number == 0:
            relu(w, a, b)
    w.do(pick(_MERGES, 12 * b + a).format(skip))
    if a % 2:
        relu(w, b, a)


_POOLS = (
    "F.max_pool2d(x, 2)", "nn.MaxPool2d(2)", "nn.MaxPool2d(3, 2, 1)", "F.avg_pool2d(x, 2)",
    "nn.AvgPool2d(3, 1, 1)", "nn.AdaptiveAvgPool2d(2)", "F.adaptive_avg_pool2d(x, (1, 1))",
    "F.max_pool2d(x, 3, stride=1, padding=1)", "nn.MaxPool2d(2, ceil_mode=True)", "F.adaptive_max_pool2d(x, 1)",
    "nn.AvgPool2d(3, 2, 1, count_include_pad=False)", "F.max_pool2d(x, kernel_size=(2, 1))",
)  # fmt: skip


@step(IMAGE_STEPS)
def pool(w: Writer, a: int, b: int) -> None:
    _apply(w, "pool", pick(_POOLS, a))


_PADS = (
    "F.pad(x, (1, 1, 1, 1))", "nn.ZeroPad2d(1)", "F.pad(x, (0, 1, 0, 1))", "F.pad(x, [1, 1, 1, 1], mode='reflect')",
    "nn.ReflectionPad2d(1)", "F.pad(x, (1, 0, 1, 0), value=1.0)", "nn.ReplicationPad2d(1)", "nn.ConstantPad2d(1, -0.5)",
    "F.pad(x, (-1, 0, 0, 0))", "F.pad(x, (0, 0, 0, 0, 1, 1))",
)  # fmt: skip


@step(IMAGE_STEPS)
def pad(w: Writer, a: int, b: int) -> None:
    _apply(w, "pad", pick(_PADS, a))


def _apply(w: Writer, stem: str, spelling: str) -> None:
    w.do(f"x = {w.layer(stem, spelling) + '(x)' if spelling.startswith('nn.') else spelling}")


_RESHAPES = (
    "x = x.view(x.size(0), {H} * {C}, 1, {W}).reshape(x.shape)", "x = x[:, :, 1:]", "x = x[:, :{half}]",
    "{v}, {u} = x.chunk(2, 1)\nx = torch.cat([{u}, {v}], 1)", "{v}, {u} = x.chunk(2, dim=1)\nx = {v} * {u}.sigmoid()",
    "{v}, {u} = torch.split(x, [1, {C} - 1], 1)\nx = torch.cat([{u}, {v}], 1)",
    "x = x.view(x.shape[0], 2, {half}, {H}, {W}).transpose(1, 2).reshape(x.shape[0], {C}, {H}, {W})",
    "x = F.pixel_shuffle(x, 2)", "x = x.permute(0, 1, 3, 2)", "x = x.transpose(2, 3).contiguous()",
    "x = x.permute(0, 2, 3, 1).reshape(x.size(0), {H}, {W}, {C}).permute(0, 3, 1, 2)", "x = x.flip(3)",
    "{v}, {u} = x.chunk(2, 1)\nF.relu_({u})\nx = torch.cat([{v}, {u}], 1)", "x = F.channel_shuffle(x, 2)",
    "x = torch.narrow(x, 1, 0, {half})", "{v} = x[:, :{half}]\n{v} += 1", "x = x.unsqueeze(1).squeeze(1)",
)  # fmt: skip


@step(IMAGE_STEPS)
def reshape(w: Writer, a: int, b: int) -> None:
    form = pick(_RESHAPES, 12 * a + b)
    channels, height, width = w.shape
    require(("half" not in form and "chunk" not in form) or channels % 2 == 0)
    names = {"v": w.new_name("part"), "u": w.new_name("part")}
    for line in form.format(C=channels, H=height, W=width, half=channels // 2, **names).split("\n"):
        w.do(line)


_SCALES = (
    "F.interpolate(x, scale_factor=2)", "nn.Upsample(scale_factor=2)", "F.interpolate(x, size=(7, 7))",
    "F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=False)",
    "nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True)", "nn.ConvTranspose2d({C}, {C}, 2, 2)",
    "nn.ConvTranspose2d({C}, 6, 3, stride=2, padding=1, output_padding=1)", "nn.ConvTranspose2d({C}, 4, 3, padding=1)",
    "nn.ConvTranspose2d({C}, {C}, 2, 2, groups={C}, bias=False)", "nn.PixelShuffle(2)",
    "nn.ConvTranspose2d({C}, 6, 2, 2)", "nn.ConvTranspose2d({C}, 4, 4, 2, 1, bias=False)",
    "nn.Sequential(nn.ConvTranspose2d({C}, 6, 4, 2, 1), nn.BatchNorm2d(6), nn.ReLU())",
)  # fmt: skip


@step(IMAGE_STEPS)
def upscale(w: Writer, a: int, b: int) -> None:
    require(w.shape[1] * w.shape[2] <= 150)
    _apply(w, "up", pick(_SCALES, a).format(C=w.shape[0]))


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def dropout(w: Writer, a: int, b: int) -> None:
    spelling = pick(
        ("nn.Dropout(0.2)", "F.dropout(x, 0.2, training=self.training)", "nn.Dropout(0.2, inplace=True)",
         "F.dropout(x, p=0.1, training=self.training, inplace=True)", "F.dropout(x, 0.1, self.training)",
         "nn.Dropout2d(0.2)", "F.dropout2d(x, 0.2, training=self.training)"), a
    )  # fmt: skip
    require(len(w.shape) == 3 or "2d" not in spelling)
    _apply(w, "drop", spelling)


_ARITHMETIC = (
    "x = x * 0.5", "x = x + 1", "x = 1 - x", "x = x / 2", "x *= 2", "x = -x", "x += 0.5", "x.mul_(0.5)",
    "x = x.contiguous()", "x = x.clone()", "x = x.abs()", "x = torch.mul(x, 3)", "x = x.float()", "x = torch.sub(x, 1)",
    "x = 2 * x", "x = x ** 2", "x = x.add(1)", "x.add_(1)",
)  # fmt: skip


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def arithmetic(w: Writer, a: int, b: int) -> None:
    w.do(pick(_ARITHMETIC, 12 * a + b))


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def parameter(w: Writer, a: int, b: int) -> None:
    """Multiply by, or add, a bare parameter, as layer scale and position embeddings do."""
    shape = ", ".join(map(str, (w.shape[0], 1, 1) if len(w.shape) == 3 else w.shape))
    form = pick(("x = x * {}", "x = x + {}", "x = {} * x", "x = torch.mul(x, {})", "x += {}"), a)
    w.do(form.format(w.layer("scale", f"nn.Parameter(0.5 + torch.rand({shape}))")))


_FORMULAS = (
    "x * torch.rsqrt(x.pow(2).mean({axis}, keepdim=True) + 1e-3)",
    "(x - x.mean({axis}, keepdim=True)) / torch.sqrt(x.var({axis}, keepdim=True, unbiased=False) + 1e-2)",
    "x / (x.norm(dim={axis}, keepdim=True) + 1e-2)", "x * (x.square().mean({axis}, keepdim=True) + 1e-3) ** -0.5",
    "x.exp() / x.exp().sum({axis}, keepdim=True)", "torch.log(x.square() + 0.1)", "x.abs().sqrt()",
    "x * (x.norm(dim={axis}, keepdim=True) / (x.abs().mean({axis}, keepdim=True) + 0.1)) + x",
)  # fmt: skip


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def formula(w: Writer, a: int, b: int) -> None:
    """A norm that is written out, or another function that amplifies small numbers."""
    is_image = len(w.shape) == 3
    width = w.shape[0 if is_image else -1]
    require(width >= 4)
    w.do("x = " + pick(_FORMULAS, a).format(axis=1 if is_image else -1))
    if b % 2:
        scale = w.layer("scale", f"nn.Parameter(0.5 + torch.rand({width}{', 1, 1' if is_image else ''}))")
        w.do(f"x = {scale} * x")


@step(IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS)
def check(w: Writer, a: int, b: int) -> None:
    """What libraries ask of a tensor."""
    w.do(
        pick(
            (
                "if not isinstance(x, torch.Tensor):\n    raise TypeError(type(x))",
                "assert torch.is_tensor(x) and x.is_floating_point()",
                "x = x.reshape(len(x), *x.shape[1:])",
                "x = x if torch.jit.isinstance(x, torch.Tensor) else -x",
                "x = x() if callable(x) else x",
                "x = getattr(x, 'tensors', x)",
                "x = torch.as_tensor(x)",
            ),
            a,
        )
    )


@step(IMAGE_STEPS)
def squeeze_excite(w: Writer, a: int, b: int) -> None:
    mean = pick(("F.adaptive_avg_pool2d(x, 1)", "x.mean([2, 3], keepdim=True)", "x.mean((2, 3), keepdim=True)"), a)
    gate = pick(("torch.sigmoid({})", "{}.sigmoid()", "F.hardsigmoid({})", "{}.tanh()"), b)
    channels = w.shape[0]
    convs = [w.layer("conv", f"nn.Conv2d({channels}, {channels}, 1)") for _ in range(2)]
    gated = gate.format(f"{convs[1]}(F.relu({convs[0]}({mean})))")
    w.do(pick((f"x = x * {gated}", f"x *= {gated}", f"x = torch.mul({gated}, x)"), a + b))


@step(IMAGE_STEPS)
def other_norm(w: Writer, a: int, b: int) -> None:
    channels, height, width = w.shape
    spelling = pick(
        (f"nn.GroupNorm(1, {channels})", f"nn.InstanceNorm2d({channels}, affine=True)",
         f"nn.LayerNorm([{channels}, {height}, {width}])", f"nn.InstanceNorm2d({channels})"), a
    )  # fmt: skip
    if a % 5 == 4:
        norm = w.layer("norm", f"nn.LayerNorm({channels})")
        w.do(f"x = {norm}(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)")
    else:
        _apply(w, "norm", spelling)


@step(IMAGE_STEPS)
def odd_convolution(w: Writer, a: int, b: int) -> None:
    """Padding modes, keyword calls, weight norm, batch norm without statistics, functional weights, a branch."""
    channels = w.shape[0]
    conv = f"nn.Conv2d({channels}, {channels}, 3, padding=1"
    match a % 6:
        case 0:
            w.do(f"x = {w.layer('conv', conv + ')')}(input=x)")
        case 1:
            mode = pick(("reflect", "replicate", "circular"), b)
            w.do(f"x = {w.layer('conv', f'{conv}, padding_mode={mode!r})')}(x)")
        case 2:
            w.do(f"x = {w.layer('conv', f'nn.utils.parametrizations.weight_norm({conv}))')}(x)")
        case 3:
            w.do(f"x = {w.layer('norm', f'nn.BatchNorm2d({channels}, track_running_stats=False)')}(x)")
        case 4:
            weight = w.layer("weight", f"nn.Parameter(0.3 * torch.randn(8, {channels}, 3, 3))")
            w.do(f"x = F.conv2d(x, {weight}, {pick(('stride=2', 'padding=1', 'None, 1, 1'), b)})")
        case _:
            w.do("if x.shape[-1] > 4:\n    x = F.max_pool2d(x, 2)")


@step(TOKEN_STEPS, VECTOR_STEPS)
def linear(w: Writer, a: int, b: int) -> None:
    num_in = w.shape[-1]
    options = ", bias=False" if b % 4 == 3 else ""
    layer = w.layer("linear", f"nn.Linear({num_in}, {pick((min(num_in, 60), 8, 12, 6), a)}{options})")
    w.do(f"x = {layer}({'input=x' if a + b == 11 else 'x'})")


@step(TOKEN_STEPS, VECTOR_STEPS)
def repeated_linear(w: Writer, a: int, b: int) -> None:
    fitting = [name for name in w.linears if w.layer_named(name).in_features == w.shape[-1]]
    require(bool(fitting))
    w.do(f"x = {pick(fitting[::-1], a)}(x)")


@step(VECTOR_STEPS)
def dense(w: Writer, a: int, b: int) -> None:
    """Linear, batch norm and activation."""
    linear(w, a, 0)
    w.do(f"x = {w.layer('norm', f'nn.BatchNorm1d({w.shape[0]})')}(x)")
    relu(w, b, a)


@step(VECTOR_STEPS)
def odd_linear(w: Writer, a: int, b: int) -> None:
    num_in = w.shape[0]
    match a % 4:
        case 0:
            w.do(f"x = torch.cat([x, {pick(('x.relu()', '-x', 'x * x', 'x'), b)}], 1)")
        case 1:
            w.do(f"x = F.linear(x, {w.layer('weight', f'nn.Parameter(0.3 * torch.randn(8, {num_in}))')})")
        case 2:
            w.do(f"x = {w.layer('linear', f'nn.utils.parametrizations.weight_norm(nn.Linear({num_in}, 8))')}(x)")
        case _:
            w.do(f"x = x @ {w.layer('weight', f'nn.Parameter(0.3 * torch.randn({num_in}, 8))')}")


@step(TOKEN_STEPS)
def layer_norm(w: Writer, a: int, b: int) -> None:
    w.do(f"x = {w.layer('norm', f'nn.LayerNorm({w.shape[1]})')}(x)")


@step(TOKEN_STEPS)
def attention(w: Writer, a: int, b: int) -> None:
    """Self-attention: torch's layer, its function, or matrix products."""
    width = w.shape[1]
    skip = w.save()
    if a % 4 == 0:
        layer = w.layer("attention", f"nn.MultiheadAttention({width}, 1, batch_first=True)")
        w.do(f"x = {layer}(x, x, x{', need_weights=False' if b % 2 else ''})[0]")
    elif a % 4 == 1:
        names = [w.new_name(name) for name in "qkv"]
        w.do(f"{', '.join(names)} = {w.layer('linear', f'nn.Linear({width}, {3 * width})')}(x).chunk(3, -1)")
        heads = ", ".join(f"{name}.unsqueeze(1)" for name in names)  # torch's exporter takes (N, heads, L, D) only
        w.do(f"x = F.scaled_dot_product_attention({heads}).squeeze(1)")
    else:
        q, k, v = (w.new_name(name) for name in "qkv")
        for name in (q, k, v):
            w.do(f"{name} = {w.layer('linear', f'nn.Linear({width}, {width})')}(x)")
        scores = pick((f"({q} @ {k}.transpose(1, 2) / {width} ** 0.5).softmax(-1)", f"F.softmax(torch.matmul({q}, "
                       f"{k}.transpose(-2, -1)) * {width ** -0.5:.3}, dim=-1)"), b)  # fmt: skip
        w.do(f"x = {scores} @ {v}" if a % 4 == 2 else f"x = torch.matmul({scores}, {v})")
    if b % 3:
        w.do(f"x = x + {skip}")


@step(TOKEN_STEPS)
def recurrent(w: Writer, a: int, b: int) -> None:
    width = w.shape[1]
    kind = pick(("LSTM", "GRU", "RNN"), a)
    layer = w.layer(
        kind.lower(), f"nn.{kind}({width}, 8, batch_first=True{', bidirectional=True' if b % 4 == 3 else ''})"
    )
    w.do(pick((f"x, _ = {layer}(x)", f"x = {layer}(x)[0]"), b))


@step(TOKEN_STEPS)
def encoder_layer(w: Writer, a: int, b: int) -> None:
    code = f"nn.TransformerEncoderLayer({w.shape[1]}, 1, 16, batch_first=True{', norm_first=True' if a % 2 else ''})"
    w.do(f"x = {w.layer('encoder', code)}(x)")


@step(TOKEN_STEPS)
def token_convolution(w: Writer, a: int, b: int) -> None:
    layer = w.layer("conv", f"nn.Conv1d({w.shape[1]}, 8, {pick(('3, padding=1', '1', '3'), a)})")
    w.do(f"x = {layer}(x.transpose(1, 2)).transpose(1, 2)")


@step(TOKEN_STEPS)
def class_token(w: Writer, a: int, b: int) -> None:
    token = w.layer("token", f"nn.Parameter(torch.randn(1, 1, {w.shape[1]}))")
    w.do(f"x = torch.cat([{token}.expand(x.shape[0], -1, -1), x], {pick(('1', 'dim=1'), b)})")


TO_VECTORS = (
    "x.flatten(1)", "torch.flatten(x, 1)", "x.view(x.size(0), -1)", "nn.Flatten()", "x.reshape(x.shape[0], -1)",
    "x.mean([2, 3])", "x.mean((2, 3))", "F.adaptive_avg_pool2d(x, 1).flatten(1)", "torch.mean(x, dim=(-2, -1))",
    "nn.AdaptiveAvgPool2d(1)(x)[:, :, 0, 0]", "F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)", "x.amax((2, 3))",
    "x.view(-1, {C} * {H} * {W})", "x.mean(3).mean(2)", "torch.flatten(F.max_pool2d(x, 2), start_dim=1)",
)  # fmt: skip
"""From maps (N, C, H, W) to features (N, D)."""
TO_TOKENS = (
    "x.flatten(2).transpose(1, 2)", "x.view(x.size(0), {C}, -1).permute(0, 2, 1)", "x.mean(2).transpose(1, 2)",
    "x.reshape(x.shape[0], {C}, {H} * {W})", "x.permute(0, 2, 3, 1).flatten(1, 2)",
)  # fmt: skip
"""From maps (N, C, H, W) to sequences (N, L, D)."""
TOKENS_TO_VECTORS = ("x.mean(1)", "x[:, 0]", "x[:, -1]", "x.flatten(1)", "torch.mean(x, dim=1)", "x.amax(1)")


def write_neck(w: Writer, spellings: Sequence[str], number: int) -> None:
    sizes = dict(zip("CHW", w.shape, strict=False))
    spelling = pick(spellings, number)
    if spelling == "nn.AdaptiveAvgPool2d(1)(x)[:, :, 0, 0]":
        spelling = f"{w.layer('pool', 'nn.AdaptiveAvgPool2d(1)')}(x)[:, :, 0, 0]"
    _apply(w, "flatten", spelling.format(**sizes))


def write_head(w: Writer, num_classes: int, number: int) -> str:
    """The last layer; return the expression of the logits."""
    head = w.layer("head", f"nn.Linear({w.shape[0]}, {num_classes}{', bias=False' if number % 5 == 4 else ''})")
    return pick((f"{head}(x)", f"{head}(x)", f"F.log_softmax({head}(x), 1)", f"{head}(x)"), number)
