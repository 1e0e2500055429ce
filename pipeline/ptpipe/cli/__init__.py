"""The command line. Start-up imports only the parser; each command imports what it needs.

Plugins add commands with entry points of the group `ptpipe.commands`, which are read for `ptpipe --help` and for a
command that is not built in.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import os
import sys
import threading
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ptpipe import __version__
from ptpipe.cli.common import stdout_for_results
from ptpipe.errors import ExitCode, ManifestError, PtpipeError, Terminated, nearest
from ptpipe.execution.signals import SignalHandlers
from ptpipe.printable import one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from _typeshed import ReadableBuffer

# Command to the module that holds it, and its line of help: importing none of them, `ptpipe --help` stays fast.
_COMMANDS = {
    "run": ("run", "Run a manifest: execute what is new, take the rest from the store."),
    "validate": ("validate", "Check a manifest and print every problem at once."),
    "plan": ("plan", "Print what a run would do, stage by stage, and why."),
    "runs": ("runs", "List the runs in the artifacts folder."),
    "show": ("show", "Show one run: outcomes, metrics, notices, deliverables."),
    "get": ("get", "Copy a stage's deliverables (a model file) out of a run."),
    "verify": ("verify", "Compare stored results, a run or a deliverable with their digests."),
    "reproduce": ("reproduce", "Run again elsewhere what a run or a statement names, and compare."),
    "sign": ("sign", "Sign the statements of deliverables with a key of your own."),
    "stages": ("stages", "List the stage kinds, or every option of one."),
    "plugins": ("plugins", "List the loaded plugins, and the broken ones with the reason."),
    "schema": ("schema", "Print the JSON Schema of manifests, for editors, or of another file."),
    "gc": ("gc", "Delete runs and results that are no longer needed."),
    "doctor": ("doctor", "Check the installation and this machine; suggest fixes."),
    "init": ("init", "Write a starter manifest, or a starter plugin with its test."),
}
ENTRY_POINT_GROUP = "ptpipe.commands"
_DELIBERATE = (click.ClickException, click.Abort, click.exceptions.Exit, PtpipeError, OSError)
"""What a command ends with that is no mistake in its code."""


class _CommandError(Exception):
    """The command of another distribution has a mistake, which is the cause of this error."""


class _Commands(click.Group):
    """Imports a command when it is called."""

    def invoke(self, ctx: click.Context) -> int:
        try:
            return int(super().invoke(ctx) or ExitCode.DONE)
        except _DELIBERATE:
            raise
        except Exception as error:
            entry_point = _plugin_commands().get(ctx.invoked_subcommand or "")
            if entry_point is None or _owner(entry_point) == "ptpipe":
                raise
            raise _CommandError(f"command {entry_point.name!r} of {_owner(entry_point)} failed") from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *_plugin_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            entry_point = _plugin_commands().get(cmd_name)
            return _load(entry_point) if entry_point else None
        module = import_module(f"ptpipe.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = copy.copy(getattr(module, cmd_name))
        assert command.callback is not None, cmd_name
        command.callback = stdout_for_results()(command.callback)  # what plugins print is no result
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args or args[0].startswith("-") or args[0] in _COMMANDS:
            return super().resolve_command(ctx, args)
        name, found = args[0], _plugin_commands()
        if name not in found:
            suggestion = nearest(name, [*_COMMANDS, *found])
            hint = f" Did you mean {suggestion!r}?" if suggestion else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return name, _load(found[name]), args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, help_) for name, (_, help_) in _COMMANDS.items()]
        for name, entry_point in _plugin_commands().items():
            try:
                help_ = _help_in_source(entry_point) or _load(entry_point).get_short_help_str(limit=formatter.width)
                rows.append((one_line(name), one_line(help_)))
            except PtpipeError as error:
                click.echo(one_line(f"ptpipe: {error}"), err=True)
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _plugin_commands() -> dict[str, EntryPoint]:
    """The commands of installed plugins by name; a name that is taken already is reported and ignored."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry_point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: (each.name, _owner(each))):
        name = entry_point.name
        if name not in _COMMANDS and name not in found:
            found[name] = entry_point
            continue
        owner = "ptpipe itself" if name in _COMMANDS else _owner(found[name])
        ignored = f"ptpipe: command {name!r} of {_owner(entry_point)} is ignored: {owner} has one"
        click.echo(one_line(ignored), err=True)
    return found


def _owner(entry_point: EntryPoint) -> str:
    """The distribution that declares an entry point."""
    return entry_point.dist.name if entry_point.dist else "an unknown distribution"


