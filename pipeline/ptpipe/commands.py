"""What a plugin's own command uses: the arguments, options and output of the built-in ones.

A distribution adds a command with an entry point of the group `ptpipe.commands`, whose value is a `click.Command`:

    [project.entry-points."ptpipe.commands"]
    prune-report = "my_plugin.command:prune_report"

The command returns its exit code (None: 0). It prints results to stdout and everything else to stderr, with `echo` and
`print_table`, which escape what others' text may do to a terminal; it raises `ptpipe.UsageError` for a mistake on the
command line. `ptpipe --help` shows the first line of the function's docstring, and imports nothing for it. A command
that loads plugins has `@stdout_for_results()` above its function, so that what these print cannot spoil its results;
what it prints there by other means than the functions of this module goes to stderr, or to `result_stream()`.

`find_run` gives the record of a past run (`list_runs` and `read_record` those of all), `primary_metrics`, `verdicts`
and `options` what is in it, and `past_plan` its manifest, bound to its plugins again. A table whose columns have names
is a list of `Row`: `table_options` adds `--sort` and the formats to a command, `sorted_rows` and `print_rows` obey.
"""

from ptpipe.cli.common import (
    FiniteFloatRange,
    artifacts_option,
    describe_end,
    echo,
    json_option,
    manifest_argument,
    open_store,
    past_plan,
    print_json,
    print_table,
    read_plan,
    read_settings,
    result_stream,
    set_option,
    stdout_for_results,
)
from ptpipe.cli.record_facts import comparisons, options, primary_metrics, verdicts, written_options
from ptpipe.cli.rows import Cell, Row, print_rows, sorted_rows, table_options
from ptpipe.store.runs import find_run, list_runs, read_record

__all__ = [
    "Cell",
    "FiniteFloatRange",
    "Row",
    "artifacts_option",
    "comparisons",
    "describe_end",
    "echo",
    "find_run",
    "json_option",
    "list_runs",
    "manifest_argument",
    "open_store",
    "options",
    "past_plan",
    "primary_metrics",
    "print_json",
    "print_rows",
    "print_table",
    "read_plan",
    "read_record",
    "read_settings",
    "result_stream",
    "set_option",
    "sorted_rows",
    "stdout_for_results",
    "table_options",
    "verdicts",
    "written_options",
]
