"""Ranges chosen by counts, against searches on the raw values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from ptpipe_torch.int8.count_observers import EntropyObserver, MseObserver, PercentileObserver
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.squared_error import QuantizationError
from ptpipe_torch.int8.value_counts import CountingObserver

with deprecations_silenced():
    from torch.ao.quantization import HistogramObserver, MinMaxObserver

NUM_BATCHES = 20


def uniform(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.rand(size, generator=generator)


def normal(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.randn(size, generator=generator)


def laplace(generator: torch.Generator, size: int) -> torch.Tensor:
    return -torch.log1p(-uniform(generator, size)) * normal(generator, size).sign()


def relu_with_outliers(generator: torch.Generator, size: int) -> torch.Tensor:
    x = normal(generator, size).relu()
    x[:2] = torch.tensor([40.0, 37.0])
    return x


def sparse(generator: torch.Generator, size: int) -> torch.Tensor:
    return normal(generator, size) * (uniform(generator, size) < 0.1)


def bimodal(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.where(uniform(generator, size) < 0.5, -3.0, 5.0) + 0.1 * normal(generator, size)


DATA: dict[str, tuple[int, Callable[[torch.Generator, int], torch.Tensor]]] = {
    "normal": (20_000, normal),
    "laplace": (20_000, laplace),
    "relu": (20_000, lambda generator, size: normal(generator, size).relu()),
    "relu with outliers": (400_000, relu_with_outliers),  # where torch's HistogramObserver has 7 times the least error
    "uniform": (20_000, lambda generator, size: 3 * uniform(generator, size) - 1),
    "sparse": (20_000, sparse),
    "sparse relu": (20_000, lambda generator, size: sparse(generator, size).relu()),
    "bimodal": (20_000, bimodal),
    "positive": (20_000, lambda generator, size: 5 + normal(generator, size).abs()),
    "hard swish": (20_000, lambda generator, size: torch.nn.functional.hardswish(3 * normal(generator, size))),
}


def in_batches_of_growing_range(x: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return x[(x.abs() * uniform(generator, len(x))).argsort()].chunk(NUM_BATCHES)


def squared_error(x: torch.Tensor, scale: float, zero_point: int, quant_max: int) -> float:
    integers = ((x / scale).round() + zero_point).clamp(0, quant_max)
    return float(((integers - zero_point) * scale - x).square().mean())


def least_error(x: torch.Tensor, quant_max: int) -> float:
    """Return the error of the best of many ranges that include zero."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    num_steps, ratio = (30, 1.1) if low and high else (150, 1.02)
    lows, highs = ([end * ratio**-step for step in range(num_steps if end else 1)] for end in (low, high))
    scales = [((top - bottom) / quant_max, bottom) for bottom, top in itertools.product(lows, highs)]
    return min(squared_error(x, scale, round(-bottom / scale), quant_max) for scale, bottom in scales)


@pytest.mark.parametrize("quant_max", [127, 255])
@pytest.mark.parametrize("name", DATA)
def test_the_range_has_the_least_error(name: str, quant_max: int) -> None:
    size, draw = DATA[name]
    generator = torch.Generator().manual_seed(7)
    x = draw(generator, size)
    observer = MseObserver(quant_min=0, quant_max=quant_max)
    for batch in in_batches_of_growing_range(x, generator):
        assert observer(batch) is batch
    scale, zero_point = (value.item() for value in observer.calculate_qparams())
    assert 0 <= zero_point <= quant_max  # zero is representable
    assert squared_error(x, scale, zero_point, quant_max) <= 1.02 * least_error(x, quant_max)


def observed(observer: CountingObserver, x: torch.Tensor) -> tuple[float, int]:
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    return scale.item(), int(zero_point)


def chosen_range(observer: CountingObserver, x: torch.Tensor) -> tuple[float, float]:
    scale, zero_point = observed(observer, x)
    return -zero_point * scale, (observer.quant_max - zero_point) * scale


