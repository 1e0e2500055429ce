"""Places for the labels of points, where they cover neither each other nor a point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptpipe_report.html.svg import CHARACTER_PX

_HEIGHT_PX, _GAP_PX = 13.0, 8.0
_MAX_LINES_AWAY = 9


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether they have an area in common."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def contains(self, other: Box) -> bool:
        """Whether the other one lies inside."""
        return (
            self.left <= other.left
            and self.right >= other.right
            and self.top <= other.top
            and self.bottom >= other.bottom
        )


@dataclass(frozen=True)
class Placed:
    """A label's place."""

    box: Box
    is_near: bool
    """Whether it is right beside its point; else a line leads to it."""

    @property
    def baseline(self) -> float:
        """Where the text stands."""
        return self.box.bottom - 3


def place_labels(
    points: Sequence[tuple[float, float, str]], room: Box, obstacles: Sequence[Box] = ()
) -> list[Placed | None]:
    """Return a place for each label, inside `room`; None where there is none. `points`: x, y and text."""
    taken = [*obstacles, *(Box(x - 4, y - 4, x + 4, y + 4) for x, y, _ in points)]
    places: list[Placed | None] = []
    for x, y, content in points:
        own = Box(x - 4, y - 4, x + 4, y + 4)
        others = [box for box in taken if box != own]
        found = next(
            (
                placed
                for placed in _candidates(x, y, len(content) * CHARACTER_PX)
                if room.contains(placed.box) and not any(placed.box.overlaps(other) for other in others)
            ),
            None,
        )
        places.append(found)
        taken += [found.box] if found else []
    return places


def _candidates(x: float, y: float, width: float) -> Iterator[Placed]:
    for lines_away in range(_MAX_LINES_AWAY):
        for sign in (1, -1) if lines_away else (1,):
            top = y + sign * lines_away * _HEIGHT_PX - _HEIGHT_PX / 2
            gap = _GAP_PX if lines_away == 0 else 2 * _GAP_PX
            for left in (x + gap, x - gap - width):
                yield Placed(Box(left, top, left + width, top + _HEIGHT_PX), lines_away == 0)