def _help_in_source(entry_point: EntryPoint) -> str:
    """Return the first line of a command's docstring, without importing anything; empty where there is none to read."""
    import ast
    from pathlib import Path

    from ptpipe.plan.module_files import ModuleFinder

    found = ModuleFinder().find(entry_point.module)
    try:
        tree = ast.parse(Path(found.file).read_bytes()) if found and found.file.endswith(".py") else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):
        return ""
    docstrings = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return (docstrings.get(entry_point.attr) or "").partition("\n")[0]


def _load(entry_point: EntryPoint) -> click.Command:
    """Import a plugin's command. Raises PtpipeError with one line if that fails."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            command = entry_point.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry_point.value} is no click.Command")
    except (Exception, SystemExit) as error:  # a plugin's module may raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        broken = PtpipeError(f"command {entry_point.name!r} of {_owner(entry_point)} failed to load: {reason}")
        broken.exit_code = ExitCode.PLUGIN
        raise broken from error
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ptpipe")
def cli() -> None:
    """One manifest takes a PyTorch model from training to a small, fast artifact that can be trusted.

    Exit codes: 0 done, 1 a stage failed, 2 manifest or command line wrong, 3 a gate refused, 4 a gate could not
    decide, 5 a stored artifact is corrupt, 6 a plugin is missing or broken, 129/130/143 interrupted.
    """


def main() -> NoReturn:
    """Run the command line and exit with its code; a traceback is shown only for a bug in ptpipe."""
    _open_closed_streams()
    _outlive_readers()
    show_warnings_once()
    handlers = SignalHandlers()
    handlers.install()
    try:
        code = _exit_code()
        code = handlers.exit_code or code  # whatever became of the exception, it was a signal that ended this
    finally:
        handlers.ignore()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk: results are lost, and the write that failed first was reported
            code = code or ExitCode.FAILED
    _leave(code)


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, as by `>&-`: files would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


class _Output(io.FileIO):
    """A standard stream that is written to without an error where its reader has gone (`| head`)."""

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(memoryview(content).cast("B"))


def _outlive_readers() -> None:
    """Let a command end as if its output were read: the exit code says more than that, such as what a gate decided."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            output = _Output(stream.fileno(), "w", closefd=False)
            outliving = io.TextIOWrapper(
                # With PYTHONUNBUFFERED, as in containers, a buffer would keep what is written through to it.
                output if stream.write_through else io.BufferedWriter(output),
                stream.encoding,
                errors="backslashreplace",  # of stdout, as of stderr: a terminal may be ASCII
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, outliving)


def show_warnings_once() -> None:
    """Show each warning of a line once, unless Python's options say which to show (`-W`, `PYTHONWARNINGS`).

    Python's own memory of what it has shown ends whenever a library saves its filters (`catch_warnings`).
    """
    if sys.warnoptions:
        return
    show, shown = warnings.showwarning, set[tuple[Any, ...]]()

    def show_once(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        warning = str(message), category, filename, lineno
        if warning not in shown:
            shown.add(warning)
            show(message, category, filename, lineno, *more)

    warnings.showwarning = show_once  # type: ignore[assignment]  # called with positions alone


def _leave(code: int) -> NoReturn:
    """Exit without tearing down every library, which takes over a second with torch."""
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does first: ends thread pools, joins threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _exit_code() -> int:
    try:
        return int(cli.main(prog_name="ptpipe", standalone_mode=False))
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        _tell("\n".join(map(one_line, shown.getvalue().splitlines())))
        return ExitCode.USAGE
    except ManifestError as error:
        for problem in error.problems:
            _tell(str(problem))
        return error.exit_code
    except PtpipeError as error:
        _tell(one_line(f"ptpipe: {error}"))
        return error.exit_code
    except OSError as error:  # what a disk, a network or another user's file did is no bug
        _tell(f"ptpipe: {error}")
        return ExitCode.FAILED
    except (KeyboardInterrupt, click.Abort):
        _tell("interrupted")
        return ExitCode.INTERRUPTED
    except Terminated as error:
        return error.exit_code
    except _CommandError as error:
        assert error.__cause__, error
        _tell_traceback(error.__cause__)
        _tell(one_line(f"ptpipe: {error}; please report the lines above to its authors"))
        return ExitCode.PLUGIN
    except Exception as error:  # noqa: BLE001  # the last line of defence
        _tell_traceback(error)
        _tell(f"ptpipe {__version__}: this is a bug in ptpipe; please report the lines above")
        return ExitCode.BUG


def _tell_traceback(error: BaseException) -> None:
    import traceback

    for line in "".join(traceback.format_exception(error)).splitlines():
        _tell(one_line(line))


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the exit code tells
        print(text, file=sys.stderr)  # noqa: T201  # the command line's own output
