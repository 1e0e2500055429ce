"""Compare a prepared network, with nothing rounded, with the network that the user gave.

The passes that make a network quantizable (tracing, fusing, folding batch norms, rewriting for training) keep its
function, so on the same inputs both return the same values, up to the float32 rounding of sums in another order.

Tolerance: adding K products in another order changes their sum by about sqrt(K) * 2**-24 of the largest terms, and the
layers of a network accumulate likewise: sqrt(25,000 * 200) * 2**-24 = 1.3e-4 of the largest value for a very large
network. 1e-3 is allowed; 1e-6 is usual, and another function is some 1e-1 off. In train mode batch norm divides by the
statistics of these few samples, which may be close to zero, and on large samples products (of a squeeze-and-excitation)
grow with every layer: where more than 1e-3 is found, the user's network is also computed in float64, with several
roundings of its weights, and eight times what that changes is allowed. Normal and large samples where that is more than
3e-2 show nothing, and don't count; where neither shows anything, as in some untrained networks, a notice says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe import Context, StageError
from ptpipe_torch.errors import first_line
from ptpipe_torch.int8.observers import is_observer
from ptpipe_torch.model.example_inputs import NUM_PROBES, copies, probe_inputs
from ptpipe_torch.model.outputs import named_outputs, tensors_of
from ptpipe_torch.model.signature import Signature
from ptpipe_torch.parity.rankings import Rankings, ranks_values
from ptpipe_torch.random_outputs import refuse_random_outputs
from ptpipe_torch.runtime import cpu_random_states, seeded
from ptpipe_torch.training_layers import may_act_in_training_alone

Inputs: TypeAlias = Sequence[torch.Tensor]
Computed = TypeVar("Computed")
Compute: TypeAlias = Callable[[nn.Module, Inputs], list[torch.Tensor]]

TOLERANCE = 1e-3
"""Of the largest value."""
OWN_ROUNDINGS, _MAX_TOLERANCE = 8, 3e-2
"""The same for networks that amplify rounding, in units of what it does to the user's own."""
_NUM_ROUNDINGS = 4
_NORMAL_AND_LARGE = ((0, 2), (1, 3))
"""Samples of the two sizes of `probe_inputs`."""
_ONLY_IN_TRAINING = (
    ". Not traced is what a model does in training alone: a line behind `if self.training:`, or a train() method that "
    "keeps batch norms in eval mode (batch_norm: fold keeps all of them there)"
)
_FUSED = (nn.modules.batchnorm._BatchNorm, nn.ReLU)
"""Layers that are fused with the one before them."""
_SAMPLE_VALUES = 256
"""Of each layer's output, to find the first layer that differs."""


@dataclass(frozen=True)
class Expected:
    """What the user's network computes."""

    inputs: Inputs
    eval_outputs: Sequence[torch.Tensor]
    """In eval mode."""
    train_outputs: Sequence[torch.Tensor] | None
    """In train mode, without dropout; None if it is random then, too, or not asked for."""

    @classmethod
    def of(cls, network: nn.Module, signature: Signature, *, train: bool) -> Expected:
        """Run the network, which is left as it was, in eval mode. `train`: also in train mode.

        Raises StageError if the network can't run, or if its outputs are random or not those of the signature.
        """
        network.eval()
        try:
            inputs = probe_inputs(network, signature.inputs)
            states = cpu_random_states()
            with torch.no_grad():
                returned = network(*copies(inputs))
        except Exception as error:  # a network may raise anything
            described = ", ".join(map(str, signature.inputs))
            raise StageError(f"the network can't run {described}: {first_line(error)}") from error
        if cpu_random_states() != states:
            refuse_random_outputs(network, inputs)
        named_outputs(returned, signature.outputs)
        train_outputs = _train_outputs(network, inputs) if train else None
        return cls(inputs, tensors_of(returned), train_outputs)


