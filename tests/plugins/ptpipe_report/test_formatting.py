from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe_report.formatting import (
    bytes_text,
    clock_text,
    figure,
    fixed_decimals,
    key_figures,
    number,
    seconds_text,
)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("size_bytes", 434_197, "size 434 kB"),
        ("accuracy", 0.99134, "accuracy 99.13 %"),
        ("val_accuracy", 1, "val accuracy 100.00 %"),
        ("accuracy", 99.1, "accuracy 99.1"),  # a plugin that gives percent: no guess
        ("size_ratio", 0.2561, "size ratio 25.6 %"),
        ("drop", 0.0030, "drop 0.30 points"),
        ("drop", -0.00001, "drop 0.00 points"),
        ("drop", -0.0015, "drop -0.15 points"),
        ("samples_per_s", 6812.4, "6,812 samples/s"),
        ("num_samples", 10_000, "10,000 samples"),
        ("latency_ms", 0.0411, "latency 0.0411 ms"),
        ("elapsed_s", 125.9, "elapsed 2 min 06 s"),
        ("loss", 0.031349, "loss 0.0313"),
        ("loss", math.nan, "loss nan"),
        ("loss", -math.inf, "loss -inf"),
        ("lr", 1e-5, "lr 1.00e-05"),
        ("step", 12_031, "step 12,031"),
        ("gain", 999.7, "gain 1,000"),
        ("early_stopped", True, "early stopped yes"),
        ("format", "torch int8 fbgemm", "torch int8 fbgemm"),
        ("epoch", "1/3", "epoch 1/3"),
        ("best", None, "best -"),
        ("int8_net.accuracy", 0.9134, "int8 net accuracy 91.34 %"),
        ("_s", 3, " s 3"),
        ("quantization_top1_agreement", 0.5, "agreement with float 50.00 %"),  # top1_agreement is with the int8 model
    ],
)
def test_the_name_implies_the_unit(name, value, text) -> None:
    assert str(figure(name, value)) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (434_197, "434 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_692_915, "1.69 MB"),
        (12_345_678_901, "12.3 GB"),
        (5_432_100_000_000, "5,432 GB"),
    ],
)
def test_bytes_have_decimal_prefixes(size_bytes, text) -> None:
    assert bytes_text(size_bytes) == text


@given(st.integers(0, 10**15))
def test_bytes_use_the_largest_prefix(size_bytes) -> None:
    amount, prefix = bytes_text(size_bytes).split()
    value = float(amount.replace(",", ""))
    assert value < 1000 or prefix == "GB"
    assert value * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[prefix] == pytest.approx(size_bytes, rel=0.0051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.413, "0.41 s"),
        (0.996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125.9, "2 min 06 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (86_400 + 125, "24 h 02 min"),
    ],
)
def test_durations_have_two_units_at_most(seconds, text) -> None:
    assert seconds_text(seconds) == text


def test_a_running_clock() -> None:
    assert [clock_text(seconds) for seconds in (0, 41.9, 125, 3725)] == ["0:00", "0:41", "2:05", "1:02:05"]


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12))
def test_numbers_keep_three_digits(value) -> None:
    read_back = float(number(value).replace(",", ""))
    assert read_back == pytest.approx(value, rel=0.0051, abs=1e-300)


def test_columns_of_numbers_share_their_decimals() -> None:
    assert fixed_decimals([0.0411, 12.34, None]) == ("0.041", "12.340", "-")
    assert fixed_decimals([250.2, 1234.56]) == ("250", "1,235")
    assert fixed_decimals([None, 0]) == ("-", "0")


def test_the_best_known_figures_come_first_and_lists_and_prose_not_at_all() -> None:
    values = {
        "epochs": 3,
        "prose": "x" * 41,
        "loss": 0.1,
        "per_class": [1],
        "accuracy": 0.99,
        "nothing": None,
        "note": "",
    }
    assert [str(figure) for figure in key_figures(values)] == ["accuracy 99.00 %", "loss 0.100", "epochs 3"]


def test_rankings_are_in_percent() -> None:
    figures = key_figures({"accuracy": 0.99, "average_precision": 0.5, "roc_auc": 0.9877, "primary_metric": "f1"})
    assert [str(figure) for figure in figures] == ["ROC AUC 98.77 %", "average precision 50.00 %", "accuracy 99.00 %"]


def test_the_f1_of_a_class_comes_before_accuracy_in_percent() -> None:
    figures = key_figures({"val_accuracy": 0.99, "val_f1": 0.9412, "val_loss": 0.1})
    assert [str(figure) for figure in figures[:2]] == ["val f1 94.12 %", "val accuracy 99.00 %"]


def test_the_metric_that_models_are_compared_by_comes_first() -> None:
    values = {"val_r2": -58.3, "val_image_ap": 0.87, "primary_metric": "image_ap"}
    assert [str(figure) for figure in key_figures(values)] == ["val image ap 0.870", "val r2 -58.3"]
    assert str(key_figures({"r2": 0.1, "right": 0.92, "primary_metric": "right"})[0]) == "right 0.920"


def test_each_value_is_shown_once_and_booleans_last() -> None:
    values = {"fused": True, "backend": "fbgemm", "format": "torch int8 fbgemm", "int8_layers": 4, "of": "torch"}
    assert [str(figure) for figure in key_figures(values)] == ["torch int8 fbgemm", "int8 layers 4", "fused yes"]
