"""Compare a prepared network, with nothing rounded, with the network that the user gave.

The passes that make a network quantizable (tracing, fusing, folding batch norms, rewriting for training) keep its
function, so on the same images both return the same values, up to the float32 rounding of sums in another order.

Tolerance: adding K products in another order changes their sum by about sqrt(K) * 2**-24 of the largest terms, and the
layers of a network accumulate likewise: sqrt(25,000 * 200) * 2**-24 = 1.3e-4 of the largest value for a very large
network. 1e-3 is allowed; 1e-6 is usual, and another function is some 1e-1 off.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe import Context, StageError
from ptpipe_torch.int8.observers import is_observer
from ptpipe_torch.runtime import seeded

TOLERANCE = 1e-3
"""Of the largest value."""
_NUM_IMAGES = 4
_LARGE = 8.0
"""Standard deviation of every second image: values far outside a calibrated range saturate."""
_FUSED = (nn.modules.batchnorm._BatchNorm, nn.ReLU)
"""Layers that are fused with the one before them."""
_SAMPLE_VALUES = 256
"""Of each layer's output, to find the first layer that differs."""


def probe_images(network: Callable[[torch.Tensor], Any], input_shape_CHW: tuple[int, int, int]) -> torch.Tensor:
    """Return seeded images of shape (N, C, H, W) on which the network's output is finite.

    Normal values, in every second image large ones; for networks that take no negative values, such as indices, those
    of 0 to 1, else zeros. Raises what the network raises for zeros.
    """
    random = torch.Generator().manual_seed(0)
    normal_NCHW = torch.randn(_NUM_IMAGES, *input_shape_CHW, generator=random)
    normal_NCHW[1::2] *= _LARGE
    for images_NCHW in (normal_NCHW, torch.rand(normal_NCHW.shape, generator=random)):
        try:
            with torch.no_grad():
                if _is_finite(network(images_NCHW.clone())):
                    return images_NCHW
        except Exception:  # noqa: BLE001, S112  # a network may raise anything for values that it does not take
            continue
    zeros_NCHW = torch.zeros_like(normal_NCHW)
    with torch.no_grad():
        network(zeros_NCHW.clone())
    return zeros_NCHW


def _is_finite(output: Any) -> bool:
    return not isinstance(output, torch.Tensor) or bool(output.isfinite().all())


@dataclass(frozen=True)
class Expected:
    """What the user's network computes."""

    images_NCHW: torch.Tensor
    eval_NK: torch.Tensor
    """In eval mode."""
    train_NK: torch.Tensor | None
    """In train mode, without dropout; None if it is random then, too, or not asked for."""

    @classmethod
    def of(
        cls, network: nn.Module, input_shape_CHW: tuple[int, int, int], num_classes: int, *, train: bool
    ) -> Expected:
        """Run the network, which is left as it was, in eval mode. `train`: also in train mode.

        Raises StageError if the network can't run, or if its output is not one tensor of shape (N, K).
        """
        network.eval()
        try:
            images_NCHW = probe_images(network, input_shape_CHW)
            with torch.no_grad():
                eval_NK = network(images_NCHW.clone())
        except Exception as error:  # a network may raise anything
            raise StageError(f"the network can't run images of shape {input_shape_CHW}: {first_line(error)}") from error
        _check_output(eval_NK, images_NCHW, num_classes)
        train_NK = _train_output(network, images_NCHW) if train else None
        return cls(images_NCHW, eval_NK, train_NK)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_output(output: Any, images_NCHW: torch.Tensor, num_classes: int) -> None:
    expected = (len(images_NCHW), num_classes)
    if not isinstance(output, torch.Tensor):
        found = f"a {type(output).__name__}" + (
            f" of {', '.join(map(str, output))}" if isinstance(output, dict) else ""
        )
        raise StageError(f"the network returns {found}; it must return one tensor, logits of shape (N, {num_classes})")
    if tuple(output.shape) != expected:
        raise StageError(
            f"the network returns shape {tuple(output.shape)} for {expected[0]} images; logits are {expected}"
        )


def check_prepared(ctx: Context, prepared: GraphModule, expected: Expected, build: Callable[[], nn.Module]) -> None:
    """Check that a prepared network computes what the user's does; report the difference. It is left as it was.

    `build`: builds the user's network once more, to find the first layer that differs, which the StageError names.
    """
    figures = {}
    with float_weights(prepared), torch.no_grad():
        modes = {"eval": expected.eval_NK, "train": expected.train_NK}
        for mode, expected_NK in modes.items():
            if expected_NK is None:
                continue
            with _mode(prepared, train=mode == "train"):
                found_NK = _FloatInterpreter(prepared).run(expected.images_NCHW.clone())
            figures[mode] = relative_difference(found_NK, expected_NK)
            if not figures[mode] <= TOLERANCE:
                raise StageError(_message(ctx.kind, mode, figures[mode], prepared, expected, build))
    ctx.metric(prepared_difference=max(figures.values()))


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value expected; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    # Values that are not finite can only be equal. Calibration refuses them, with the layer's name.
    is_equal = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(is_equal, 0.0, (found - expected).abs()).max().item()
    finite = expected[expected.isfinite()].abs()
    return difference / (finite.max().item() if finite.numel() and finite.any() else 1.0)


