"""One worker of a stage: a process that torch elastic starts with the call's folder and its node's rank as arguments.

In that folder `call-NODE.json` is the call, `events-RANK.jsonl` takes events, `outputs/` takes the artifacts of rank 0,
which may be on any node. `starts` has a line for each start of rank 0.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ptpipe import Event, LogLine, Notice, StageError, host
from ptpipe.launching import (
    Call,
    FilesRead,
    ModulesImported,
    Plugin,
    Store,
    error_frames,
    error_text,
    execute,
    load_vocabulary,
)
from ptpipe_elastic.bootstrap import exit_now, write_error_file
from ptpipe_elastic.event_log import write_event
from ptpipe_torch.distributed.worker_group import WorkerGroupError
from ptpipe_torch.torch_state import torch_defaults

OUTPUTS = "outputs"
# A worker that lost its connection to another waits this long, so that the one that failed first is seen first.
_YIELD_S = 3.0


def call_file(folder: Path, node: int) -> Path:
    """The call for the workers of one node: each node has its own paths."""
    return folder / f"call-{node}.json"


def main(folder: Path, node: int) -> NoReturn:
    """Execute this worker's part of the call, and exit with 0, or 1 if it failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, host.num_threads() // int(os.environ["LOCAL_WORLD_SIZE"]))))
    worker = _Worker(folder, node, int(os.environ["RANK"]))
    try:
        worker.work()
    except BaseException as error:  # noqa: BLE001  # a plugin may raise anything
        _write_error(error, error_frames(worker.plugins, worker.source_folders, error))
        if isinstance(error, WorkerGroupError):
            time.sleep(_YIELD_S)
        exit_now(1)
    exit_now(0)


@dataclass
class _Worker:
    folder: Path
    node: int
    rank: int
    plugins: Sequence[Plugin] = ()
    """Those whose code is shown where an error came through it, as soon as they are loaded."""
    source_folders: Collection[Path] = ()
    """Those of the user's functions, likewise."""

    def work(self) -> None:
        """Execute the call, and save the outputs of rank 0."""
        folder, rank = self.folder, self.rank
        call = Call.from_json(call_file(folder, self.node).read_text(encoding="utf-8"))
        if rank == 0:
            _count_start(folder, call.stage_id)
        with redirect_stdout(sys.stderr):
            vocabulary = load_vocabulary(call.plugins, Path(call.folder))
            self.plugins, self.source_folders = vocabulary.plugins, call.source_folders
            gc.freeze()  # what was imported stays: no use in traversing it
            if call.kind not in vocabulary.stages:
                reasons = [*vocabulary.broken.values(), *(problem.message for problem in vocabulary.problems)]
                raise StageError(f"no plugin offers {call.kind} in worker {rank}: {'; '.join(reasons)}")
            with torch_defaults():  # whatever plugins have set when they were imported
                outputs = execute(call, vocabulary, Store(Path(call.artifacts)), _teller(folder, rank), rank)
        if rank == 0:
            staging = folder / "outputs.part"
            shutil.rmtree(staging, ignore_errors=True)
            for name, artifact in outputs.items():
                place = staging / name
                place.mkdir(parents=True)
                artifact.save(place)
            shutil.rmtree(folder / OUTPUTS, ignore_errors=True)  # of an attempt in which another worker failed later
            staging.rename(folder / OUTPUTS)  # atomic: the outputs are complete or absent


def _count_start(folder: Path, stage_id: str) -> None:
    """Give a notice of each start but the first: what ends well would not show that workers failed on the way."""
    with (folder / "starts").open("a", encoding="utf-8") as stream:
        stream.write("\n")
        num_restarts = stream.tell() - 1
    if num_restarts:
        text = "a worker failed, or its node left: all workers restarted from the last checkpoint"
        write_event(folder, 0, Notice(stage_id, f"{text} (restart {num_restarts})"))


def _teller(folder: Path, rank: int) -> Callable[[Event], None]:
    """A function that passes on all events of rank 0, and the log lines of the other ranks."""

    def tell(event: Event) -> None:
        if isinstance(event, LogLine):
            event = replace(event, text=f"[rank {rank}] {event.text}")
        elif rank != 0 and not isinstance(event, ModulesImported | FilesRead):
            return
        write_event(folder, rank, event)

    return tell


def _write_error(error: BaseException, frames: Sequence[str] = ()) -> None:
    is_stage_error, is_consequence = isinstance(error, StageError), isinstance(error, WorkerGroupError)
    text = error_text(error)
    message = text if is_stage_error else f"{type(error).__name__}: {text}".rstrip(": ")
    write_error_file(error, message, frames, is_stage_error=is_stage_error, is_consequence=is_consequence)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
