"""The default launcher: do a call in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping

from ptpipe.artifact import Artifact
from ptpipe.errors import StageError
from ptpipe.events import Event
from ptpipe.hookspecs import hookimpl
from ptpipe.plugins import Vocabulary
from ptpipe.store import Store
from ptpipe.worker import Call, perform


class HereLaunch:
    """Answers `ptpipe_launch` last: a plugin's launcher goes first."""

    def __init__(self, vocabulary: Vocabulary, store: Store) -> None:
        self._vocabulary = vocabulary
        self._store = store

    @hookimpl(trylast=True)
    def ptpipe_launch(self, call: Call, tell: Callable[[Event], None]) -> Mapping[str, Artifact]:
        """Do the call here. Results own stdout: what the stage prints goes to stderr."""
        if call.workers != 1:
            raise StageError(f"{call.kind} wants {call.workers} workers, and no loaded plugin starts any")
        with contextlib.redirect_stdout(sys.stderr):
            return perform(call, self._vocabulary, self._store, tell)
