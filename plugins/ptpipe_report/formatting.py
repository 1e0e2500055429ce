"""Format named values for people: the unit is in the name (`size_bytes`, `latency_ms`, `samples_per_s`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ptpipe import JSON

_UNIT_OF_WORD = {
    "accuracy": "accuracy",
    "acc": "accuracy",
    "agreement": "accuracy",
    "fidelity": "accuracy",
    "f1": "accuracy",
    "auc": "accuracy",
    "precision": "accuracy",
    "iou": "accuracy",
    "top1": "accuracy",
    "ratio": "fraction",
    "fraction": "fraction",
    "utilization": "fraction",
    "drop": "drop",
    "macs": "scaled",
}
_SYMBOL_OF_UNIT = {"db": "dB", "ms": "ms"}
_LABELS = {
    "quantization_top1_agreement": "agreement with float",
    "roc_auc": "ROC AUC",
    "val_roc_auc": "val ROC AUC",
    "roc_auc_ovr": "ROC AUC, one vs rest",
    "val_roc_auc_ovr": "val ROC AUC, one vs rest",
}
_BEST_KNOWN = (
    "f1",
    "val_f1",
    "macro_f1",
    "val_macro_f1",
    "roc_auc",
    "val_roc_auc",
    "roc_auc_ovr",
    "val_roc_auc_ovr",
    "average_precision",
    "val_average_precision",
    "perplexity",
    "val_perplexity",
    "accuracy",
    "val_accuracy",
    "mean_iou",
    "val_mean_iou",
    "fidelity",
    "val_fidelity",
    "psnr_db",
    "val_psnr_db",
    "r2",
    "val_r2",
    "quantization_top1_agreement",
    "top1_agreement",
    "loss",
    "val_loss",
    "samples_per_s",
    "size_bytes",
    "format",
    "num_samples",
)
"""These come first if only a few figures fit, behind the metric that models are compared by."""
_PRIMARY = "primary_metric"
"""The name of that metric."""
_MAX_WORD_LENGTH = 40
NOTHING = "-"


@dataclass(frozen=True)
class Figure:
    """A value with its unit, and its label; empty where the value speaks for itself: `6,812 samples/s`."""

    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label} {self.text}" if self.label else self.text


def figure(name: str, value: JSON) -> Figure:
    """Format a value in the unit that its name implies; ratios and fractions become percent, drops points."""
    label, unit = _unit_of(name)
    if value is None:
        return Figure(label, NOTHING)
    if isinstance(value, bool):
        return Figure(label, "yes" if value else "no")
    if not isinstance(value, int | float):
        is_self_explanatory = str(value)[:1].isalpha()  # `torch int8 fbgemm`, but `epoch 1/3`
        return Figure("" if is_self_explanatory else label, str(value))
    if not math.isfinite(value):
        return Figure(label, str(value))
    if unit == "rate":
        return Figure("", f"{number(value)} {label}/s")
    if unit == "count":
        return Figure("", f"{number(value)} {label}")
    return Figure(label, _with_unit(value, unit))


def key_figures(values: Mapping[str, JSON]) -> tuple[Figure, ...]:
    """Return the short values, each once: best known names first, then in the given order, booleans last."""
    shown = {name: value for name, value in values.items() if name != _PRIMARY and _is_figure(value)}
    primary = str(values.get(_PRIMARY, ""))
    rank = {name: place for place, name in enumerate(dict.fromkeys((primary, f"val_{primary}", *_BEST_KNOWN)))}
    figures: list[Figure] = []
    for name in sorted(shown, key=lambda name: rank.get(name, len(rank) + isinstance(shown[name], bool))):
        new = figure(name, shown[name])
        if not any(new.text in before.text.split() for before in figures if not new.label):
            figures.append(new)  # `fbgemm` is left out after `torch int8 fbgemm`
    return tuple(figures)


def number(value: float) -> str:
    """Format with three significant digits, integers in full: `0.0313`, `41.3`, `6,812`, `12,031`."""
    if isinstance(value, int) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def counted(number: int, noun: str) -> str:
    """Return `1 stage`, `2 stages`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def fixed_decimals(values: Sequence[JSON]) -> tuple[str, ...]:
    """Format a column of numbers with aligned points: as many decimals as the smallest needs, at most 3."""
    numbers = [abs(value) for value in values if isinstance(value, int | float) and math.isfinite(value) and value]
    decimals = min(3, max(0, 2 - math.floor(math.log10(min(numbers))))) if numbers else 0
    return tuple(f"{value:,.{decimals}f}" if isinstance(value, int | float) else NOTHING for value in values)


def bytes_text(size_bytes: float) -> str:
    """Format bytes with a decimal prefix: `434 kB` is 434,000 bytes."""
    for power, prefix in ((3, "G"), (2, "M"), (1, "k")):
        # 999,600 would round to `1000 kB`.
        if abs(size_bytes) >= 999.5 * 1000 ** (power - 1):
            return f"{number(size_bytes / 1000**power)} {prefix}B"
    return f"{size_bytes:,.0f} B"


def scaled_text(count: float) -> str:
    """Format a large count with a decimal prefix: `1.81 G` is 1,814,073,344."""
    for power, prefix in ((3, "G"), (2, "M"), (1, "k")):
        if abs(count) >= 999.5 * 1000 ** (power - 1):
            return f"{number(count / 1000**power)} {prefix}"
    return number(count)


def seconds_text(seconds: float) -> str:
    """Format a duration in at most two units: `0.41 s`, `12.3 s`, `2 min 05 s`, `1 h 02 min`."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {whole_seconds:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def clock_text(seconds: float) -> str:
    """Format a running or remaining duration: `0:41`, `1:02:05`."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"


def joined(figures: Iterable[Figure], separator: str = " · ") -> str:
    """Join the figures on one line."""
    return separator.join(str(figure) for figure in figures)


def _unit_of(name: str) -> tuple[str, str]:
    for unit, suffix in (("rate", "_per_s"), ("bytes", "_bytes"), ("db", "_db"), ("ms", "_ms"), ("s", "_s")):
        if name.endswith(suffix) and len(name) > len(suffix):
            return " ".join(_words(name.removesuffix(suffix))), unit
    if name.startswith("num_"):
        return " ".join(_words(name.removeprefix("num_"))), "count"
    words = _words(name)
    return _LABELS.get(name) or " ".join(words), next(
        (unit for word, unit in _UNIT_OF_WORD.items() if word in words), "number"
    )


def _words(name: str) -> list[str]:
    """Split `pretrain.val_accuracy` into pretrain, val, accuracy."""
    return name.replace(".", "_").split("_")


def _with_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return bytes_text(value)
    if unit in ("db", "ms"):
        return f"{number(value)} {_SYMBOL_OF_UNIT[unit]}"
    if unit == "s":
        return seconds_text(value)
    if unit == "scaled":
        return scaled_text(value)
    if unit == "accuracy" and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    if unit == "fraction":
        return f"{100 * value:.1f} %"
    if unit == "drop" and abs(value) <= 1:
        return f"{round(100 * value, 2) + 0.0:.2f} points"  # + 0.0: never `-0.00`
    return number(value)


def _is_figure(value: JSON) -> bool:
    if isinstance(value, str):
        return bool(value) and len(value) <= _MAX_WORD_LENGTH
    return isinstance(value, int | float)
