"""Dynamically quantized LSTM and GRU layers, and a comparison with what they are to compute.

torch's own modules (`torch.ao.nn.quantized.dynamic`) keep objects in their state dict that only pickle can store, take
no layer without biases, and always reduce the range of inputs. Here torch's kernels are called directly.

Shape legend: T steps, B sequences, N = all steps of all sequences, I inputs, S features of the state, G rows of a
weight: 4 S of an LSTM, 3 S of a GRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.layers import (
    InputLevels,
    QuantizedWeight,
    WeightLevels,
    expected_product,
    int8_weight,
    quantized_weight,
    replace_layers,
)

States: TypeAlias = Sequence[torch.Tensor]
"""Hidden state and, of an LSTM, cell state, each (layers * directions, B, S)."""

RECURRENT_LAYERS = (nn.LSTM, nn.GRU)
"""Layers for which torch has dynamic int8 kernels."""
_NUM_ROWS, _NUM_STEPS = 16, 64
"""How many sequences, and how many of their steps, are compared."""
_ROUNDING = 2.0**-24
_FUNCTION_ERROR = 8 * _ROUNDING
"""Of torch's vectorized sigmoid and tanh: at most 4 units in the last place of values up to 1."""


class DynamicRecurrent(nn.Module):
    """A dynamically quantized LSTM or GRU, called like `nn.LSTM` and `nn.GRU`.

    Of each layer the input is quantized as a whole, then the hidden state of all sequences at each step, both over
    their range. Its state dict has a pair of a qint8 weight and a bias, or None, under the name of each weight.
    """

    def __init__(self, layer: nn.LSTM | nn.GRU, *, per_channel: bool, narrow_weights: bool) -> None:
        super().__init__()
        self.mode, self.input_size, self.hidden_size = layer.mode, layer.input_size, layer.hidden_size
        self.num_layers, self.bidirectional, self.bias = layer.num_layers, layer.bidirectional, layer.bias
        self.batch_first, self.dropout, self.proj_size = layer.batch_first, layer.dropout, 0
        weights = {}
        for name in self.weight_names:
            weight, bias = getattr(layer, name).detach(), getattr(layer, name.replace("weight", "bias"), None)
            rounded = int8_weight(weight, per_channel=per_channel, axis=0, narrow=narrow_weights)
            weights[name] = rounded, None if bias is None else bias.detach()
        self._pack(weights)

    @property
    def weight_names(self) -> list[str]:
        """Names of the weights, as in the float layer; two for each layer and direction, in torch's order."""
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        parts = [f"l{number}{suffix}" for number in range(self.num_layers) for suffix in suffixes]
        return [f"weight_{kind}_{part}" for part in parts for kind in ("ih", "hh")]

    @property
    def weights(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """The quantized weight and the bias by the name of the weight."""
        with deprecations_silenced():
            unpacked = {name: torch.ops.quantized.linear_unpack(packed) for name, packed in self._packed.items()}
        return {name: (weight, bias if self.bias else None) for name, (weight, bias) in unpacked.items()}

    def flatten_parameters(self) -> None:
        """Do nothing: networks call it for the float layer on a GPU."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # the names that nn.LSTM gives them
        """Return output and last state, as the float layer does; `input` may be a PackedSequence."""
        call = _Call.of(self, input, hx)
        return call.returned(*self.first_layers(self.num_layers, call.x, call.sizes, call.states))

    def first_layers(
        self, number: int, x: torch.Tensor, sizes: torch.Tensor | None, states: States
    ) -> tuple[torch.Tensor, States]:
        """Return output and last states of this many layers. `x`: (T, B, I), or (N, I) with the sizes of its steps."""
        is_lstm = self.mode == "LSTM"
        directions = 2 if self.bidirectional else 1
        num_cells = number * directions
        initial = [state[:num_cells].contiguous() for state in states]
        sequences = (x,) if sizes is None else (x, sizes)
        cells = (self._cells[:num_cells], True, number, 0.0, False, self.bidirectional)
        arguments: tuple[Any, ...] = (*sequences, initial if is_lstm else initial[0], *cells)
        if sizes is None:
            arguments = (*arguments, False)  # batch_first
        operators: Any = torch
        if is_lstm:
            output, *last = operators.quantized_lstm(*arguments, dtype=torch.qint8, use_dynamic=True)
        else:
            output, *last = operators.quantized_gru(*arguments)
        return output, last

    def _pack(self, weights: Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        operators = torch.ops.quantized
        with deprecations_silenced():
            self._packed = {name: operators.linear_prepack(*weights[name]) for name in self.weight_names}
        zeros = torch.zeros(len(weights["weight_ih_l0"][0]))
        pairs = zip(self.weight_names[::2], self.weight_names[1::2], strict=True)
        self._cells = [
            operators.make_quantized_cell_params_dynamic(
                *(self._packed[name] for name in pair), zeros, zeros, False
            )  # the biases that it computes with are packed with the weights
            for pair in pairs
        ]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: value for name, value in self.weights.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        self._pack({name: state_dict[prefix + name] for name in self.weight_names})

    def extra_repr(self) -> str:
        """Return its sizes, for `print`."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


def swap_dynamic_recurrent(
    module: nn.Module, names: Sequence[str], *, per_channel: bool, narrow_weights: bool
) -> nn.Module:
    """Replace LSTM and GRU layers, by name, by dynamically quantized ones, in place; return the module.

    `per_channel`: one scale for each row of the weights. `narrow_weights`: see `weight_format`.
    """

    def quantized(layer: Any) -> nn.Module:
        return DynamicRecurrent(layer, per_channel=per_channel, narrow_weights=narrow_weights)

    return replace_layers(module, names, quantized)


def recurrent_weights(converted: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the weights of dynamically quantized recurrent layers, by all of their names in the float network."""
    return {
        f"{path}.{name}": quantized_weight(path, weight)
        for path, layer in converted.named_modules(remove_duplicate=False)
        if isinstance(layer, DynamicRecurrent)
        for name, (weight, _) in layer.weights.items()
    }


@dataclass(frozen=True)
class _Call:
    """The arguments of a recurrent layer in the form that the kernels take, and its results in the caller's."""

    layer: DynamicRecurrent
    x: torch.Tensor
    """(T, B, I), or (N, I) with `sizes`."""
    sizes: torch.Tensor | None
    """Number of sequences at each step, of a PackedSequence."""
    states: States
    order: torch.Tensor | None
    """Of a PackedSequence: which of the caller's sequences each of its own is."""
    inverse: torch.Tensor | None
    has_batch: bool

    @classmethod
    def of(cls, layer: DynamicRecurrent, input: Any, hx: Any) -> _Call:
        sizes: torch.Tensor | None = None
        order: torch.Tensor | None = None
        inverse: torch.Tensor | None = None
        has_batch = True
        if isinstance(input, PackedSequence):
            x, sizes, order, inverse = input.data, input.batch_sizes, input.sorted_indices, input.unsorted_indices
            num_sequences = int(sizes[0])
        else:
            has_batch = input.dim() == 3
            x = input if has_batch else input.unsqueeze(1)
            x = x.transpose(0, 1) if layer.batch_first and has_batch else x
            num_sequences = x.shape[1]
        num_states, directions = (2 if layer.mode == "LSTM" else 1), (2 if layer.bidirectional else 1)
        if hx is None:
            states = [x.new_zeros(layer.num_layers * directions, num_sequences, layer.hidden_size)] * num_states
        else:
            given = [hx] if isinstance(hx, torch.Tensor) else list(hx)
            states = [state if has_batch else state.unsqueeze(1) for state in given]
            states = states if order is None else [state.index_select(1, order) for state in states]
        return cls(layer, x, sizes, states, order, inverse, has_batch)

    def returned(self, output: torch.Tensor, states: States) -> Any:
        """Return results in the form of the arguments."""
        if self.inverse is not None:
            states = [state.index_select(1, self.inverse) for state in states]
        if not self.has_batch:
            output, states = output.squeeze(1), [state.squeeze(1) for state in states]
        elif self.sizes is None and self.layer.batch_first:
            output = output.transpose(0, 1)
        last = tuple(states) if self.layer.mode == "LSTM" else states[0]
        return (output if self.sizes is None else PackedSequence(output, self.sizes, self.order, self.inverse)), last

    def received(self, returned: Any) -> tuple[torch.Tensor, States]:
        """Inverse of `returned`."""
        output, last = returned
        states = [last] if isinstance(last, torch.Tensor) else list(last)
        if self.order is not None:
            states = [state.index_select(1, self.order) for state in states]
        if isinstance(output, PackedSequence):
            return output.data, states
        if not self.has_batch:
            return output.unsqueeze(1), [state.unsqueeze(1) for state in states]
        return output.transpose(0, 1) if self.layer.batch_first else output, states

    @property
    def step_sizes(self) -> list[int]:
        """The number of sequences at each step."""
        return [self.x.shape[1]] * len(self.x) if self.sizes is None else [int(size) for size in self.sizes]


def recurrent_error(layer: DynamicRecurrent, returned: Any, input: Any, hx: Any = None) -> float:
    """Return the largest difference of a layer's output and state from their formula; 1: all that rounding explains.

    The formula, in float64, for each layer and direction, with the operator Q of `dynamic_linear_error`:

        LSTM: i, f, g, o = Q(x) + Q(h);  c' = sigmoid(f) c + sigmoid(i) tanh(g);  h' = sigmoid(o) tanh(c')
        GRU:  r, z, n = Q(x) and Q(h);  n = tanh(n_x + sigmoid(r_x + r_h) n_h);  h' = (h - n) sigmoid(z_x + z_h) + n

    The hidden state that a step starts from is the one that the engine returned for the step before, so that no
    difference adds up but that of an LSTM's cell state, which is bounded along with it: by what the product may differ,
    times the largest slope of sigmoid (1/4) and tanh (1), plus their own rounding and that of sums and products.
    """
    call = _Call.of(layer, input, hx)
    output, last = call.received(returned)
    tensors = [call.x, *call.states]
    if not call.x.numel() or not all(tensor.isfinite().all() for tensor in tensors):
        return 0.0
    error, x, size = 0.0, call.x, layer.hidden_size
    directions = 2 if layer.bidirectional else 1
    for number in range(layer.num_layers):
        is_last = number == layer.num_layers - 1
        y, _ = (output, last) if is_last else layer.first_layers(number + 1, call.x, call.sizes, call.states)
        for direction in range(directions):
            place = number * directions + direction
            track = _Track(
                layer,
                place,
                call.step_sizes,
                x.reshape(-1, x.shape[-1]),
                y[..., direction * size : (direction + 1) * size].reshape(-1, size),
            )
            initial, final = ([state[place] for state in states] for states in (call.states, last))
            error = max(error, track.error(initial, final))
        x = y
    return error


@dataclass(frozen=True)
class _Bounded:
    """Values in float64 and by how much the engine's may differ from them."""

    value: torch.Tensor
    error: torch.Tensor

    def __add__(self, other: _Bounded) -> _Bounded:
        value = self.value + other.value
        return _Bounded(value, self.error + other.error + 2 * _ROUNDING * (self.value.abs() + other.value.abs()))

    def __sub__(self, other: _Bounded) -> _Bounded:
        return self + _Bounded(-other.value, other.error)

    def __mul__(self, other: _Bounded) -> _Bounded:
        value = self.value * other.value
        error = self.error * (other.value.abs() + other.error) + self.value.abs() * other.error
        return _Bounded(value, error + 2 * _ROUNDING * value.abs())

    def sigmoid(self) -> _Bounded:
        return _Bounded(self.value.sigmoid(), self.error / 4 + _FUNCTION_ERROR)

    def tanh(self) -> _Bounded:
        return _Bounded(self.value.tanh(), self.error + _FUNCTION_ERROR)

    def chunks(self, number: int) -> Iterator[_Bounded]:
        return map(_Bounded, self.value.chunk(number, -1), self.error.chunk(number, -1))

    def rows(self, number: int) -> _Bounded:
        return _Bounded(self.value[:number], self.error[:number])

    def followed_by(self, other: _Bounded) -> _Bounded:
        return _Bounded(torch.cat([self.value, other.value]), torch.cat([self.error, other.error]))

    def excess(self, found: torch.Tensor) -> float:
        """Return the largest difference from `found`, in units of what is allowed."""
        difference = (found[: len(self.value)] - self.value).abs()
        return (difference / self.error.clamp(min=1e-30)).nan_to_num(torch.inf).max().item()


def _exactly(value: torch.Tensor) -> _Bounded:
    return _Bounded(value.double(), torch.zeros_like(value, dtype=torch.float64))


@dataclass(frozen=True)
class _Track:
    """What one direction of one layer got and returned, for each step one after the other."""

    layer: DynamicRecurrent
    place: int
    """Index of layer and direction."""
    sizes: Sequence[int]
    x_NI: torch.Tensor
    y_NS: torch.Tensor

    def error(self, initial: States, final: States) -> float:
        """Return the largest difference from the formula. `initial`, `final`: states, each (B, S)."""
        products = self._products()
        is_lstm, is_reverse = self.layer.mode == "LSTM", self.layer.bidirectional and self.place % 2 == 1
        steps = list(zip(accumulate(self.sizes, initial=0), self.sizes, strict=False))
        steps = steps[::-1] if is_reverse else steps
        hidden_BS, cell, error = initial[0][:0], _exactly(initial[-1][:0]), 0.0
        for first, size in steps[:_NUM_STEPS]:
            # Forwards, some sequences may have ended before this step; backwards, some begin with it.
            number = min(size, _NUM_ROWS)
            hidden_BS = torch.cat([hidden_BS[:size], initial[0][len(hidden_BS) : size]])
            cell = cell.rows(number).followed_by(_exactly(initial[-1][len(cell.value) : number]))
            of_x, of_hidden = products(self.x_NI[first : first + number], hidden_BS)
            if is_lstm:
                cell, expected = _lstm(of_x + of_hidden, cell)
            else:
                expected = _gru(of_x, of_hidden, _exactly(hidden_BS[:number]))
            hidden_BS = self.y_NS[first : first + size]
            error = max(error, expected.excess(hidden_BS))
        if len(steps) > _NUM_STEPS:
            return error
        return max(error, expected.excess(final[0]), cell.excess(final[1]) if is_lstm else 0.0)

    def _products(self) -> Callable[[torch.Tensor, torch.Tensor], tuple[_Bounded, _Bounded]]:
        """Return a function that multiplies some inputs, and the first states of all, with the weights."""
        weights = self.layer.weights
        (of_x, bias_x), (of_hidden, bias_hidden) = (
            (WeightLevels.of(weights[name][0]), weights[name][1])
            for name in self.layer.weight_names[2 * self.place : 2 * self.place + 2]
        )
        x_levels = InputLevels.of(self.x_NI)

        def products(x_RI: torch.Tensor, hidden_BS: torch.Tensor) -> tuple[_Bounded, _Bounded]:
            hidden_levels = InputLevels.of(hidden_BS)
            hidden_RS = hidden_BS[: len(x_RI)]
            return (
                _Bounded(*expected_product(x_RI, x_levels, of_x, bias_x)),
                _Bounded(*expected_product(hidden_RS, hidden_levels, of_hidden, bias_hidden)),
            )

        return products


def _lstm(gates: _Bounded, cell: _Bounded) -> tuple[_Bounded, _Bounded]:
    """Return the cell state and the hidden state after a step."""
    i, f, g, o = gates.chunks(4)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return cell, o.sigmoid() * cell.tanh()


def _gru(of_x: _Bounded, of_hidden: _Bounded, hidden: _Bounded) -> _Bounded:
    """Return the hidden state after a step."""
    (r_x, z_x, n_x), (r_h, z_h, n_h) = of_x.chunks(3), of_hidden.chunks(3)
    new = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return (hidden - new) * (z_x + z_h).sigmoid() + new
