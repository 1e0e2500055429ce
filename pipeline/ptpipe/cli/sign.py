"""`ptpipe sign`: sign statements of deliverables."""

from __future__ import annotations

from pathlib import Path

import click

from ptpipe.cli.common import artifacts_option, echo, json_option, open_store, print_json
from ptpipe.errors import IntegrityError, UsageError


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), required=True, help="Your private Ed25519 key (PEM).")
@artifacts_option
@json_option
def sign(file: Path, key: Path, artifacts: Path, as_json: bool) -> None:
    """Sign the statement of a deliverable, after verifying both; needs the extra `signing`.

    Writes a DSSE envelope beside FILE (FILE.dsse.json), which `ptpipe verify FILE --key` checks. Make a key pair with
    `openssl genpkey -algorithm ed25519 -out key.pem` and `openssl pkey -in key.pem -pubout -out key.pub`.
    """
    from ptpipe.provenance.envelope import deliverable_of, sign_statement
    from ptpipe.provenance.verify import Verification

    file = deliverable_of(file)
    if not file.is_file():
        raise UsageError(f"there is no file {file}; `ptpipe get` copies a deliverable out of a run")
    file = file.resolve()
    verification = Verification(open_store(artifacts))
    verification.verify_file(file)
    if verification.faults:
        fault = verification.faults[0]
        raise IntegrityError(f"{fault.subject} is {fault.state}: {fault.detail}; it is not signed")
    try:
        written = sign_statement(file, key)
    except OSError as error:
        raise UsageError(f"cannot write beside {file}: {error.strerror or error}") from error
    if as_json:
        print_json({"envelope": str(written)})
    else:
        echo(f"wrote {written}")