@contextmanager
def float_weights(prepared: nn.Module) -> Iterator[None]:
    """Leave weights unrounded inside the `with`."""
    fake_quants: dict[Any, Any] = {
        layer: layer.weight_fake_quant
        for layer in prepared.modules()
        if isinstance(getattr(layer, "weight_fake_quant", None), nn.Module)
    }
    try:
        for layer in fake_quants:
            layer.weight_fake_quant = nn.Identity()
        yield
    finally:
        for layer, fake_quant in fake_quants.items():
            layer.weight_fake_quant = fake_quant


class _FloatInterpreter(Interpreter):
    """Runs a prepared network past its observers. `record` is called with each value that a node computes."""

    def __init__(self, prepared: GraphModule, record: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__(prepared)
        self._record = record

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and is_observer(self.fetch_attr(str(n.target))):
            return self.fetch_args_kwargs_from_env(n)[0][0]
        result = super().run_node(n)
        if self._record is not None and isinstance(result, torch.Tensor):
            self._record(result)
        return result


@contextmanager
def _mode(network: nn.Module, *, train: bool) -> Iterator[None]:
    """Put a network into train mode without dropout, or eval mode; restore modes and running statistics on exit."""
    modes = {module: module.training for module in network.modules()}
    statistics = {name: buffer.clone() for name, buffer in network.named_buffers()} if train else {}
    network.train(train)
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for name, buffer in network.named_buffers():
            if name in statistics and not torch.equal(buffer, statistics[name]):
                buffer.copy_(statistics[name])


def _train_output(network: nn.Module, images_NCHW: torch.Tensor) -> torch.Tensor | None:
    outputs = []
    for seed in (1, 2):
        with _mode(network, train=True), seeded(seed), torch.no_grad():
            try:
                outputs.append(network(images_NCHW.clone()))
            except Exception:  # noqa: BLE001  # batch norm of one value a channel: the trainer's batches may be larger
                return None
    same = isinstance(outputs[0], torch.Tensor) and torch.equal(outputs[0], outputs[1])
    return outputs[0] if same else None  # functional dropout, stochastic depth: random


def _message(
    kind: str, mode: str, difference: float, prepared: GraphModule, expected: Expected, build: Callable[[], nn.Module]
) -> str:
    layer = first_difference(build(), prepared, expected.images_NCHW, train=mode == "train")
    place = f"; the first layer that differs is {layer}: leave it float (skip: [{layer}])" if layer else ""
    return (
        f"{kind}: the prepared network computes something else than the model in {mode} mode: outputs differ by "
        f"{difference:.2g} of the largest one{place}"
    )


def first_difference(
    network: nn.Module, prepared: GraphModule, images_NCHW: torch.Tensor, *, train: bool = False
) -> str | None:
    """Return the name of the first layer whose output the prepared network does not compute; None if there is none.

    A layer that is fused with the ones behind it has no output of its own: it counts only if theirs differ too.
    """
    layers: list[tuple[str, nn.Module, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(_recorder(name, layers))
        for name, module in network.named_modules()
        if not any(True for _ in module.children())
    ]
    values: list[torch.Tensor] = []
    with torch.no_grad():
        with _mode(network, train=train):
            network(images_NCHW.clone())
        with _mode(prepared, train=train):
            _FloatInterpreter(prepared, lambda value: values.append(_sample(value))).run(images_NCHW.clone())
    for hook in hooks:
        hook.remove()
    is_found = [
        any(relative_difference(value, form) <= TOLERANCE for value in values for form in (output, output.relu()))
        for _, _, output in layers  # a ReLU function that is fused with a layer is no layer of its own
    ]
    for position, (name, _, _) in enumerate(layers):
        end = position + 1
        while end < len(layers) and isinstance(layers[end][1], _FUSED):
            end += 1
        if not any(is_found[position:end]):
            return name
    return None


def _recorder(name: str, layers: list[tuple[str, nn.Module, torch.Tensor]]) -> Callable[..., None]:
    def record(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            layers.append((name, module, _sample(output)))

    return record


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Return some values of a tensor, evenly spaced, as a copy."""
    flat = value.reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE_VALUES)].float().clone()
