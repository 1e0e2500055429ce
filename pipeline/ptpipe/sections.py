"""Sections of a run's report as data: what plugins return from the hook `ptpipe_report_sections`.

A report decides how they look; a section says what there is to see. Everything is text and numbers, and PNG files for
pictures: text is shown as it is, never as HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Cell: TypeAlias = "str | int | float | None"


class Topic(StrEnum):
    """What a section is about. Reports order sections by it, as here."""

    TRAINING = "training"
    QUALITY = "quality"
    SAMPLES = "samples"
    QUANTIZATION = "quantization"
    LATENCY = "latency"
    OTHER = "other"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Names with a value each."""

    facts: tuple[tuple[str, Cell], ...]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; a number is formatted as its column's name implies (`size_bytes`, `latency_ms`)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """Each with a cell for every column; None: nothing."""
    title: str = ""

    def __post_init__(self) -> None:
        _require(all(len(row) == len(self.columns) for row in self.rows), "a row has not one cell for each column")


@dataclass(frozen=True)
class Point:
    """A point, and the intervals that it is known to lie in; None: no interval."""

    x: float
    y: float
    y_low: float | None = None
    y_high: float | None = None
    x_low: float | None = None
    x_high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind."""

    name: str
    points: tuple[Point, ...]
    is_line: bool = True
    """Whether they are connected, in the order given."""


@dataclass(frozen=True)
class Mark:
    """A line across a plot, at a value of x or y, or a band between two."""

    label: str
    axis: str
    """`x` or `y`: the axis that the value is on."""
    value: float
    end: float | None = None
    """Where a band ends; None: a line."""

    def __post_init__(self) -> None:
        _require(self.axis in ("x", "y"), f"a mark is on the axis x or y, not {self.axis!r}")


@dataclass(frozen=True)
class Plot:
    """Lines and points in a plane."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    is_log_x: bool = False
    is_log_y: bool = False


@dataclass(frozen=True)
class Dot:
    """A value, its interval, or both; None where there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class DotSeries:
    """Dots of one kind, one for each name of a `DotPlot`."""

    name: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class DotPlot:
    """Values or ranges of named things, one below the other: a score for each class, a range for each layer."""

    title: str
    x_label: str
    names: tuple[str, ...]
    series: tuple[DotSeries, ...]
    marks: tuple[Mark, ...] = ()
    """On the axis `x`."""

    def __post_init__(self) -> None:
        _require(all(len(of.dots) == len(self.names) for of in self.series), "a series has not one dot for each name")


@dataclass(frozen=True)
class HeatMap:
    """A table of numbers whose size is shown as color."""

    title: str
    row_label: str
    column_label: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    """A tuple for each row."""
    is_difference: bool = False
    """Whether negative and positive values are opposites, which need two colors."""
    is_confusion: bool = False
    """Whether the diagonal is what is right: only what is wrong is colored, and of a difference both."""

    def __post_init__(self) -> None:
        shape = [len(row) for row in self.values]
        _require(shape == [len(self.column_names)] * len(self.row_names), "values have not a row for each row name")


@dataclass(frozen=True)
class Image:
    """A small picture with its caption."""

    png: bytes
    caption: str
    """What is to be seen, for those who can't see it too."""


@dataclass(frozen=True)
class ImageGrid:
    """Small pictures side by side."""

    images: tuple[Image, ...]
    title: str = ""


Block: TypeAlias = Text | Facts | Table | Plot | DotPlot | HeatMap | ImageGrid


@dataclass(frozen=True)
class Section:
    """A part of a run's report: a heading, and blocks below it."""

    title: str
    blocks: tuple[Block, ...]
    topic: Topic = Topic.OTHER
    stage_id: str = ""
    """The stage that it is about; empty: several, or the run."""


def _require(is_met: bool, message: str) -> None:
    """Raise ValueError where a plugin made a block that can't be drawn: in its code, where it can be found."""
    if not is_met:
        raise ValueError(message)
