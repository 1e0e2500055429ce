"""Events of worker processes, passed to the main process through JSON Lines files that it tails, one per worker.

One file for all workers would do on a local disk, but two machines that append to a file on NFS overwrite each other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ptpipe import Event, Notice
from ptpipe.launching import event_from_json, event_to_json

_POLL_S = 0.1
_THREAD_NAME = "worker events"


def write_event(folder: Path, rank: int, event: Event) -> None:
    """Append an event to the file of the worker `rank` in `folder`."""
    with _file(folder, rank).open("ab", buffering=0) as stream:
        # The leading newline ends an incomplete line of an earlier attempt that was killed.
        stream.write(f"\n{event_to_json(event)}\n".encode())


@contextmanager
def tailed(folder: Path, tell: Callable[[Event], None]) -> Iterator[None]:
    """Pass the events of all workers to `tell` while the block runs, and those written up to its end.

    Events of an earlier attempt are discarded. Equal notices are passed on once, because a restarted worker repeats
    its own.
    """
    for file in _files(folder):
        file.unlink()
    reader, is_over = _Reader(folder, tell), threading.Event()

    def tail() -> None:
        while not is_over.wait(_POLL_S):
            reader.read()

    thread = threading.Thread(target=tail, name=_THREAD_NAME, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        reader.read()


def _file(folder: Path, rank: int | str) -> Path:
    return folder / f"events-{rank}.jsonl"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(_file(folder, "*").name))


class _Reader:
    def __init__(self, folder: Path, tell: Callable[[Event], None]) -> None:
        self._folder, self._tell = folder, tell
        self._positions, self._notices = Counter[Path](), set[str]()

    def read(self) -> None:
        """Pass on new events; an incomplete line is left for the next read."""
        for file in _files(self._folder):
            with file.open("rb") as stream:
                stream.seek(self._positions[file])
                content = stream.read()
            lines, newline, _ = content.rpartition(b"\n")
            self._positions[file] += len(lines + newline)
            self._pass_on(lines)

    def _pass_on(self, lines: bytes) -> None:
        for line in lines.splitlines():
            try:
                event = event_from_json(line)
            except ValueError:  # an empty or incomplete line
                continue
            if isinstance(event, Notice):
                if event.text in self._notices:
                    continue
                self._notices.add(event.text)
            self._tell(event)
