"""`ptpipe get`: copy a stage's deliverables out of a run."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

import click

from ptpipe.cli.common import artifacts_option, echo, existing_files, json_option, open_store, print_json
from ptpipe.errors import IntegrityError, Problem, UsageError, nearest
from ptpipe.store.files import GONE, errors_naming


@click.command()
@click.argument("run")
@click.argument("stage")
@click.argument("dest", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Replace existing files; signatures of what they replace are deleted.")
@artifacts_option
@json_option
def get(run: str, stage: str, dest: Path, force: bool, artifacts: Path, as_json: bool) -> None:
    """Copy the deliverables of a run's stage (a model file) to DEST, verified against the digests in the store.

    RUN is a run's id, the unambiguous start or end of one, or `last`. DEST is a folder, by default the current one; it
    is created if missing. `ptpipe show RUN` lists the deliverables. The statement of where each comes from, and its
    signatures, are copied with it: `ptpipe verify FILE` checks it later, anywhere.
    """
    from ptpipe.provenance.envelope import envelope_path
    from ptpipe.store.runs import find_run

    store = open_store(artifacts)
    record, folder = find_run(store, run)
    facts = _stage_facts(record, stage)
    listings = (store.listing(output["digest"]) for output in facts["outputs"].values())
    stored = {file["sha256"] for listing in listings for file in listing.values()}
    targets = {folder / name: dest / PurePosixPath(name).relative_to(stage) for name in facts["deliverables"]}
    files = {source: target for pair in targets.items() for source, target in _with_provenance(*pair).items()}
    places = dict.fromkeys([*files.values(), *map(envelope_path, targets.values())])
    if not force and (existing := [str(path) for path in places if path.exists()]):
        raise existing_files(existing)
    for source in targets:
        _verify(source, stored, stage)
    for source, target in files.items():
        _copy(source, target)
    removed = [envelope for target in targets.values() if (envelope := _without_stale_envelope(target))]
    if as_json:
        print_json([str(target) for target in targets.values()])
    else:
        echo("\n".join(f"wrote {target}" for target in files.values()))
    for path in removed:
        echo(f"removed {path}: it signed another file", err=as_json)  # the JSON lists files to use, for programs


def _with_provenance(source: Path, target: Path) -> dict[Path, Path]:
    """Return what is copied of a deliverable, and where to: the file, its statement, its signatures if it is signed."""
    from ptpipe.execution.statement import statement_path
    from ptpipe.provenance.envelope import envelope_path

    found = {source: target, statement_path(source): statement_path(target)}
    if envelope_path(source).exists():
        found[envelope_path(source)] = envelope_path(target)
    return found


def _without_stale_envelope(target: Path) -> Path | None:
    """Delete the signatures of the file that was replaced, with which the new one would count as altered."""
    from ptpipe.provenance.envelope import envelope_path, is_stale

    envelope = envelope_path(target)
    try:
        if not is_stale(target):
            return None
        envelope.unlink()
    except OSError as error:
        raise UsageError(f"cannot delete {envelope}: {error.strerror or error}") from error
    return envelope


def _copy(source: Path, target: Path) -> None:
    from ptpipe.execution.deliverables import copy_atomically

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_atomically(source, target)
    except OSError as error:
        if error.filename == str(source) and error.filename2 is None:
            raise  # it can't be read
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from error


_WITHOUT_RESULT = {
    "failed": ", which failed,",
    "interrupted": ", which was interrupted,",
    "skipped": ", which was skipped,",
}


def _stage_facts(record: dict[str, Any], stage_id: str) -> dict[str, Any]:
    """Return the record of a stage that has deliverables. Raises UsageError where it has none."""
    stages: dict[str, dict[str, Any]] = {stage["stage_id"]: stage for stage in record["stages"]}
    having = [name for name, stage in stages.items() if stage["deliverables"]]
    if stage_id not in stages:
        problem = Problem(f"run {record['run_id']} has no stage {stage_id!r}", suggestion=nearest(stage_id, stages))
        raise UsageError(str(problem))
    if stage_id not in having:
        stages_with = f"stages with deliverables: {', '.join(having)}" if having else "no stage of that run has any"
        ended = _WITHOUT_RESULT.get(stages[stage_id]["outcome"], "")
        raise UsageError(f"stage {stage_id} of run {record['run_id']}{ended} has no deliverables; {stages_with}")
    for name in stages[stage_id]["deliverables"]:
        if PurePosixPath(name).parts[:1] != (stage_id,) or ".." in PurePosixPath(name).parts:
            raise IntegrityError(f"the record of run {record['run_id']} was altered: {stage_id} has {name!r}")
    return stages[stage_id]


def _is_regular(path: Path) -> bool:
    """Return whether there is such a file. Raises OSError where that is unknown; `is_file` hides it in Python 3.14."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except GONE:
        return False


def _verify(file: Path, stored: Collection[str], stage_id: str) -> None:
    from ptpipe.execution.statement import statement_path
    from ptpipe.store.documents import read_document

    for each in (file, statement_path(file)):
        if not _is_regular(each):  # a pipe would block
            raise IntegrityError(f"{each} is missing or no file; `ptpipe run --fresh {stage_id}` rebuilds it")
    read_document(statement_path(file))
    with errors_naming(file), file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest not in stored:
        raise IntegrityError(f"{file} was altered; `ptpipe run --fresh {stage_id}` rebuilds it")
