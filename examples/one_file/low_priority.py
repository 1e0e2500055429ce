"""A launcher in one file: runs training in a process of the lowest priority, so that the machine stays responsive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

from ptpipe import Call, Event, StageError, Store, hookimpl
from ptpipe.launching import event_from_json, event_to_json, execute, load_vocabulary


@hookimpl
def ptpipe_launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path] | None:
    """Run `train.*` stages of one worker; leave all others to the next launcher."""
    if not call.kind.startswith("train.") or call.workers > 1:
        return None
    outputs = Store(Path(call.artifacts)).scratch(call.key) / "outputs"
    shutil.rmtree(outputs, ignore_errors=True)  # of an attempt that was killed
    command = [sys.executable, __file__, str(outputs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                stdin.write(call.to_json())
            for line in process.stdout:
                tell(event_from_json(line))
        except BaseException:  # Ctrl-C, SIGTERM: the process must not outlive the run
            process.terminate()
            raise
    if process.returncode:
        raise StageError(f"{call.stage_id} failed in its own process, with exit code {process.returncode}")
    return {folder.name: folder for folder in outputs.iterdir()}


def main(outputs: Path) -> None:
    """Execute the call that stdin describes; write events to stdout as JSON lines, and each output to a folder."""
    os.nice(19)
    call, events = Call.from_json(sys.stdin.read()), sys.stdout

    def tell(event: Event) -> None:
        print(event_to_json(event), file=events, flush=True)

    with redirect_stdout(sys.stderr):  # what a library prints is not an event
        vocabulary = load_vocabulary(call.plugins, Path(call.folder))
        made = execute(call, vocabulary, Store(Path(call.artifacts)), tell)
    for name, artifact in made.items():
        folder = outputs / name
        folder.mkdir(parents=True)
        artifact.save(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
