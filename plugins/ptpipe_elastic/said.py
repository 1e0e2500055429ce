"""What workers say, as lines of JSON in a file that the parent follows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptpipe import events
from ptpipe.events import Event, Notice

_LOOK_EVERY_S = 0.1
_KINDS: dict[str, Callable[..., Event]] = {
    kind.__name__: kind for kind in (events.Progress, events.Metric, events.Notice, events.LogLine, events.Attachment)
}


def write_event(file: Path, event: Event) -> None:
    """Add an event to the file. Lines of several processes don't mix: each is one write in append mode."""
    line = json.dumps([type(event).__name__, asdict(event)])
    with file.open("ab", buffering=0) as stream:
        stream.write(f"{line}\n".encode())


@contextmanager
def followed(file: Path, tell: Callable[[Event], None]) -> Iterator[None]:
    """Pass on what is written to the file inside the `with`, to its last line. A notice is passed on once."""
    file.unlink(missing_ok=True)
    reader, over = _Reader(file, tell), threading.Event()

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


class _Reader:
    def __init__(self, file: Path, tell: Callable[[Event], None]) -> None:
        self._file, self._tell = file, tell
        self._position, self._notices = 0, set[str]()

    def read(self) -> None:
        """Tell what is new; a line that is still being written waits for the next time."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._position)
                content = stream.read()
        except FileNotFoundError:
            return
        whole, newline, _ = content.rpartition(b"\n")
        self._position += len(whole + newline)
        for line in whole.splitlines():
            self._pass_on(*json.loads(line))

    def _pass_on(self, kind: str, values: dict[str, Any]) -> None:
        event = _KINDS[kind](**values)
        if isinstance(event, Notice):
            if event.text in self._notices:  # said again after a restart
                return
            self._notices.add(event.text)
        self._tell(event)