@pytest.mark.parametrize("quant_max", [127, 255])
@pytest.mark.parametrize("name", ["normal", "relu with outliers", "bimodal", "hard swish"])
def test_the_error_of_a_candidate_is_that_of_the_values(name: str, quant_max: int) -> None:
    size, draw = DATA[name]
    x = draw(torch.Generator().manual_seed(7), size)
    observer = MseObserver(quant_min=0, quant_max=quant_max)
    observer(x)
    error_of = QuantizationError(observer.histogram())
    for low, high in ((x.min(), x.max()), (x.min() / 2, x.max() / 3), (x.min(), x.max() / 9)):
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = float((high - low) / quant_max)
        zero_point = round(float(-low) / scale)
        levels = torch.tensor([scale], dtype=torch.float64), torch.tensor([float(zero_point)], dtype=torch.float64)
        found = error_of(*levels, quant_max + 1).item() / len(x)
        assert found == pytest.approx(squared_error(x.double(), scale, zero_point, quant_max), rel=0.02)


@pytest.mark.parametrize("num_levels", [128, 256])
@pytest.mark.parametrize("name", DATA)
def test_candidates_that_clip_too_much_are_left_out_and_none_that_could_be_chosen(name: str, num_levels: int) -> None:
    size, draw = DATA[name]
    observer = MseObserver(quant_min=0, quant_max=num_levels - 1)
    observer(draw(torch.Generator().manual_seed(7), size))
    computed = []

    class Counting(QuantizationError):
        def __call__(self, scales_R: torch.Tensor, zero_points_R: torch.Tensor, num_levels: int) -> torch.Tensor:
            computed.append(len(scales_R))
            return super().__call__(scales_R, zero_points_R, num_levels)

    error_of = Counting(observer.histogram())
    low, high = observer.min_val.double().clamp(max=0), observer.max_val.double().clamp(min=0)
    fractions = 1.3 ** -torch.arange(21, dtype=torch.float64)
    grid_R2 = torch.cartesian_prod(fractions, fractions)
    scales_R = (high * grid_R2[:, 1] - low * grid_R2[:, 0]) / (num_levels - 1)
    zero_points_R = (-low * grid_R2[:, 0] / scales_R).round()
    best = error_of.least(scales_R, zero_points_R, num_levels, slice(None, None, 22))
    assert sum(computed) < len(grid_R2)
    assert best == int(error_of(scales_R, zero_points_R, num_levels).argmin())


def test_mse_where_torch_clips_too_much() -> None:
    """Rectified normal values and two outliers: torch's histogram had 12 times the error of the best clip."""
    x = relu_with_outliers(torch.Generator().manual_seed(7), 400_000)
    errors = {}
    for name, observer in {
        "mse": MseObserver(quant_min=0, quant_max=255),
        "torch": HistogramObserver(quant_min=0, quant_max=255),
        "min_max": MinMaxObserver(quant_min=0, quant_max=255),
    }.items():
        observer(x)
        scale, zero_point = observer.calculate_qparams()
        errors[name] = squared_error(x, scale.item(), int(zero_point), 255)
    assert errors["mse"] <= 1.01 * least_error(x, 255)
    assert errors["mse"] < errors["min_max"]
    assert errors["torch"] > 5 * errors["mse"]


@pytest.mark.parametrize("percentile", [99.0, 99.9, 100.0])
@pytest.mark.parametrize("name", DATA)
def test_percentiles_are_those_of_the_values_other_than_zero(name: str, percentile: float) -> None:
    size, draw = DATA[name]
    x = draw(torch.Generator().manual_seed(7), size)
    low, high = chosen_range(PercentileObserver(percentile=percentile, quant_min=0, quant_max=255), x)
    nonzero = x[x != 0].numpy()
    above = float(np.percentile(nonzero, percentile, method="inverted_cdf"))
    below = -float(np.percentile(-nonzero, percentile, method="inverted_cdf"))
    step = (high - low) / 255
    bin_width = float(x.abs().max()) / 1024
    assert low == pytest.approx(min(below, 0), abs=step + bin_width)  # torch moves ends by up to a step
    assert high == pytest.approx(max(above, 0), abs=step + bin_width)


