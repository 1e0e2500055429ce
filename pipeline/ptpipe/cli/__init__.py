"""The command line. Only the parser is imported at start-up; each verb brings what it needs."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NoReturn

import click

from ptpipe import __version__
from ptpipe.errors import ExitCode, ManifestError, PtpipeError, Terminated, nearest
from ptpipe.execution.signals import terminate

# Verb to the module that holds it, and its line of help: importing none of them, `ptpipe --help` stays fast.
_VERBS = {
    "run": ("run", "Run a manifest: do what is new, take the rest from the store."),
    "validate": ("validate", "Check a manifest and print every problem at once."),
    "plan": ("plan", "Print what a run would do, stage by stage, and why."),
    "runs": ("runs", "List the runs in the artifacts folder."),
    "show": ("show", "Show one run: outcomes, metrics, notices, deliverables."),
    "get": ("get", "Copy a stage's deliverables (a model file) out of a run."),
    "stages": ("stages", "List the stage kinds, or every option of one."),
    "plugins": ("plugins", "List the loaded plugins, and the broken ones with the reason."),
    "schema": ("schema", "Print the manifest's JSON Schema, for editors."),
    "gc": ("gc", "Delete runs and results that are no longer needed."),
    "scaling": ("scaling", "Measure how a training scales with its workers; predict it to 256."),
    "doctor": ("doctor", "Check the installation and this machine; suggest fixes."),
    "init": ("init", "Write a starter manifest, or a starter plugin with its test."),
}


class _Verbs(click.Group):
    """Imports a verb when it is called."""

    def make_context(self, *args: Any, **keywords: Any) -> click.Context:
        with _reader_may_leave():
            return super().make_context(*args, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = import_module(f"ptpipe.cli.{_VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            suggestion = nearest(args[0], _VERBS)
            hint = f" Did you mean {suggestion!r}?" if suggestion else ""
            raise click.UsageError(f"There is no verb {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, help_) for verb, (_, help_) in _VERBS.items()])


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """End well when whoever read our output has gone (`| head`)."""
    try:
        yield
    except BrokenPipeError as error:
        _let_go_of_stdout()
        raise click.exceptions.Exit(ExitCode.DONE) from error


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ptpipe")
def cli() -> None:
    """One manifest takes a PyTorch model from training to a small, fast artifact that can be trusted.

    Exit codes: 0 done, 1 a stage failed, 2 manifest or command line wrong, 3 a gate refused, 4 a gate could not
    decide, 5 a stored artifact is corrupt, 6 a plugin is missing or broken, 130/143 interrupted.
    """


def main() -> NoReturn:
    """Run the command line and exit with its code. No traceback but for a bug of ours."""
    signal.signal(signal.SIGTERM, terminate)
    code = _exit_code()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _let_go_of_stdout()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit at once, but in good order. Python would take every library apart first: with torch, over a second."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _exit_code() -> int:
    try:
        return int(cli.main(prog_name="ptpipe", standalone_mode=False) or ExitCode.DONE)
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except ManifestError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)  # noqa: T201  # this is where the command line talks
        return error.exit_code
    except PtpipeError as error:
        print(f"ptpipe: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)  # noqa: T201
        return ExitCode.INTERRUPTED
    except Terminated:
        return ExitCode.TERMINATED
    except Exception:  # noqa: BLE001  # the last line of defence
        import traceback

        traceback.print_exc()
        print(f"ptpipe {__version__}: this is a bug of ours; please report the lines above", file=sys.stderr)  # noqa: T201
        return ExitCode.BUG


def _let_go_of_stdout() -> None:
    # Whoever read it has gone; Python must not complain about that while it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
