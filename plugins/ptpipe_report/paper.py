"""Writing lines to a console, whatever its width, colours and encoding."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ptpipe_report.look import ASCII, UNICODE
from ptpipe_report.wording import one_line

_WIDTH_OF_A_FILE = 120


class LastingConsole(Console):
    """A console whose reader may go away (`ptpipe run ... 2>&1 | head`): the run goes on unseen."""

    def on_broken_pipe(self) -> None:
        """Say nothing more, instead of ending the process as rich would."""
        self.quiet = True


class Paper:
    """A console, and the signs that it can write.

    On a terminal, lines are wrapped with a hanging indent or cut; in a file or a pipe a line stays one line,
    so that a search finds it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else _stderr_console()
        self.look = ASCII if self.console.options.ascii_only else UNICODE
        # Colours can be forced upon a log file: its lines are no shorter for that, and no cursor moves in it.
        self.has_edge = self.console.is_terminal if console is not None else sys.stderr.isatty()
        self.is_live = self.console.is_interactive and self.console.file.isatty()

    @property
    def width(self) -> int | None:
        """Columns that a line may take; None where nothing limits it."""
        return self.console.width if self.has_edge else None

    def blank(self) -> None:
        """Write an empty line."""
        self.console.print()

    def line(self, line: Text) -> None:
        """Write one line, cut where the terminal ends."""
        if self.width is None:
            self.console.print(line, soft_wrap=True)
        else:
            self.console.print(line, no_wrap=True, overflow="ellipsis")

    def entry(self, lead: Text, body: str, style: str = "") -> None:
        """Write a paragraph from anybody, beside its lead."""
        said = Text(one_line(body), style)
        if self.width is None:
            self.line(Text.assemble(lead, said))
            return
        grid = Table.grid(padding=0)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(lead, said)
        self.console.print(grid)

    def verbatim(self, lead: Text, said: str) -> None:
        """Write something to be copied: where it is too long, the terminal itself wraps it."""
        self.console.print(Text.assemble(lead, one_line(said)), soft_wrap=True)


def _stderr_console() -> Console:
    is_fixed = sys.stderr.isatty() or "COLUMNS" in os.environ
    return LastingConsole(
        file=sys.stderr, width=None if is_fixed else _WIDTH_OF_A_FILE, highlight=False, markup=False, emoji=False
    )
