"""A launcher in one file: executes each stage of one worker in a process of its own, which frees its memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ptpipe import Call, Event, LogLine, StageError, Store, hookimpl
from ptpipe.launching import event_from_json, event_to_json, execute, load_vocabulary


@hookimpl
def ptpipe_launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path] | None:
    """Start the process, pass on its events, and return the folders that it saved the outputs to."""
    if call.workers > 1:
        return None  # left to the next launcher
    folder = Store(Path(call.artifacts)).scratch(call.key) / "own-process"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "call.json").write_text(call.to_json(), encoding="utf-8")
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603  # this very file
        assert process.stdout
        tell(LogLine(call.stage_id, f"runs in process {process.pid}"))
        for line in process.stdout:
            tell(event_from_json(line))
    if process.returncode:
        raise StageError(f"{call.stage_id} failed in its process, with exit code {process.returncode}")
    return {output.name: output for output in (folder / "outputs").iterdir()}


def main(folder: Path) -> None:
    """Execute the call in this process; events go to stdout, a line each."""
    call = Call.from_json((folder / "call.json").read_text(encoding="utf-8"))
    vocabulary = load_vocabulary(call.plugins, Path(call.folder))
    events = sys.stdout
    sys.stdout = sys.stderr  # for what the stage prints

    def tell(event: Event) -> None:
        print(event_to_json(event), file=events, flush=True)

    for name, artifact in execute(call, vocabulary, Store(Path(call.artifacts)), tell).items():
        output = folder / "outputs" / name
        output.mkdir(parents=True)
        artifact.save(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
