"""What the judged model gets wrong that the baseline gets right: by class, or as residuals.

Shape legend: N samples, K classes, T numbers of a prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptpipe import JSON, Section
from ptpipe.sections import Block, Dot, DotPlot, DotSeries, HeatMap, Mark, Plot, Point, Series, Table, Text, Topic
from ptpipe_eval.quality.gates import drop_text, metric_text
from ptpipe_eval.report.curves import curve_plots

if TYPE_CHECKING:
    from ptpipe_eval.quality.details import Details
    from ptpipe_eval.report import Compared

_MAX_HEAT_MAP = 20
_MAX_CLASSES = 40
_MAX_PAIRS = 12
_MAX_POINTS = 300
_SCORES = ("iou", "f1", "r2", "recall")
"""Columns of a task's tables by class, label or target: the first that there is, is shown."""


def quality_section(compared: Compared) -> Section | None:
    """Return the task's own picture of baseline and judged model; None where nothing is known of it."""
    details = compared.comparison.details
    if details is None or not compared.comparison.metrics:
        return None
    blocks = [*_confusions(compared, details), *_class_drops(compared), *_scores(compared, details)]
    blocks += [*_residuals(compared, details), *_curves(compared, details)]
    blocks += _other_metrics(compared) if blocks else ()
    title = f"Where {compared.candidate} differs from {compared.comparison.baseline}"
    return Section(title, tuple(blocks), Topic.QUALITY, compared.stage_id) if blocks else None


def rows_of(compared: Compared) -> tuple[int, int]:
    """Return the positions of baseline and judged model."""
    names = [row.name for row in compared.comparison.rows]
    return names.index(compared.comparison.baseline), names.index(compared.candidate)


def confusion_map(title: str, tables: Mapping[str, JSON], num_samples: int) -> HeatMap | None:
    """Return a task's confusion matrix; None where it has none, or one of too many classes."""
    names, counts_KK = _confusion(tables)
    if counts_KK is None or len(names) > _MAX_HEAT_MAP:
        return None
    if _are_parts(counts_KK, num_samples):
        return _heat_map(f"{title}, % of the class", names, _percent(counts_KK))
    return _heat_map(title, names, counts_KK)


def _confusions(compared: Compared, details: Details) -> Iterator[Block]:
    (names, base_KK), (own_names, own_KK) = (_confusion(details.models[number].tables) for number in rows_of(compared))
    if base_KK is None or own_KK is None or names != own_names:
        return
    if len(names) > _MAX_HEAT_MAP:
        yield _changed_pairs(compared, names, own_KK - base_KK)
        return
    unit = ""
    if _are_parts(base_KK, compared.comparison.num_samples):
        unit, base_KK, own_KK = ", % of the class", _percent(base_KK), _percent(own_KK)
    difference_KK = np.round(own_KK - base_KK, 1)
    base_name, own_name = compared.comparison.baseline, compared.candidate
    yield _heat_map(f"Confusion of {base_name}{unit}", names, base_KK)
    yield _heat_map(f"Confusion of {own_name}{unit}", names, own_KK)
    if difference_KK.any():
        yield _heat_map(f"{own_name} minus {base_name}{unit}", names, difference_KK, is_difference=True)
    else:
        yield Text(f"{own_name} and {base_name} have the same confusion matrix.")


