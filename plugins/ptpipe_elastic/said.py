"""What workers say, as lines of JSON in files that the parent follows, one a worker.

One for all of them would do on a local disk; on a network's, two machines that append at once write over each other.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ptpipe import events
from ptpipe.events import Event, Notice

_LOOK_EVERY_S = 0.1
_KINDS: dict[str, Callable[..., Event]] = {
    kind.__name__: kind for kind in (events.Progress, events.Metric, events.Notice, events.LogLine, events.Attachment)
}


def write_event(folder: Path, rank: int, event: Event) -> None:
    """Add an event to that worker's file in the folder."""
    line = json.dumps([type(event).__name__, asdict(event)])
    with (folder / f"said-{rank}.jsonl").open("ab", buffering=0) as stream:
        stream.write(f"\n{line}\n".encode())  # after half a line, too, of a worker that was killed


@contextmanager
def followed(folder: Path, tell: Callable[[Event], None]) -> Iterator[None]:
    """Pass on what workers say in the folder inside the `with`, to its last line. A notice is passed on once."""
    for file in _files(folder):
        file.unlink()
    reader, over = _Reader(folder, tell), threading.Event()

    def follow() -> None:
        while not over.wait(_LOOK_EVERY_S):
            reader.read()

    thread = threading.Thread(target=follow, name="what workers say", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        reader.read()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("said-*.jsonl"))


class _Reader:
    def __init__(self, folder: Path, tell: Callable[[Event], None]) -> None:
        self._folder, self._tell = folder, tell
        self._positions, self._notices = Counter[Path](), set[str]()

    def read(self) -> None:
        """Tell what is new; a line that is still being written waits for the next time."""
        for file in _files(self._folder):
            with file.open("rb") as stream:
                stream.seek(self._positions[file])
                content = stream.read()
            whole, newline, _ = content.rpartition(b"\n")
            self._positions[file] += len(whole + newline)
            self._pass_on(whole)

    def _pass_on(self, lines: bytes) -> None:
        for line in lines.splitlines():
            try:
                kind, values = json.loads(line)
            except ValueError:  # nothing, or half a line
                continue
            event = _KINDS[kind](**values)
            if isinstance(event, Notice):
                if event.text in self._notices:  # said again after a restart
                    continue
                self._notices.add(event.text)
            self._tell(event)
