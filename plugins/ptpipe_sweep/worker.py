"""A trial's process: `python -m ptpipe_sweep.worker` reads a request, runs the trial, and writes how it ended.

A process for each trial: what one does to memory, threads and random streams is gone before the next begins.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ptpipe import (
    JSON,
    Plan,
    PtpipeError,
    RunResult,
    Terminated,
    load_plan,
    one_line,
    run,
    write_atomically,
)
from ptpipe.launching import SignalHandlers


@dataclass(frozen=True)
class Request:
    """What one process is to run."""

    number: int
    """The trial's."""
    manifest: str
    text: str
    """The manifest's content when the sweep began: all trials must be of one manifest."""
    overrides: Mapping[str, JSON]
    artifacts: str
    folder: str
    """The sweep's: for the log, and for the result until it is read."""
    without_measured: bool = False
    """Leave out stages with `per_machine`, and those that need them: other trials run at the same time."""

    @property
    def log(self) -> Path:
        """What the run wrote to the screen."""
        return Path(self.folder) / f"trial-{self.number:04}.log"

    @property
    def result(self) -> Path:
        """Where the process writes how the run ended."""
        return Path(self.folder) / f".trial-{self.number:04}.json"

    @property
    def stop_file(self) -> Path:
        """Tells the trials of other machines to end; every node sees the folder."""
        return Path(self.folder) / ".stop"


def unmeasured(plan: Plan) -> Plan:
    """Return the plan without the stages that measure this machine, and those that need them."""
    left_out: set[str] = set()
    for stage in plan.stages:
        if stage.stage.per_machine or left_out.intersection(stage.upstream):
            left_out.add(stage.id)
    return replace(plan, stages=tuple(stage for stage in plan.stages if stage.id not in left_out))


def main() -> None:
    """Run the request that stdin has."""
    # The sweep ends its workers by SIGINT, which a shell's background job ignores, and a Ray worker blocks.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    handlers = SignalHandlers()
    handlers.install()
    from ptpipe_torch.runtime import exit_with_parent

    values = json.load(sys.stdin)
    exit_with_parent(values.pop("parent_pid"))  # which may have ended while this process started
    request = Request(**values)
    try:
        result = _end(_run(request))
    except PtpipeError as error:
        result = {"exit_code": int(error.exit_code), "message": one_line(str(error).partition("\n")[0])}
        print(error, file=sys.stderr)  # noqa: T201  # the trial's log
    except (KeyboardInterrupt, Terminated):
        return  # before the run began; there is nothing to report
    handlers.ignore()
    write_atomically(request.result, json.dumps(result).encode())
    sys.stderr.flush()
    os._exit(0)  # as `ptpipe run` does: tearing down every library takes over a second with torch


def _run(request: Request) -> RunResult:
    plan = load_plan(request.manifest, request.overrides)
    if plan.manifest.text != request.text:
        raise PtpipeError(f"{request.manifest} was changed since the sweep began")
    if request.without_measured:
        plan = unmeasured(plan)
    return run(plan, artifacts=request.artifacts)


def _end(result: RunResult) -> dict[str, Any]:
    return {
        "run_id": result.run_id,
        "exit_code": int(result.exit_code),
        "seconds": result.seconds,
        "stages": [asdict(stage) | {"deliverables": [], "frames": []} for stage in result.stages.values()],
    }


if __name__ == "__main__":
    main()
