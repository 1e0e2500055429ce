"""Options, loading and output that several commands share."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ptpipe.errors import ManifestError, Problem, UsageError, first_problems
from ptpipe.printable import one_line
from ptpipe.store.files import strict_json

if TYPE_CHECKING:
    from ptpipe.artifact import JSON
    from ptpipe.plan.bind import Plan
    from ptpipe.plan.vocabulary import Vocabulary
    from ptpipe.store.store import Store

_result_stream: ContextVar[TextIO | None] = ContextVar("result_stream", default=None)

manifest_argument = click.argument("manifest", type=click.Path(path_type=Path))

set_option = click.option(
    "-s",
    "--set",
    "settings",
    multiple=True,
    metavar="STAGE.OPTION=VALUE",
    help="Override an option of the manifest (or `seed=N`); may be repeated.",
)


class FiniteFloatRange(click.FloatRange):
    """A number within bounds that is neither infinite nor NaN, which compares with no bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. `value`: what was written; `param`, `ctx`: of click, for errors."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class _Folder(click.Path):
    """A folder. An empty text, as of a variable that a script did not set, is none: it would be this one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail("the name of the folder is empty", param, ctx)
        return super().convert(value, param, ctx)


artifacts_option = click.option(
    "--artifacts",
    type=_Folder(path_type=Path, file_okay=False),
    default=Path("artifacts"),
    envvar="PTPIPE_ARTIFACTS",
    show_default=True,
    show_envvar=True,
    help="The folder of results and runs.",
)

plugin_option = click.option(
    "--plugin",
    "named",
    multiple=True,
    metavar="FILE|MODULE",
    help="Load this plugin too, as under `plugins:` in a manifest.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def existing_files(names: Sequence[str]) -> UsageError:
    """Return the error about files that a command would replace."""
    exist, which = ("exist", "them") if len(names) > 1 else ("exists", "it")
    return UsageError(f"{' and '.join(names)} {exist} (--force replaces {which})")


def read_vocabulary(named: Sequence[str]) -> Vocabulary:
    """Load the plugins, also those `named` on the command line. Raises ManifestError where one of these is broken."""
    from ptpipe.plan.vocabulary import load_vocabulary

    vocabulary = load_vocabulary(named, Path())
    if vocabulary.problems:
        raise ManifestError(vocabulary.problems)
    return vocabulary


def read_plan(manifest: Path, settings: Sequence[str]) -> Plan:
    """Return the plan of the file `manifest` with `settings` (`-s`). Raises ManifestError with every problem."""
    from ptpipe.api import bound_plan

    return bound_plan(manifest, read_settings(settings))


def read_settings(settings: Sequence[str]) -> dict[str, JSON]:
    """Return `settings`, the `-s` options (`stage.option=value`), by name. Raises ManifestError with every problem."""
    from ptpipe.manifest.manifest import parse_override

    values: dict[str, JSON] = {}
    problems: list[Problem] = []
    for text in settings:
        try:
            name, value = parse_override(text)
            values[name] = value
        except ManifestError as error:
            problems += error.problems
    if problems:
        raise ManifestError(problems)
    return values


def open_store(artifacts: Path) -> Store:
    """Return the store in the folder `artifacts`; nothing is written."""
    from ptpipe.store.store import Store

    return Store(artifacts)


def past_plan(store: Store, wanted: str) -> Plan:
    """Return the plan of a past run: its manifest with its overrides, bound to its plugins, which are loaded.

    `wanted`: the run's id, the unambiguous start or end of one, or `last`. Raises UsageError where there is no such
    run, ManifestError where the manifest or its plugins have changed so that it is wrong now.
    """
    from ptpipe.provenance.reproduce import past_run

    return past_run(store, wanted).plan()


def describe_end(record: Mapping[str, Any]) -> str:
    """Return how the run of `record` ended, in one word or two."""
    if not record["finished"]:
        return "unfinished"
    words = {0: "done", 1: "failed", 3: "refused", 4: "undecided", 5: "corrupt"}
    words |= {129: "hung up", 130: "interrupted", 143: "terminated"}
    return words.get(record["exit_code"], f"exit {record['exit_code']}")


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Send to stderr what is printed inside the `with` other than by functions of this module: what plugins print."""
    token = _result_stream.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _result_stream.reset(token)


def result_stream() -> TextIO:
    """Return the stream of results: stdout, also inside `stdout_for_results`."""
    return _result_stream.get() or sys.stdout


def print_json(value: object) -> None:
    """Print `value` to stdout as one JSON document."""
    click.echo(strict_json(value), result_stream())


def echo(text: str = "", err: bool = False) -> None:
    """Print lines of `text` to stdout, with `err` to stderr: terminal codes and other invisible text are escaped."""
    for line in text.split("\n"):
        click.echo(one_line(line), sys.stderr if err else result_stream())


def echo_warnings(warnings: Sequence[Problem]) -> None:
    """Print warnings to stderr, a line each."""
    for warning in first_problems(warnings):
        echo(str(warning), err=True)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print `rows` under `headings` to stdout: folded to a terminal's width, whole in a pipe; escaped as by `echo`."""
    headings, *rows = [[one_line(cell) for cell in row] for row in (headings, *rows)]
    if not result_stream().isatty():
        widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
        for row in (headings, *rows):
            click.echo(
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), result_stream()
            )
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console(file=result_stream(), highlight=False, markup=False).print(table)


def print_entries(title: str, entries: Mapping[str, str]) -> None:
    """Print texts by name under `title` to stdout: folded to a terminal's width, whole in a pipe; escaped as by `echo`.

    Unlike in a table, where rich cuts words that are wider than their column, every word stays whole.
    """
    if not entries:
        return
    import shutil
    import textwrap

    echo(f"\n{title}")
    indent = max(map(len, entries)) + 2
    for name, text in entries.items():
        lines = [text := one_line(text)]
        if result_stream().isatty():
            width = max(shutil.get_terminal_size().columns - indent, 20)
            lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        for lead, line in zip([name] + [""] * len(lines), lines, strict=False):
            echo(f"{lead.ljust(indent)}{line}")
    echo()


def counted(number: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{number} {noun}{'s' * (number != 1)}"
