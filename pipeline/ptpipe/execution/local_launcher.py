"""The default launcher: executes a call in this process."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Mapping

from ptpipe.artifact import Artifact
from ptpipe.errors import StageError
from ptpipe.events import Event
from ptpipe.execution.call import Call, execute
from ptpipe.execution.process_state import settings_restored
from ptpipe.hookspecs import hookimpl
from ptpipe.plan.vocabulary import Vocabulary
from ptpipe.store.store import Store


class LocalLauncher:
    """Implements `ptpipe_launch` for stages that no plugin's launcher takes."""

    def __init__(self, vocabulary: Vocabulary, store: Store) -> None:
        self._vocabulary = vocabulary
        self._store = store

    @hookimpl(trylast=True)
    def ptpipe_launch(self, call: Call, tell: Callable[[Event], None]) -> Mapping[str, Artifact]:
        """Execute the call, or this process's part of it, so that no later one depends on what it sets for the process.

        Stdout is for results: what a stage prints goes to stderr.
        """
        num_here = call.nodes.num if call.nodes.started else 1
        if call.workers not in (1, num_here):
            reason = f"{num_here} were started" if call.nodes.started else "no loaded plugin starts any"
            raise StageError(f"{call.kind} needs {call.workers} workers, and {reason}")
        rank = call.nodes.rank if call.workers > 1 else 0
        context = contextvars.copy_context()  # NumPy keeps in one how it treats errors
        with contextlib.redirect_stdout(sys.stderr), settings_restored():
            return context.run(execute, call, self._vocabulary, self._store, _silence if rank else tell, rank)


def _silence(event: Event) -> None:
    """Drop the event: only rank 0 reports."""
