"""`ptpipe doctor`: is this installation sound, and what to do where it isn't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.options import artifacts_option, json_option, print_json, print_table
from ptpipe.cli.words import plugin_option
from ptpipe.errors import ExitCode

if TYPE_CHECKING:
    from ptpipe.finding import Finding


@click.command()
@click.option(
    "--workers",
    type=click.IntRange(min=2, max=64),
    metavar="N",
    help="Start N processes too, and let them work together as those of a parallel training do.",
)
@plugin_option
@artifacts_option
@json_option
def doctor(workers: int | None, named: tuple[str, ...], artifacts: Path, as_json: bool) -> int:
    """Check versions, plugins, int8 engines, devices and comm, and say what to do about what doesn't work.

    Exit code 0 where nothing lacks, else 1. A note is no fault.
    """
    from ptpipe.diagnosis import diagnose
    from ptpipe.finding import FindingState
    from ptpipe.plugins import load_vocabulary

    findings = diagnose(load_vocabulary(named, Path()), artifacts, workers or 0)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    counts = Counter(finding.state for finding in findings)
    return int(ExitCode.FAILED if counts[FindingState.LACK] else ExitCode.DONE)


def _print(findings: Sequence[Finding]) -> None:
    rows = []
    for finding in findings:
        rows.append((str(finding.state), finding.subject, finding.detail))
        if finding.remedy:
            rows.append(("", "", f"  -> {finding.remedy}"))
    print_table(("", "what", "found"), rows)
    counts = Counter(str(finding.state) for finding in findings)
    click.echo(f"\n{counts['ok']} ok, {counts['note']} to note, {counts['lack']} lacking")
