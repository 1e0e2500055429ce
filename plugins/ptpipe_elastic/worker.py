"""One worker of a stage: a process that torch elastic starts, with the call's folder and its node as arguments.

`call-NODE.json` in that folder says what to do, `said-RANK.jsonl` takes what is said, `outputs/` what rank 0 makes.
Rank 0 may be on any node.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

from ptpipe import StageError
from ptpipe.events import Event, LogLine
from ptpipe.execution.call import Call, execute
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe.store.store import Store
from ptpipe_elastic.said import write_event
from ptpipe_elastic.started import leave
from ptpipe_torch.distributed.worker_group import WorkerGroupError
from ptpipe_torch.runtime import num_cpus

OUTPUTS = "outputs"
# A worker that lost another one waits this long before it ends, so that the one that failed first is seen first.
_YIELD_S = 3.0


def call_file(folder: Path, node: int) -> Path:
    """What the workers of a node are to do: each has paths of its own."""
    return folder / f"call-{node}.json"


def main(folder: Path, node: int) -> NoReturn:
    """Do this worker's part and leave with exit code 0, or 1 where it failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cpus() // int(os.environ["LOCAL_WORLD_SIZE"]))))
    try:
        _work(folder, node, int(os.environ["RANK"]))
    except BaseException as error:  # noqa: BLE001  # a plugin may raise anything
        _write_error(error)
        if isinstance(error, WorkerGroupError):
            time.sleep(_YIELD_S)
        leave(1)
    leave(0)


def _work(folder: Path, node: int, rank: int) -> None:
    call = Call.from_json(call_file(folder, node).read_text(encoding="utf-8"))
    with redirect_stdout(sys.stderr):
        vocabulary = load_vocabulary(call.plugins, Path(call.folder))
        gc.freeze()  # what was imported stays: no use in traversing it
        if call.kind not in vocabulary.stages:
            reasons = [*vocabulary.broken.values(), *(problem.message for problem in vocabulary.problems)]
            raise StageError(f"no plugin offers {call.kind} in worker {rank}: {'; '.join(reasons)}")
        outputs = execute(call, vocabulary, Store(Path(call.artifacts)), _teller(folder, rank), rank)
    if rank == 0:
        made = folder / "outputs.part"
        shutil.rmtree(made, ignore_errors=True)
        for name, artifact in outputs.items():
            place = made / name
            place.mkdir(parents=True)
            artifact.save(place)
        made.rename(folder / OUTPUTS)  # whole, or not there


def _teller(folder: Path, rank: int) -> Callable[[Event], None]:
    """Rank 0 speaks for all; of the others only log lines are heard, with their rank."""

    def tell(event: Event) -> None:
        if isinstance(event, LogLine):
            event = LogLine(event.stage_id, f"[rank {rank}] {event.text}")
        elif rank != 0:
            return
        write_event(folder, rank, event)

    return tell


def _write_error(error: BaseException) -> None:
    """Leave the error where torch elastic looks for it, and the traceback on stderr."""
    traceback.print_exception(error)
    content = {
        "message": str(error) if isinstance(error, StageError) else f"{type(error).__name__}: {error}".rstrip(": "),
        "timestamp": int(time.time()),
        "is_consequence": isinstance(error, WorkerGroupError),
        "is_stage_error": isinstance(error, StageError),
    }
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
