"""Compare the forms of one network with each other without rounding, where a wrong network can't hide behind it.

Rounding makes two right int8 networks differ by as much as a subtly wrong one does. So each form is also computed
*unrounded*: quantizing only saturates a tensor at the ends of its grid. Computed so, the network that the user wrote,
the prepared one, torch's reference form, the graph of int8 kernels and the ONNX file are one function, up to the last
bits of float32. What the kernels round is checked kernel by kernel, with each kernel's own inputs.

Nothing here uses the product's own checks. Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.ao import quantization as ao
from torch.ao.nn.quantized import dynamic as nnqd
from torch.ao.nn.quantized.modules.utils import WeightedQuantizedModule
from torch.ao.nn.quantized.reference.modules.utils import ReferenceQuantizedModule
from torch.ao.quantization.backend_config import get_native_backend_config
from torch.ao.quantization.fx.convert import convert
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from ptpipe_torch import Model
from ptpipe_torch.int8.additions import ADDITIONS
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.recurrent import DynamicRecurrent
from ptpipe_torch.int8.ties import PRODUCTS

from ..processor import reduced

F = nn.functional
FLOAT_TOLERANCE = 1e-3
"""Of the largest value: sums of float32 in another order, and biases rounded to a thousandth of a step."""
BOUND_TOLERANCE = 0.03
"""Where a clamp's bound is rounded to a grid: half a step of it; or what an LSTM rounds cannot be left unrounded."""
MAX_STEPS = 1.5
"""A kernel's result is off by half a step for its last rounding, and at most one more."""