def check_prepared(
    ctx: Context, prepared: GraphModule, expected: Expected, build: Callable[[], nn.Module], folded: Sequence[str] = ()
) -> None:
    """Check that a prepared network computes what the user's does; report the difference. It is left as it was.

    `build`: builds the user's network once more, to find the first layer that differs, which the StageError names.
    `folded`: batch norms that use their running statistics in train mode as well.
    """
    if folded and expected.train_outputs is not None:
        build = functools.partial(with_frozen, build, folded)
        expected = replace(expected, train_outputs=_train_outputs(build(), expected.inputs))
    figures, tolerances = {}, list[float]()
    with float_weights(prepared), torch.no_grad():
        modes = {"eval": expected.eval_outputs, "train": expected.train_outputs}
        for mode, expected_outputs in modes.items():
            if expected_outputs is None:
                continue
            outputs: Compute = functools.partial(_outputs, train=mode == "train")
            if ranks_values(prepared):
                expected_outputs, outputs = _in_order(outputs, build(), expected.inputs)
            found = outputs(prepared, expected.inputs)
            figures[mode], tolerance = _difference(found, expected_outputs), TOLERANCE
            if not figures[mode] <= tolerance:
                others = rounded_otherwise(build(), expected.inputs, outputs)
                figures[mode], tolerance = _beside_own_rounding(found, expected_outputs, others)
            if not figures[mode] <= tolerance:
                raise StageError(_message(ctx.kind, mode, figures[mode], prepared, expected, build))
            tolerances.append(tolerance)
    ctx.metric(prepared_difference=max(figures.values()))
    if max(tolerances) > _MAX_TOLERANCE:
        ctx.notice(
            "the outputs of this network can't show that the prepared one computes the same: rounding its weights to "
            f"float32 changes them by {max(tolerances) / OWN_ROUNDINGS:.2g} of the largest one, and int8 will change "
            "them at least as much; train it first"
        )


def _outputs(network: nn.Module, inputs: Inputs, *, train: bool) -> list[torch.Tensor]:
    with in_mode(network, train=train):
        returned = tensors_of(float_forward(network)(*copies(inputs)))
    return [value.float() if value.dtype == torch.float64 else value for value in returned]


