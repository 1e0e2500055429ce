"""What a plugin's own command uses: the arguments, options and output of the built-in ones.

A distribution adds a command with an entry point of the group `ptpipe.commands`, whose value is a `click.Command`:

    [project.entry-points."ptpipe.commands"]
    prune-report = "my_plugin.command:prune_report"

The command returns its exit code (None: 0). It prints results to stdout and everything else to stderr, with `echo` and
`print_table`, which escape what others' text may do to a terminal; it raises `ptpipe.UsageError` for a mistake on the
command line. `find_run` gives the record of a past run. `ptpipe --help` shows the first line of the function's
docstring, and imports nothing for it.
"""

from ptpipe.cli.common import (
    artifacts_option,
    echo,
    json_option,
    manifest_argument,
    open_store,
    print_json,
    print_table,
    read_plan,
    read_settings,
    set_option,
)
from ptpipe.store.runs import find_run

__all__ = [
    "artifacts_option",
    "echo",
    "find_run",
    "json_option",
    "manifest_argument",
    "open_store",
    "print_json",
    "print_table",
    "read_plan",
    "read_settings",
    "set_option",
]