class Difference(AssertionError):  # an assertion, by its own name
    """Two forms of one network are not the same function."""


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str, *, tolerance: float = FLOAT_TOLERANCE) -> None:
    """Raise Difference unless the two are the same up to the last bits of float32."""
    if found.shape != expected.shape:
        raise Difference(f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    difference = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= tolerance * largest + 1e-5:
        raise Difference(f"{what}: {difference:.4g} off, where the largest value is {largest:.4g}")


def unobserved(prepared: nn.Module) -> nn.Module:
    """Switch observers and every fake quantization off, that of weights too, in place."""
    for layer in prepared.modules():
        if isinstance(getattr(layer, "weight_fake_quant", None), nn.Module):
            layer.weight_fake_quant = nn.Identity()
    return prepared.apply(ao.disable_fake_quant).apply(ao.disable_observer)


def run(module: nn.Module, images_NCHW: torch.Tensor) -> torch.Tensor:
    """Return the logits of a copy of these images: a network may write to its input."""
    with torch.no_grad():
        logits_NK: torch.Tensor = module(images_NCHW.clone())
    return logits_NK


class Reference(Interpreter):
    """torch's reference form of a prepared network: quantize and dequantize around float layers."""

    def __init__(self, int8: Model, *, rounded_weights: bool, slack: float | None) -> None:
        """`slack`: steps beyond the ends of its grid where a tensor saturates; None: nowhere.

        With slack, what only sets a gate does not saturate: its range ends where the gate's grid does.
        """
        with quantized_engine(int8.recipe.backend), warnings.catch_warnings(action="ignore"):
            prepared = int8.build_prepared()
            assert isinstance(prepared, GraphModule)
            super().__init__(convert(prepared, is_reference=True, backend_config=get_native_backend_config()))
        self._slack, self._rounded_weights = slack, rounded_weights

    def run_node(self, n: Node) -> Any:
        is_free = n.target is torch.quantize_per_tensor and self._slack and self._sets_gate(n)
        return self.fetch_args_kwargs_from_env(n)[0][0] if is_free else super().run_node(n)

    def _sets_gate(self, quantize: Node) -> bool:
        readers = [reader for dequantize in quantize.users for reader in dequantize.users]
        modules = [type(self.fetch_attr(str(node.target))) for node in readers if node.op == "call_module"]
        return not {node.target for node in readers}.union(modules).isdisjoint(_GATES)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not torch.quantize_per_tensor:
            return super().call_function(target, args, kwargs)
        return args[0] if self._slack is None else saturated(args[0], float(args[1]), int(args[2]), self._slack)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if target == "dequantize" else super().call_method(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer: Any = self.fetch_attr(target)
        if isinstance(layer, ReferenceQuantizedModule):
            return self._apply(layer, *args)
        if isinstance(layer, nn.Sequential) and isinstance(layer[0], ReferenceQuantizedModule):
            return layer[1](self._apply(layer[0], *args))
        return super().call_module(target, args, kwargs)

    def _apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        weight = layer.get_weight() if self._rounded_weights else layer.weight
        if isinstance(layer, nn.modules.conv._ConvTransposeNd):
            stored, layer.weight = layer.weight, nn.Parameter(weight)
            try:
                return _TRANSPOSED[weight.dim()].forward(layer, x)
            finally:
                layer.weight = stored
        if isinstance(layer, nn.modules.conv._ConvNd):  # its own forward ignores the padding mode
            return layer._conv_forward(x, weight, layer.bias)
        return F.linear(x, weight, layer.bias)


_GATES: tuple[Any, ...] = (
    *(torch.sigmoid, torch.tanh, F.silu, F.gelu, F.mish, "sigmoid", "tanh"),
    *(nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU, nn.Mish),
)
_TRANSPOSED: dict[int, Any] = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d}


def saturated(x: torch.Tensor, scale: float, zero_point: int, slack: float = 0) -> torch.Tensor:
    """Clamp to what 8-bit integers of this grid reach, and `slack` steps further."""
    return x.clamp((0 - zero_point - slack) * scale, (255 - zero_point + slack) * scale)


Grid: TypeAlias = tuple[float, int]
"""Scale and zero point."""
_GRID = ("scale", "zero_point", "output_scale", "output_zero_point")


class Unrounded(Interpreter):
    """A graph of int8 kernels, computed in float: results that the kernels quantize only saturate."""

    def __init__(self, network: GraphModule, grids: Mapping[str, Grid]) -> None:
        """`grids`: of the nodes whose results are quantized (`Kernels.grids`)."""
        super().__init__(network)
        self._grids = grids

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return saturated(result, *self._grids[n.name]) if n.name in self._grids else result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.quantize_per_tensor:
            return args[0]
        name = f"quantized.{target.__name__}" if target in (*ADDITIONS, *PRODUCTS) else str(target)
        if not name.startswith("quantized."):
            return super().call_function(target, args, kwargs)
        apply, num_inputs = _FUNCTIONS[name.removeprefix("quantized.")]
        inputs, rest = args[:num_inputs], args[num_inputs:]
        options = {key: value for key, value in kwargs.items() if key not in _GRID}
        # Scale and zero point come last, by position or by name.
        return apply(*inputs, *(rest if len(options) < len(kwargs) else rest[:-2]), **options)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if target == "dequantize" else super().call_method(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer: Any = self.fetch_attr(target)
        is_float = "quantized" not in type(layer).__module__
        return super().call_module(target, args, kwargs) if is_float else _float_layer(layer, *args)


def _float_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply the float equivalent of a layer of torch.ao."""
    if isinstance(layer, WeightedQuantizedModule):
        y = _weighted(layer, x)
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        y = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps)
    else:
        float_type = next(base for base in type(layer).__mro__ if "quantized" not in base.__module__)
        if float_type is nn.Module:
            assert type(layer).__name__ == "PReLU", type(layer)
            return F.prelu(x, layer.weight.dequantize())
        y = float_type.forward(layer, x)
    return F.relu(y) if "ReLU" in type(layer).__name__ and isinstance(layer, _FUSED) else y


_FUSED = (WeightedQuantizedModule, nn.modules.batchnorm._BatchNorm)


def _weighted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight().dequantize(), layer.bias()
    if not hasattr(layer, "kernel_size"):
        return F.linear(x, weight, bias)
    if getattr(layer, "transposed", False):
        function = F.conv_transpose1d if weight.dim() == 3 else F.conv_transpose2d
        return function(
            x, weight, bias, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        )
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    function = F.conv1d if weight.dim() == 3 else F.conv2d
    return function(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


# Operators of torch.ops.quantized by name, with the number of their tensors in front of other arguments.
_FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "add": (torch.add, 2),
    "add_relu": (lambda x, y: F.relu(x + y), 2),
    "mul": (torch.mul, 2),
    "mul_relu": (lambda x, y: F.relu(x * y), 2),
    "matmul": (torch.matmul, 2),
    "cat": (torch.cat, 1),
    "hardswish": (F.hardswish, 1),
    "leaky_relu": (F.leaky_relu, 1),
    "elu": (F.elu, 1),
    "sigmoid": (torch.sigmoid, 1),
    "tanh": (torch.tanh, 1),
    "softmax": (torch.softmax, 1),
    "instance_norm": (lambda x, weight, bias, eps: F.instance_norm(x, weight=weight, bias=bias, eps=eps), 1),
    "layer_norm": (F.layer_norm, 1),
    "group_norm": (F.group_norm, 1),
}


class Kernels(Interpreter):
    """Runs a graph of int8 kernels, and compares each with its float equivalent on the kernel's own inputs."""

    def __init__(self, network: GraphModule) -> None:
        super().__init__(network)
        self._unrounded = Unrounded(network, {})
        self.steps: dict[str, float] = {}
        """The largest difference of each kernel with a quantized result, in steps of it."""
        self.grids: dict[str, Grid] = {}
        """Of the quantized results."""

    def run_node(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        found = super().run_node(n)
        if n.op.startswith("call_") and isinstance(found, torch.Tensor) and found.is_quantized:
            args, kwargs = (map_aggregate(values, _dequantized) for values in (args, kwargs))
            expected = getattr(self._unrounded, n.op)(n.target, args, kwargs)
            grid = self.grids[n.name] = (found.q_scale(), found.q_zero_point())
            # Rounded as quantizing does; half to even or not is a matter of one step.
            self.steps[n.name] = ((saturated(expected, *grid) - found.dequantize()).abs() / grid[0]).max().item()
        return found


def _dequantized(value: Any) -> Any:
    is_quantized = isinstance(value, torch.Tensor) and value.is_quantized
    return value.dequantize() if is_quantized else value


def check_rounded_weights(reference: GraphModule) -> None:
    """Raise Difference where a rounded weight is over half a step from its float."""
    for name, layer in reference.named_modules():
        if isinstance(layer, ReferenceQuantizedModule) and hasattr(layer, "weight"):
            scale = layer.weight_scale
            if layer.weight_qscheme == torch.per_channel_affine or scale.numel() > 1:
                scale = scale.reshape([-1 if axis == layer.weight_axis else 1 for axis in range(layer.weight.dim())])
            steps = ((layer.get_weight() - layer.weight).abs() / scale).max().item()
            if steps > 0.51:
                raise Difference(f"a weight of {name} is {steps:.3g} steps off its float")


def use_stored_weights(network: nn.Module, int8: Model) -> None:
    """Give recurrent layers, which stay float, the weights that the int8 model stores: theirs, rounded to int8.

    Raises Difference where one is over half a step from its float.
    """
    with quantized_engine(int8.recipe.backend), warnings.catch_warnings(action="ignore"), torch.no_grad():
        stored = int8.build().state_dict()
        for name, layer in network.named_modules():
            for own, parameter in layer.named_parameters() if isinstance(layer, nn.RNNBase) else ():
                found = stored[f"{name}.{own}"]
                largest = parameter.abs().amax(-1, keepdim=True) if "weight" in own else torch.zeros(())
                if ((found - parameter).abs() > 0.51 * largest / 127).any():
                    raise Difference(f"a stored value of {name}.{own} is over half a step off its float")
                parameter.copy_(found)


def check_int8(int8: Model, images_NCHW: torch.Tensor, float_NK: torch.Tensor, *, saturates: bool) -> torch.Tensor:
    """Compare a converted model with the float logits, and each of its kernels with its own inputs.

    `saturates`: whether these images may exceed the ranges that were observed. Returns the logits of the reference
    form with rounded weights, unrounded activations.
    """
    bare = Reference(int8, rounded_weights=False, slack=None)
    check_rounded_weights(bare.module)
    with torch.no_grad():
        assert_close(bare.run(images_NCHW.clone()), float_NK, "reference form against the float network")
        if not saturates:  # a step of slack, because zero is put on the grid
            inside_NK = Reference(int8, rounded_weights=False, slack=1).run(images_NCHW.clone())
            assert_close(inside_NK, float_NK, "reference form within the observed ranges against the float network")
        expected_NK = Reference(int8, rounded_weights=True, slack=0).run(images_NCHW.clone())
        with quantized_engine(int8.recipe.backend), warnings.catch_warnings(action="ignore"):
            network = int8.build()
            leftovers = [name for name, layer in network.named_modules() if isinstance(layer, ao.FakeQuantizeBase)]
            if leftovers:
                raise Difference(f"the int8 network still has fake quantization: {leftovers}")
            assert isinstance(network, GraphModule)
            kernels = Kernels(network)
            kernels.run(images_NCHW.clone())
            found_NK = Unrounded(network, kernels.grids).run(images_NCHW.clone())
    assert_close(found_NK, expected_NK, "graph of int8 kernels against the reference form")
    for name, steps in kernels.steps.items():
        if not steps <= MAX_STEPS:
            raise Difference(f"the {int8.recipe.backend} kernel of {name} is {steps:.3g} steps off")
    return expected_NK


def check_dynamic(int8: Model, float_model: Model, images_NCHW: torch.Tensor) -> None:
    """Compare each dynamically quantized linear layer with its own inputs, and the network without rounding of inputs.

    What recurrent layers round is compared in `tests/plugins/ptpipe_torch/int8/test_recurrent.py`. Call it inside
    `quantized_engine`.
    """
    module = int8.build()
    layers = dict(_dynamic_layers(module))
    own = float_model.build()
    rounded = _by_float_name(without_dynamic_rounding(int8.build()))
    largest = 64 if reduced(int8.recipe.backend) else 127
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            steps = (rounded[name] - parameter).abs() / (parameter.abs().max() / largest + 1e-9)
            if steps.max() > 0.51 + 1e-3:
                raise Difference(f"a weight of {name} is {steps.max():.3g} steps off its float")
            parameter.copy_(rounded[name])
    assert_close(
        run(without_dynamic_rounding(int8.build()), images_NCHW), run(own, images_NCHW), "dynamic against float"
    )
    for name, layer in layers.items():
        layer.register_forward_hook(_check_dynamic_layer(name), with_kwargs=True)
    run(module, images_NCHW)


def _by_float_name(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a network as the user's has them, where attention's projections are one tensor.

    In a projection of its own, that of the queries contains the scale.
    """
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    for name in [name for name in found if ".q_proj." in name]:
        path, _, last = name.rpartition(".q_proj.")
        query, key, value = (found.pop(f"{path}.{part}_proj.{last}") for part in "qkv")
        found[f"{path}.in_proj_{last}"] = torch.cat([query * module.get_submodule(path).head_dim ** 0.5, key, value])
    return found


def _dynamic_layers(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nnqd.Linear)]


def _check_dynamic_layer(name: str) -> Callable[..., None]:
    def check(layer: Any, args: tuple[torch.Tensor], kwargs: dict[str, torch.Tensor], found: torch.Tensor) -> None:
        (x,) = (*args, *kwargs.values())
        weight = layer.weight().dequantize()
        low, high = (float(limit) for limit in torch.aminmax(x))
        step = (max(high, 0.0) - min(low, 0.0)) / 127  # 7 bits at worst
        # Each input is at most a step off: rounded, and zero is put on the grid.
        bound = step * weight.abs().sum(1) + 1e-5
        excess = ((found - F.linear(x, weight, layer.bias())).abs() / bound).max().item()
        if not excess <= 1:
            raise Difference(f"dynamic {name} is {excess:.3g} times as far off as rounding its input explains")

    return check


def without_dynamic_rounding(module: nn.Module) -> nn.Module:
    """Replace dynamically quantized layers by float ones with the rounded weights, in place."""
    for name, layer in _dynamic_layers(module):
        weight, bias = layer.weight().dequantize(), layer.bias()
        linear = nn.Linear(layer.in_features, layer.out_features, bias is not None)
        with torch.no_grad():
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        module.set_submodule(name, linear)
    recurrent = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, DynamicRecurrent)]
    for name, layer in recurrent:
        module.set_submodule(name, _float_recurrent(layer))
    return module


def _float_recurrent(layer: DynamicRecurrent) -> nn.Module:
    """Return torch's LSTM or GRU with the rounded weights."""
    sizes = (layer.input_size, layer.hidden_size, layer.num_layers, layer.bias, layer.batch_first, 0.0)
    twin: nn.Module = getattr(nn, layer.mode)(*sizes, layer.bidirectional)
    with torch.no_grad():
        for name, (weight, bias) in layer.weights.items():
            twin.get_parameter(name).copy_(weight.dequantize())
            if bias is not None:
                twin.get_parameter(name.replace("weight", "bias")).copy_(bias)
    return twin