def test_entropy_clips_a_long_tail_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(7)
    low, high = chosen_range(EntropyObserver(quant_min=0, quant_max=255), uniform(generator, 50_000))
    assert (low, high) == (0, pytest.approx(1, abs=0.01))
    heavy = laplace(generator, 200_000)
    heavy[0], heavy[1] = 60.0, -55.0
    low, high = chosen_range(EntropyObserver(quant_min=0, quant_max=255), heavy)
    core = heavy.abs().quantile(0.999).item()
    assert 0.8 * core < high < 30
    assert low == pytest.approx(-high, rel=0.02)  # one threshold for both signs


def test_entropy_does_not_clip_what_256_levels_hold() -> None:
    """Normalized bytes, most of them background, as in MNIST."""
    generator = torch.Generator().manual_seed(7)
    bytes_N = torch.randint(0, 256, (50_000,), generator=generator).where(uniform(generator, 50_000) < 0.2, 0)
    x = (bytes_N / 255 - 0.13) / 0.31
    low, high = chosen_range(EntropyObserver(quant_min=0, quant_max=255), x)
    assert (low, high) == (pytest.approx(x.min().item(), abs=0.02), pytest.approx(x.max().item(), abs=0.02))


OBSERVERS = [MseObserver, PercentileObserver, EntropyObserver]


@pytest.mark.parametrize("observer_type", OBSERVERS)
@pytest.mark.parametrize(
    ("values", "scale", "zero_point"),
    [
        ([0.0, 0.0], torch.finfo(torch.float32).eps, 0),
        ([3.0], 3 / 255, 0),
        ([-3.0], 3 / 255, 255),
        ([1e-30, -1e-30], torch.finfo(torch.float32).eps, 0),
        ([2e38], 2e38 / 255, 0),
    ],
)
def test_few_values(observer_type, values: list[float], scale: float, zero_point: int) -> None:
    observer = observer_type(quant_min=0, quant_max=255)
    for _ in range(2):
        found = observed(observer, torch.tensor(values))
    assert found == (pytest.approx(scale), zero_point)


@pytest.mark.parametrize("observer_type", OBSERVERS)
def test_huge_outliers_leave_a_usable_grid(observer_type) -> None:
    x = normal(torch.Generator().manual_seed(7), 10_000)
    x[0] = 1e9
    low, high = chosen_range(observer_type(quant_min=0, quant_max=255), x)
    assert low <= 0 < high <= 1.01e9
    assert high - low > 0


@pytest.mark.parametrize("observer_type", OBSERVERS)
def test_nothing_observed(observer_type) -> None:
    with pytest.warns(UserWarning, match="must run observer"):
        assert observer_type(quant_min=0, quant_max=255).calculate_qparams()[0] == 1


def test_a_range_is_searched_once_for_the_same_counts_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[str] = []
    for observer_type in (MseObserver, PercentileObserver, EntropyObserver):
        search = observer_type.choose_range

        def recorded(self, *arguments, search=search, name=observer_type.__name__):
            searches.append(name)
            return search(self, *arguments)

        monkeypatch.setattr(observer_type, "choose_range", recorded)
    x = torch.randn(5_000, generator=torch.Generator().manual_seed(41)) ** 3

    def scale_of(observer, *batches: torch.Tensor) -> float:
        for batch in batches:
            observer(batch)
        return observer.calculate_qparams()[0].item()

    makers = [
        *(MseObserver, partial(MseObserver, quant_min=0, quant_max=127), EntropyObserver, PercentileObserver),
        partial(PercentileObserver, 90.0),
    ]
    scales = [scale_of(make(), x) for make in makers]
    assert len(set(scales)) == len(searches) == len(makers)
    assert [scale_of(make(), x[:700], x[700:]) for make in makers] == scales
    assert len(searches) == len(makers)
    assert scale_of(MseObserver(), x, x[:1]) > 0
    assert len(searches) == len(makers) + 1
