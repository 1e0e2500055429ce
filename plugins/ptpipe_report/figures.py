"""Named values as a person wants to read them: the unit is in the name (`size_bytes`, `latency_ms`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ptpipe import JSON

_UNIT_OF_WORD = {
    "accuracy": "accuracy",
    "acc": "accuracy",
    "agreement": "accuracy",
    "top1": "accuracy",
    "top5": "accuracy",
    "share": "share",
    "utilization": "share",
    "drop": "drop",
}
_TELLING = (
    "top1",
    "val_top1",
    "accuracy",
    "val_accuracy",
    "top1_agreement",
    "loss",
    "val_loss",
    "images_per_s",
    "size_bytes",
    "format",
    "num_samples",
)
"""What comes first where only a few figures fit."""
_LONGEST_WORD = 40
NOTHING = "-"


@dataclass(frozen=True)
class Figure:
    """A value with its unit, and what it is the value of; empty where that goes without saying: `6,812 images/s`."""

    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label} {self.text}" if self.label else self.text


def figure(name: str, value: JSON) -> Figure:
    """Read the unit off the name and write the value in it; shares become percent, drops points."""
    label, unit = _unit_of(name)
    if value is None:
        return Figure(label, NOTHING)
    if isinstance(value, bool):
        return Figure(label, "yes" if value else "no")
    if not isinstance(value, int | float):
        speaks_for_itself = str(value)[:1].isalpha()  # `torch int8 fbgemm`, but `epoch 1/3`
        return Figure("" if speaks_for_itself else label, str(value))
    if not math.isfinite(value):
        return Figure(label, str(value))
    if unit == "rate":
        return Figure("", f"{number(value)} {label}/s")
    if unit == "count":
        return Figure("", f"{number(value)} {label}")
    return Figure(label, _with_unit(value, unit))


def telling_figures(values: Mapping[str, JSON]) -> tuple[Figure, ...]:
    """The values that can be read in a line, each said once: best known names first, then as told, yes and no last."""
    shown = {name: value for name, value in values.items() if _is_figure(value)}
    rank = {name: place for place, name in enumerate(_TELLING)}
    figures: list[Figure] = []
    for name in sorted(shown, key=lambda name: rank.get(name, len(rank) + isinstance(shown[name], bool))):
        said = figure(name, shown[name])
        if not any(said.text in before.text.split() for before in figures if not said.label):
            figures.append(said)  # `fbgemm` is left out after `torch int8 fbgemm`
    return tuple(figures)


def number(value: float) -> str:
    """Three significant digits, none cut from a whole number: `0.0313`, `41.3`, `6,812`, `12,031`."""
    if isinstance(value, int) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def fixed_decimals(values: Sequence[JSON]) -> tuple[str, ...]:
    """Numbers of one column with their points in line: as many decimals as the least of them needs, 3 at most."""
    numbers = [abs(value) for value in values if isinstance(value, int | float) and math.isfinite(value) and value]
    decimals = min(3, max(0, 2 - math.floor(math.log10(min(numbers))))) if numbers else 0
    return tuple(f"{value:,.{decimals}f}" if isinstance(value, int | float) else NOTHING for value in values)


def bytes_text(size_bytes: float) -> str:
    """Bytes with a decimal prefix: `434 kB` is 434,000 bytes."""
    for power, prefix in ((3, "G"), (2, "M"), (1, "k")):
        # 999,600 would be rounded up to `1000 kB`.
        if abs(size_bytes) >= 999.5 * 1000 ** (power - 1):
            return f"{number(size_bytes / 1000**power)} {prefix}B"
    return f"{size_bytes:,.0f} B"


def seconds_text(seconds: float) -> str:
    """A duration in two units at most: `0.41 s`, `12.3 s`, `2 min 05 s`, `1 h 02 min`."""
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
    """A duration that is still running: `0:41`, `1:02:05`."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"


def joined(figures: Iterable[Figure], separator: str = " · ") -> str:
    """The figures in one line."""
    return separator.join(str(figure) for figure in figures)


def _unit_of(name: str) -> tuple[str, str]:
    for unit, suffix in (("rate", "_per_s"), ("bytes", "_bytes"), ("ms", "_ms"), ("s", "_s")):
        if name.endswith(suffix) and len(name) > len(suffix):
            return " ".join(_words(name.removesuffix(suffix))), unit
    if name.startswith("num_"):
        return " ".join(_words(name.removeprefix("num_"))), "count"
    words = _words(name)
    return " ".join(words), next((unit for word, unit in _UNIT_OF_WORD.items() if word in words), "number")


def _words(name: str) -> list[str]:
    """`pretrain.val_top1`: pretrain, val, top1."""
    return name.replace(".", "_").split("_")


def _with_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return bytes_text(value)
    if unit == "ms":
        return f"{number(value)} ms"
    if unit == "s":
        return seconds_text(value)
    if unit == "accuracy" and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "drop" and abs(value) <= 1:
        return f"{round(100 * value, 2) + 0.0:.2f} points"  # never `-0.00`
    return number(value)


def _is_figure(value: JSON) -> bool:
    if isinstance(value, str):
        return bool(value) and len(value) <= _LONGEST_WORD
    return isinstance(value, int | float)
