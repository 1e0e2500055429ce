"""Tensors to call a network with where no data is at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from itertools import product
from typing import Any, cast

import torch

from ptpipe import StageError
from ptpipe_torch.model.axis_sizes import parsed, sized
from ptpipe_torch.model.outputs import tensors_of
from ptpipe_torch.model.signature import BATCH, TensorSpec

_MAX_VALUES = 1 << 26
"""Of one sample: a stored recipe, which may come from anywhere, names the size that is allocated."""
_SYMBOL_SIZE = 16
_PROBE_SIZES = (11, _SYMBOL_SIZE)
"""Of the axes of `probe_inputs` that may have any size: one at which no network was traced, where it takes that."""
NUM_PROBES = 4
"""Samples of `probe_inputs`."""
_VOCABULARIES = (256, 16, 2, 1)
_INTEGERS = (torch.int64, torch.int32)
_LARGE = 8.0
"""Standard deviation of every second sample: values far outside a calibrated range saturate."""


def zeros(specs: Sequence[TensorSpec], batch_size: int, symbol_size: int = _SYMBOL_SIZE) -> tuple[torch.Tensor, ...]:
    """Return a tensor of zeros for each input: the first of a vocabulary, for integers.

    `symbol_size`: of axes, other than the batch's, that may have any size; see `example_shapes` for several such, and
    for multiples. Raises StageError where a sample is absurdly large.
    """
    shapes = example_shapes(specs, batch_size, symbol_size)
    # Names of torch and NumPy are the same.
    return tuple(
        torch.zeros(shape, dtype=getattr(torch, spec.dtype)) for spec, shape in zip(specs, shapes, strict=True)
    )


def probe_inputs(
    network: Callable[..., Any], specs: Sequence[TensorSpec], symbol_sizes: Sequence[int] = _PROBE_SIZES
) -> Sequence[torch.Tensor]:
    """Return seeded inputs of four samples on which the network's outputs are finite.

    Floats are normal, in every second sample large; for networks that take no negative values, those of 0 to 1, else
    zeros. Integers are below the largest of `_VOCABULARIES` that the network takes, else zeros, which every vocabulary
    has: zeros alone may all be padding, of which a network computes nothing. Of booleans, which may be masks, half are
    true along the last axis, so that some places are hidden and some are not, whatever true means; for networks that do
    not take such, all, else none. `symbol_sizes`: of axes that may have any size; the first that the network takes.
    Raises what the network raises for zeros.
    """
    random = torch.Generator().manual_seed(0)
    masks: tuple[Callable[..., torch.Tensor], ...] = (_half, torch.ones_like, torch.zeros_like)
    if all(spec.dtype != "bool" for spec in specs):
        masks = (_half,)
    has_integers = any(getattr(torch, spec.dtype) in _INTEGERS for spec in specs)
    sizes = symbol_sizes if any(spec.symbols for spec in specs) else symbol_sizes[:1]
    vocabularies, draws = _VOCABULARIES if has_integers else (1,), (_normal, torch.rand)
    for mask, vocabulary_size, draw, size in product(masks, vocabularies, draws, sizes):
        empty = zeros(specs, NUM_PROBES, size)
        inputs = [
            mask(value) if value.dtype == torch.bool else _drawn(value, draw, vocabulary_size, random)
            for value in empty
        ]
        try:
            with torch.no_grad(), redirect_stderr(StringIO()):  # to which a traced network prints the line that failed
                if all(output.isfinite().all() for output in tensors_of(network(*copies(inputs)))):
                    return inputs
        except Exception:  # noqa: BLE001, S112  # a network may raise anything for values that it does not take
            continue
    empty = zeros(specs, NUM_PROBES, symbol_sizes[-1])
    with torch.no_grad():
        network(*copies(empty))
    return empty


def computes_the_same(
    other: Callable[..., Any],
    network: Callable[..., Any],
    specs: Sequence[TensorSpec],
    *,
    symbol_sizes: Sequence[int] = _PROBE_SIZES,
    num_samples: int = NUM_PROBES,
) -> bool:
    """Return whether another implementation of a network returns what it does, up to rounding, for `probe_inputs`.

    `num_samples`: how many of the probes to run both on.
    """
    try:
        inputs = [value[:num_samples] for value in probe_inputs(network, specs, symbol_sizes)]
        with torch.no_grad(), redirect_stderr(StringIO()):
            found, expected = (tensors_of(computing(*copies(inputs))) for computing in (other, network))
        torch.testing.assert_close(found, expected, equal_nan=True)
    except Exception:  # noqa: BLE001  # a network may raise anything for inputs that it does not take
        return False
    return True


def _drawn(empty: torch.Tensor, draw: Any, vocabulary_size: int, random: torch.Generator) -> torch.Tensor:
    if empty.is_floating_point():
        drawn: torch.Tensor = draw(empty.shape, generator=random)
        return drawn
    if empty.dtype not in _INTEGERS:
        return empty
    return torch.randint(vocabulary_size, empty.shape, generator=random, dtype=empty.dtype)


def _half(empty: torch.Tensor) -> torch.Tensor:
    """Return booleans of which half, rounded up, are true along the last axis that has more than one place."""
    axis = max((axis for axis, size in enumerate(empty.shape) if size > 1), default=0)
    keys = torch.rand(empty.shape, generator=torch.Generator().manual_seed(1))  # others are drawn as without masks
    return 2 * keys.argsort(axis).argsort(axis) < empty.shape[axis]


def _normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    values[1::2] *= _LARGE
    return values


def copies(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the same inputs for a network that may change them in place."""
    return tuple(tensor.clone() for tensor in inputs)


def example_shapes(
    specs: Sequence[TensorSpec], batch_size: int, symbol_size: int = _SYMBOL_SIZE
) -> list[tuple[int, ...]]:
    """Return the shapes of `zeros`.

    Axes of other names have other sizes, which differ by another number for another `symbol_size`: a network that is
    traced at two of these is not taken for one of squares. Those of an input of four axes and more are longer, so that
    more than one place of each is left where a network halves them five times, and odd: halved and doubled, they differ
    from what they were, as they may for any size.
    """
    factors, scales = dict[str, int](), dict[str, int]()
    for spec in specs:
        scale = 1 if len(spec.shape) < 4 else 8 if len(spec.symbols) < 3 else 3
        for factor, name in map(parsed, spec.symbols):
            factors[name], scales[name] = max(factor, factors.get(name, 1)), max(scale, scales.get(name, 1))
    step = 1 + symbol_size % 2
    numbers = {
        name: max(round(scales[name] * symbol_size / factor), round(symbol_size / 4))
        + step * index
        + (scales[name] > 1)
        for index, (name, factor) in enumerate(factors.items())
    }
    shapes = [cast("tuple[int, ...]", sized(spec.shape, {**numbers, BATCH: batch_size})) for spec in specs]
    for spec, shape in zip(specs, shapes, strict=True):
        if math.prod(shape[1:]) > _MAX_VALUES:
            raise StageError(f"the input {spec} is too large to run the network once")
    return shapes