def _confusion(tables: Mapping[str, JSON]) -> tuple[list[str], npt.NDArray[Any] | None]:
    """Return class names and counts, rows are labels; None where they are no square of that size."""
    names = [str(name) for name in _list(tables.get("class_names"))]
    try:
        counts_KK: npt.NDArray[Any] = np.array(tables.get("confusion"), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return names, None
    return names, counts_KK if counts_KK.shape == (len(names), len(names)) else None


def _are_parts(counts_KK: npt.NDArray[Any], num_samples: int) -> bool:
    """Return whether pixels or tokens were counted: too many for a cell."""
    return int(counts_KK.sum()) > 100 * num_samples


def _heat_map(title: str, names: Sequence[str], values_KK: npt.NDArray[Any], is_difference: bool = False) -> HeatMap:
    values = tuple(tuple(row) for row in values_KK.tolist())
    return HeatMap(title, "label", "prediction", tuple(names), tuple(names), values, is_difference, is_confusion=True)


def _changed_pairs(compared: Compared, names: Sequence[str], difference_KK: npt.NDArray[Any]) -> Table:
    """Return the pairs of classes that are mistaken more, or less, than by the baseline."""
    off_KK = difference_KK * (1 - np.eye(len(names), dtype=difference_KK.dtype))
    order = np.argsort(-np.abs(off_KK), axis=None, kind="stable")[:_MAX_PAIRS]
    pairs = [divmod(int(cell), len(names)) for cell in order]
    changes = [(row, column, int(off_KK[row, column])) for row, column in pairs]
    rows = [(names[row], names[column], f"{change:+d}") for row, column, change in changes if change]
    title = f"Mistakes that {compared.candidate} makes more (+) or less (-) often than {compared.comparison.baseline}"
    return Table(("label", "prediction", "change"), tuple(rows), title)


def _percent(counts_KK: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    percent_KK: npt.NDArray[np.float64] = np.round(100 * counts_KK / np.maximum(1, counts_KK.sum(1, keepdims=True)), 1)
    return percent_KK


def _summary_of_candidate(compared: Compared) -> Mapping[str, Any]:
    """Return what the comparison stored of the judged model: computing it again would import more than reading does."""
    return next((of for of in _list(compared.summary.get("rows")) if of.get("name") == compared.candidate), {})


def _class_drops(compared: Compared) -> Iterator[Block]:
    """Yield the drop by class with its interval, as the comparison's summary has it: those that changed."""
    classes = _list(_summary_of_candidate(compared).get("per_class"))
    if not classes:
        return
    dots = tuple(Dot(-100 * own["drop"] + 0.0, -100 * own["high"], -100 * own["low"]) for own in classes)
    yield DotPlot(
        f"Change by class against {compared.comparison.baseline}, with 95 % intervals",
        "points; right of 0 is better",
        tuple(f"{own['name']} ({own['num_samples']:,})" for own in classes),
        (DotSeries(compared.candidate, dots),),
        (Mark("no change", "x", 0.0),),
    )


def _scores(compared: Compared, details: Details) -> Iterator[Block]:
    names = (compared.comparison.baseline, compared.candidate)
    tables = (details.models[number].tables for number in rows_of(compared))
    plot = score_plot(dict(zip(names, tables, strict=True)))
    if plot is not None:
        yield plot


def score_plot(models: Mapping[str, Mapping[str, JSON]]) -> DotPlot | None:
    """Return the score of each class, label or target, where the tasks' tables have one. `models`: tables by model."""
    first = next(iter(models.values()))
    for name in (name for name in first if name.startswith("per_")):
        tables = [_list(of.get(name)) for of in models.values()]
        rows = tables[0]
        if not 1 < len(rows) <= _MAX_CLASSES or any(len(of) != len(rows) for of in tables):
            continue
        score = next((of for of in _SCORES if isinstance(rows[0], Mapping) and of in rows[0]), None)
        if score is not None:
            dots = (tuple(Dot(row.get(score)) for row in of) for of in tables)
            series = tuple(DotSeries(model, of) for model, of in zip(models, dots, strict=True))
            names = tuple(str(row.get("name", "")) for row in rows)
            return DotPlot(f"{_title(score)} by {name.removeprefix('per_')}", _title(score), names, series)
    return None


def _title(score: str) -> str:
    return {"iou": "Intersection over union", "f1": "F1", "r2": "R2"}.get(score, score.capitalize())


def _residuals(compared: Compared, details: Details) -> Iterator[Block]:
    """Yield the residuals of both models over the targets, of some of the samples."""
    base, own = rows_of(compared)
    targets_NT, numbers = details.targets_NT, [details.models[number].numbers_NT for number in (base, own)]
    if targets_NT is None or any(of is None or of.shape != targets_NT.shape for of in numbers):
        return
    shown = np.linspace(0, len(targets_NT) - 1, min(len(targets_NT), _MAX_POINTS)).astype(int)
    names = [str(row.get("name", "")) for row in _list(details.models[base].tables.get("per_target"))]
    for number in range(min(3, targets_NT.shape[1])):
        series = []
        for model, predicted_NT in zip((compared.comparison.baseline, compared.candidate), numbers, strict=True):
            assert predicted_NT is not None, model
            residuals_N = predicted_NT[shown, number] - targets_NT[shown, number]
            points = zip(targets_NT[shown, number].tolist(), residuals_N.tolist(), strict=True)
            series.append(Series(model, tuple(Point(x, y) for x, y in points), is_line=False))
        name = names[number] if number < len(names) else f"target {number + 1}"
        yield Plot(f"Residuals of {name}", name, "prediction minus target", tuple(series), (Mark("exact", "y", 0.0),))


def _curves(compared: Compared, details: Details) -> Iterator[Block]:
    names = [row.name for row in compared.comparison.rows]
    tables = {name: model.tables for name, model in zip(names, details.models, strict=True)}
    return curve_plots(tables, (compared.comparison.baseline, compared.candidate))


def _other_metrics(compared: Compared) -> Iterator[Block]:
    """Yield the metrics behind the primary one, which the table of all models has, as the summary has their drops."""
    paired = _summary_of_candidate(compared).get("paired", {})
    comparison, total = compared.comparison, compared.comparison.num_samples
    base, own = (comparison.rows[number] for number in rows_of(compared))
    rows = []
    for metric in comparison.metrics[1:]:
        value, other = (row.metrics[metric.name] for row in (own, base))
        worse = drop_text(metric, metric.drop(value, other), total)
        if metric.name in paired:
            low, high = (drop_text(metric, paired[metric.name][limit], total) for limit in ("low", "high"))
            worse += f" [{low}, {high}]"
        texts = (metric_text(metric, of, total) for of in (other, value))
        rows.append((metric.name.replace("_", " "), *texts, worse + (" points" if metric.is_fraction else "")))
    if rows:
        yield Table(("metric", base.name, own.name, "worse by"), tuple(rows), "Other metrics, with 95 % intervals")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
