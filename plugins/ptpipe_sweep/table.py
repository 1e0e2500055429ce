"""The comparison at the end of a sweep: a row a trial, in columns of what differs, for a terminal and as Markdown."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ptpipe import JSON, host, one_line
from ptpipe_sweep.outcome import Ending, Quality, SeedMean, best, pareto_front, seed_means
from ptpipe_sweep.trials import shown

_MARKUP = re.compile(r"([\\`*_\[\]<>|~#@])")
_FRACTIONS = ("accuracy", "f1", "roc_auc", "average_precision", "iou", "agreement")
_MAX_REASON = 60


def table(endings: Sequence[Ending]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and rows: the options that differ, the figures that any trial has, the verdict."""
    front = pareto_front(endings)
    axes = [name for name in endings[0].settings if _differs(name, endings)] if endings else []
    columns: dict[str, list[str]] = {"trial": [str(ending.number) for ending in endings]}
    columns |= {name: [shown(ending.settings[name]) for ending in endings] for name in axes}
    columns |= _figures(endings)
    columns["verdict"] = [_verdict(ending) for ending in endings]
    if front:
        columns["front"] = ["*" if ending.number in front else "" for ending in endings]
    return tuple(columns), list(zip(*columns.values(), strict=True))


def _differs(name: str, endings: Sequence[Ending]) -> bool:
    return len({json.dumps(ending.settings[name], sort_keys=True) for ending in endings}) > 1 or len(endings) == 1


def _figures(endings: Sequence[Ending]) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    if named := next((ending.quality.name for ending in endings if ending.quality), ""):
        columns[named] = [_quality(ending.quality) for ending in endings]
    means = {number: own for own in seed_means(endings) for number in own.trials}
    if means:
        columns["mean over seeds"] = [
            _mean_text(ending.quality, means[ending.number]) if ending.quality and ending.number in means else "-"
            for ending in endings
        ]
    if any(ending.size_bytes is not None for ending in endings):
        columns["size"] = ["-" if it.size_bytes is None else bytes_text(it.size_bytes) for it in endings]
    if any(ending.latency for ending in endings):
        columns["latency"] = [f"{it.latency.median_ms:#.3g} ms" if it.latency else "-" for it in endings]
    columns["took"] = [_seconds(ending.seconds) for ending in endings]
    return columns


def _mean_text(quality: Quality, own: SeedMean) -> str:
    """Return `98.10 % (97.80 % to 98.40 %)`."""
    mean, low, high = (_quality(replace(quality, value=value)) for value in (own.mean, own.low, own.high))
    return f"{mean} ({low} to {high})"


def _quality(quality: Quality | None) -> str:
    if quality is None:
        return "-"
    value = quality.value
    if 0 <= value <= 1 and any(word in quality.name for word in _FRACTIONS):
        return f"{100 * value:.2f} %"
    return f"{value:.4g}"


def _verdict(ending: Ending) -> str:
    if ending.verdict == "passed" or not ending.message:
        return ending.verdict
    reason = one_line(ending.message)
    return f"{ending.verdict}: {reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 3] + '...'}"


def bytes_text(size_bytes: int) -> str:
    """Return `434 kB` for 434,197 bytes."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {seconds % 60:02.0f} s"


def explanation(endings: Sequence[Ending]) -> str:
    """Return what the figures are of, and what the mark of the front means."""
    shown_of = next((ending for ending in endings if ending.model), None)
    lines = []
    if shown_of:
        latency = f"; latency at {shown_of.latency.label}" if shown_of.latency else ""
        split = f" on {shown_of.split}" if shown_of.split else ""
        by = f" by {shown_of.comparison}{split}" if shown_of.comparison else ""
        lines.append(f"size and {'latency' if latency else 'quality'} of {shown_of.model!r}{by}{latency}")
    if front := pareto_front(endings):
        which = "passed or is undecided" if any(ending.is_undecided for ending in endings) else "passed"
        lines.append(f"* no other trial that {which} is better without being worse in something else ({len(front)})")
    return "\n".join(lines)


def command(manifest: str, overrides: Mapping[str, JSON], artifacts: Path, threads: int) -> str:
    """Return the command line that runs one trial again, from the store."""
    words = ["ptpipe", "run", manifest]
    for name, value in overrides.items():
        words += ["-s", f"{name}={json.dumps(value) if not isinstance(value, str) else _plain(value)}"]
    if artifacts != Path("artifacts") or os.environ.get("PTPIPE_ARTIFACTS"):
        words += ["--artifacts", str(artifacts)]
    prefix = f"OMP_NUM_THREADS={threads} " if threads != host.num_threads() else ""
    return prefix + shlex.join(words)


def _plain(value: str) -> str:
    """Return a text as YAML reads it as text; in quotes unless it is a plain word."""
    is_word = re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in ("true", "false", "null")
    return value if is_word else json.dumps(value)


def ending_lines(endings: Sequence[Ending], manifest: str, artifacts: Path, threads: int) -> list[str]:
    """Return the last lines: the best trial, and how to run it again."""
    chosen = best(endings)
    if chosen is None:
        has_quality = any(ending.quality for ending in endings)
        if any(ending.is_accepted for ending in endings) and not has_quality:
            return ["no figure to compare trials by: name one with --maximize STAGE.METRIC"]
        return ["no trial passed"]
    text = " ".join(f"{name}={shown(value)}" for name, value in chosen.settings.items())
    by_mean = next((own for own in seed_means(endings) if chosen.number in own.trials), None)
    num_seeds = 0 if by_mean is None else len(by_mean.trials)
    of_seeds = f", the first of {num_seeds} seeds, by whose mean it was chosen" if num_seeds > 1 else ""
    lines = [
        f"best: trial {chosen.number}, {text}{of_seeds}",
        f"run: {chosen.run_id}",
        f"again: {command(manifest, chosen.overrides, artifacts, threads)}",
    ]
    if chosen.split == "test" and len(endings) > 1:
        lines.append(
            "chosen on the test split, so its figures are optimistic: choose on val (--maximize, docs/sweep.md)"
        )
    return lines


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_MARKUP.sub(r"\\\1", one_line(cell)) for cell in line) + " |" for line in lines)
