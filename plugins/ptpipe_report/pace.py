"""How fast a stage goes, and when it will be through."""

from __future__ import annotations

from collections import deque

from ptpipe import Progress

_WINDOW_S = 30.0
_STEP_S = 0.25


class Pace:
    """The speed of the last half minute, from progress event and their times in seconds."""

    def __init__(self) -> None:
        self.latest: Progress | None = None
        self._marks: deque[tuple[float, int]] = deque()

    def tell(self, progress: Progress, now_s: float) -> None:
        """Take the latest event. Another unit or total, or a step back, is a new piece of work."""
        before = self.latest
        if before and ((before.unit, before.total) != (progress.unit, progress.total) or progress.done < before.done):
            self._marks.clear()
        self.latest = progress
        if not self._marks or now_s - self._marks[-1][0] >= _STEP_S:
            self._marks.append((now_s, progress.done))
        while now_s - self._marks[0][0] > _WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds still to go at this speed; None as long as nobody can tell."""
        if self.latest is None or self.latest.total is None or len(self._marks) < 2:
            return None
        (start_s, start), (end_s, end) = self._marks[0], self._marks[-1]
        if end <= start:
            return None
        expected_s = (self.latest.total - end) * (end_s - start_s) / (end - start)
        return max(0.0, expected_s - (now_s - end_s))
