"""`ptpipe verify`: compare what is stored with its digests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import (
    artifacts_option,
    counted,
    echo,
    json_option,
    open_store,
    print_json,
    print_table,
)
from ptpipe.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ptpipe.provenance.verify import Verification

_NOUNS = ("run", "result", "object", "deliverable", "signature", "unverified_signature", "byte")


@click.command()
@click.argument("target", required=False, metavar="[RUN|FILE]")
@click.option(
    "--key", type=click.Path(path_type=Path), help="The public key that every deliverable must be signed with (PEM)."
)
@artifacts_option
@json_option
def verify(target: str | None, key: Path | None, artifacts: Path, as_json: bool) -> int:
    """Compare stored bytes with their digests, and say what is altered or missing. Writes nothing.

    Without an argument: every result, object and run of the artifacts folder. RUN is a run's id, the unambiguous start
    or end of one, or `last`: its record, manifest, results and deliverables. FILE is a deliverable anywhere with its
    statement beside it (FILE.intoto.json): its bytes, the statement's chain of digests, its signature with --key, and
    what the artifacts folder has of the stages that led to it.

    The exit code is 5 if something is altered, missing or can't be read.
    """
    from ptpipe.provenance.verify import Verification

    verification = Verification(open_store(artifacts), key)
    if target is not None and _is_deliverable(Path(target)):
        verification.verify_file(Path(target))
    elif not (verification.store.root / "objects").is_dir():
        raise UsageError(f"there is no artifacts folder at {verification.store.root}")
    elif target is None:
        verification.verify_store()
    else:
        verification.verify_run(target)
    _show(verification, as_json)
    return int(ExitCode.INTEGRITY if verification.faults else ExitCode.DONE)


def _is_deliverable(path: Path) -> bool:
    """Return whether a path is a file, or was one that has a statement."""
    from ptpipe.execution.statement import statement_path
    from ptpipe.plan.module_files import is_file

    return is_file(path) or is_file(statement_path(path))


def _show(verification: Verification, as_json: bool) -> None:
    faults, checked = verification.faults, verification.checked
    if as_json:
        print_json(
            {"checked": {f"{noun}s": checked[noun] for noun in _NOUNS}, "faults": [asdict(fault) for fault in faults]}
        )
        return
    if faults:
        rows = [(fault.state, fault.subject, fault.detail) for fault in faults]
        print_table(("state", "what", "detail"), rows)
    size = f"{checked['byte'] / 1e6:.1f} MB"
    counts = [counted(checked[noun], noun.replace("_", " ")) for noun in _NOUNS[:-1] if checked[noun]]
    found = counted(len(faults), "fault") if faults else "no fault"
    echo(f"verified {', '.join(counts) or 'nothing'}, {size} in all: {found}")
