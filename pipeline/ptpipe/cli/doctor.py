"""`ptpipe doctor`: check the installation and this machine, and suggest fixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import artifacts_option, counted, echo, json_option, plugin_option, print_json, print_table
from ptpipe.errors import ExitCode

if TYPE_CHECKING:
    from ptpipe.check import Check


@click.command()
@click.option(
    "--workers",
    type=click.IntRange(min=2, max=64),
    metavar="N",
    help="Also start N processes, and test that they can communicate as those of a parallel training do.",
)
@plugin_option
@artifacts_option
@json_option
def doctor(workers: int | None, named: tuple[str, ...], artifacts: Path, as_json: bool) -> int:
    """Check versions, plugins, int8 engines, devices and process groups, and suggest fixes.

    Exit code 0, or 1 if a check failed. Warnings do not change the exit code.
    """
    from ptpipe.check import CheckState
    from ptpipe.doctor import diagnose
    from ptpipe.plan.vocabulary import load_vocabulary

    checks = diagnose(load_vocabulary(named, Path()), artifacts, workers or 0)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    counts = Counter(check.state for check in checks)
    return int(ExitCode.FAILED if counts[CheckState.FAIL] else ExitCode.DONE)


def _print(checks: Sequence[Check]) -> None:
    rows = []
    for check in checks:
        rows.append((str(check.state), check.subject, check.detail))
        if check.remedy:
            rows.append(("", "", f"  -> {check.remedy}"))
    print_table(("", "check", "result"), rows)
    counts = Counter(str(check.state) for check in checks)
    echo(f"\n{counts['ok']} ok, {counted(counts['warn'], 'warning')}, {counts['fail']} failed")
