"""Write lines to a rich console of any width, color support and encoding."""

from __future__ import annotations

import errno
import os
import sys

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ptpipe import one_line
from ptpipe_report.theme import ASCII, UNICODE

_LOG_FILE_WIDTH = 120


class PipeSafeConsole(Console):
    """A console whose reader may go away: the run continues without output.

    As a pipe's does (`ptpipe run ... 2>&1 | head`), or a terminal that is closed.
    """

    def __exit__(self, *raised: object) -> None:
        """Write what was printed."""
        try:
            super().__exit__(*raised)
        except OSError as error:
            if error.errno != errno.EIO:  # of a closed terminal
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Stop writing, instead of ending the process as rich does."""
        self.quiet = True


class TerminalWriter:
    """A console and the theme that its encoding supports.

    On a terminal, lines are wrapped with a hanging indent or truncated; in a file or a pipe a line stays one line,
    so that a text search finds it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else _stderr_console()
        self.theme = ASCII if self.console.options.ascii_only else UNICODE
        # FORCE_COLOR makes rich treat a log file as a terminal, but a log file has no right edge and no cursor.
        self.has_edge = self.console.is_terminal if console is not None else sys.stderr.isatty()
        self.is_live = self.console.is_interactive and self.console.file.isatty()

    @property
    def width(self) -> int | None:
        """Columns available to a line; None in a file or a pipe, where nothing limits it."""
        return self.console.width if self.has_edge else None

    def blank(self) -> None:
        """Write an empty line."""
        self.console.print()

    def line(self, line: Text) -> None:
        """Write one line, truncated at the terminal's right edge."""
        if self.width is None:
            self.console.print(line, soft_wrap=True)
        else:
            self.console.print(line, no_wrap=True, overflow="ellipsis")

    def entry(self, lead: Text, body: str, style: str = "") -> None:
        """Write a paragraph of untrusted text with a hanging indent after `lead`."""
        text = Text(one_line(body), style)
        if self.width is None:
            self.line(Text.assemble(lead, text))
            return
        grid = Table.grid(padding=0)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(lead, text)
        self.console.print(grid)

    def verbatim(self, lead: Text, body: str, link: str = "") -> None:
        """Write text to be copied: never truncated, wrapped by the terminal itself. `link`: what it leads to."""
        text = Text(one_line(body), Style(link=link) if link else "")
        self.console.print(Text.assemble(lead, text), soft_wrap=True)


def _stderr_console() -> Console:
    is_fixed = sys.stderr.isatty() or "COLUMNS" in os.environ
    return PipeSafeConsole(
        file=sys.stderr, width=None if is_fixed else _LOG_FILE_WIDTH, highlight=False, markup=False, emoji=False
    )