def _in_order(compute: Compute, network: nn.Module, inputs: Inputs) -> tuple[list[torch.Tensor], Compute]:
    """Return what `compute` makes of a network that ranks values, and what computes others in its order.

    Both return the ranked values, too.
    """
    with Rankings() as own:
        expected = compute(network, inputs)

    def compute_in_order(other: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
        with Rankings(own.positions) as rankings:
            outputs = compute(other, inputs)
        if len(rankings.values) != len(own.values):  # one whose result is not used may be gone
            return [*compute(other, inputs), *own.values]
        return [*outputs, *(values.to(of.dtype) for values, of in zip(rankings.values, own.values, strict=True))]

    return [*expected, *own.values], compute_in_order


class _Frozen(nn.Module):
    """A batch norm that stays in eval mode."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm.eval()

    def train(self, _mode: bool = True) -> Self:
        return super().train(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x)


def with_frozen(build: Callable[[], nn.Module], names: Sequence[str]) -> nn.Module:
    """Return a network whose batch norms of these names stay in eval mode."""
    network = build()
    for name in names:
        network.set_submodule(name, _Frozen(network.get_submodule(name)))
    return network


def rounded_otherwise(
    network: nn.Module, inputs: Inputs, compute: Callable[[nn.Module, Inputs], Computed]
) -> list[Computed]:
    """Return what `compute` makes of a network in float64, also with weights rounded otherwise, as folding does.

    Where rounding is amplified, one other rounding may happen to show little of it. Nothing is returned of a network
    that is written for float32 alone.
    """
    doubled = [value.double() if value.is_floating_point() else value for value in inputs]
    random, results = torch.Generator().manual_seed(0), list[Computed]()
    try:
        network.double()
        for _ in range(_NUM_ROUNDINGS):
            results.append(compute(network, copies(doubled)))
            for weights in network.parameters():
                weights.data.mul_(1 + 2**-24 * torch.randn(weights.shape, generator=random, dtype=weights.dtype))
    except Exception:  # noqa: BLE001  # a network may raise anything
        return []
    return results


def _beside_own_rounding(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], others: Sequence[Sequence[torch.Tensor]]
) -> tuple[float, float]:
    """Return a difference and its tolerance: of the samples, normal or large, where it is beyond that the furthest.

    Samples with a tolerance of more than `_MAX_TOLERANCE` count only if there are no others. `others`: what the
    user's network computes with other roundings.
    """
    pairs = []
    for samples in _NORMAL_AND_LARGE:
        own = max((_difference(expected, other, samples) for other in others), default=0.0)
        pairs.append((_difference(found, expected, samples), max(TOLERANCE, OWN_ROUNDINGS * own)))
    telling = [(difference, tolerance) for difference, tolerance in pairs if tolerance <= _MAX_TOLERANCE]
    return max(telling or pairs, key=lambda pair: pair[0] / pair[1])


def _difference(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], samples: tuple[int, ...] | None = None
) -> float:
    """Return the largest relative difference, of all samples or of some."""
    return max(
        (relative_difference(_of(samples, a), _of(samples, b)) for a, b in zip(found, expected, strict=True)),
        default=0.0,
    )


def _of(samples: tuple[int, ...] | None, values: torch.Tensor) -> torch.Tensor:
    has_samples = samples is not None and values.dim() > 0 and len(values) == NUM_PROBES
    return values[list(samples)] if samples is not None and has_samples else values


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value expected; infinite for other shapes.

    0 for integers and truth values, which follow from floats: rounding decides between nearly equal ones.
    """
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel() or not expected.is_floating_point():
        return 0.0
    # Values that are not finite can only be equal. Calibration refuses them, with the layer's name.
    is_equal = (found == expected) | (found.isnan() & expected.isnan())
    differences = torch.where(is_equal, 0.0, (found - expected).abs())
    difference = differences.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
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


def float_forward(network: nn.Module) -> Callable[..., Any]:
    """Return the forward pass of a network, past its observers."""
    return FloatInterpreter(network).run if isinstance(network, GraphModule) else network


class FloatInterpreter(Interpreter):
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
def in_mode(network: nn.Module, *, train: bool) -> Iterator[None]:
    """Put a network into train mode without dropout, or eval mode; restore modes and running statistics on exit.

    Without dropout means: without any layer that may act in training alone.
    """
    modes = {module: module.training for module in network.modules()}
    statistics = {name: buffer.clone() for name, buffer in network.named_buffers()} if train else {}
    network.train(train)
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or may_act_in_training_alone(module):
            module.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for name, buffer in network.named_buffers():
            if name in statistics and not torch.equal(buffer, statistics[name]):
                buffer.copy_(statistics[name])


def _train_outputs(network: nn.Module, inputs: Inputs) -> Sequence[torch.Tensor] | None:
    runs = []
    for seed in (1, 2):
        with in_mode(network, train=True), seeded(seed), torch.no_grad():
            state = torch.get_rng_state()
            try:
                runs.append(tensors_of(network(*copies(inputs))))
            except Exception:  # noqa: BLE001  # batch norm of one value a channel: the trainer's batches may be larger
                return None
            if not torch.equal(torch.get_rng_state(), state):  # stochastic depth, which may have dropped nothing
                return None
    return runs[0] if all(map(torch.equal, *runs)) else None  # other random numbers than torch's


def draws_in_training(network: nn.Module, inputs: Inputs) -> bool:
    """Return whether a network draws random numbers in train mode, as dropout does. It is left as it was."""
    with float_weights(network), in_mode(network, train=True), seeded(1), torch.no_grad():
        network.train()
        state = torch.get_rng_state()
        try:
            float_forward(network)(*copies(inputs))
        except Exception:  # noqa: BLE001  # as above
            return False
        return not torch.equal(torch.get_rng_state(), state)


def _message(
    kind: str, mode: str, difference: float, prepared: GraphModule, expected: Expected, build: Callable[[], nn.Module]
) -> str:
    layer = first_difference(build(), prepared, expected.inputs, train=mode == "train")
    place = f"; the first layer that differs is {layer}: leave it float (skip: [{layer}])" if layer else ""
    return (
        f"{kind}: the prepared network computes something else than the model in {mode} mode: outputs differ by "
        f"{difference:.2g} of the largest one{place}{_ONLY_IN_TRAINING if mode == 'train' else ''}"
    )


def first_difference(network: nn.Module, prepared: GraphModule, inputs: Inputs, *, train: bool = False) -> str | None:
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
        with in_mode(network, train=train):
            network(*copies(inputs))
        with in_mode(prepared, train=train):
            FloatInterpreter(prepared, lambda value: values.append(evenly_sampled(value))).run(*copies(inputs))
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
            layers.append((name, module, evenly_sampled(output)))

    return record


def evenly_sampled(value: torch.Tensor) -> torch.Tensor:
    """Return some values of a tensor, evenly spaced, as a copy; a complex one's real and imaginary parts."""
    flat = torch.view_as_real(value).reshape(-1) if value.is_complex() else value.reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE_VALUES)].float().clone()
