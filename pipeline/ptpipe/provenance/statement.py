"""A statement read back: its members by name, and whether its digests fit together."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ptpipe.errors import IntegrityError
from ptpipe.execution.statement import BUILD_TYPE, PREDICATE_TYPE, STATEMENT_TYPE
from ptpipe.manifest.yaml import MAX_BYTES
from ptpipe.plan.keys import Key
from ptpipe.store.documents import read_document
from ptpipe.store.store import StoredObject

_MAX_BYTES = 64_000_000
_NON_FINITE = re.compile(r'"(-?Infinity|NaN)"')

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class File(BaseModel):
    """A file of an object."""

    size_bytes: int
    sha256: Digest


class Output(BaseModel):
    """A stage's output: the object in the store, with its files where the deliverable is one of them."""

    type: str
    digest: Digest
    files: dict[str, File] | None = None


class StageResult(BaseModel):
    """What a stage read and made."""

    id: str
    inputs: dict[str, list[Digest]]
    outputs: dict[str, Output]
    metrics: dict[str, Any]
    made_at: str
    environment: dict[str, Any]
    dependencies: dict[str, Digest] = Field(default_factory=dict)
    """Modules that were imported by computed names, with the digests of their source."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files that the stage found out about and read, with their digests."""


class StageDefinition(BaseModel):
    """Everything that decides a stage's result."""

    id: str
    kind: str
    key: Digest
    parts: dict[str, Any]


class ManifestText(BaseModel):
    """The manifest as written."""

    name: str
    text: str = Field(max_length=MAX_BYTES)


class Statement(BaseModel):
    """Where a deliverable comes from."""

    sha256: Digest
    """Of the deliverable."""
    manifest: ManifestText
    overrides: dict[str, Any]
    stage: str
    output: str
    file: str
    """Its name among the output's files."""
    run_id: str
    definitions: list[StageDefinition]
    """Of the stages that led to the deliverable, in run order."""
    results: list[StageResult]
    """Of the same stages."""

    @classmethod
    def read(cls, path: Path) -> Statement:
        """Read a statement. Raises IntegrityError where it was altered or is none, OSError where it can't be read."""
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise IntegrityError(f"{path} is no file of at most {_MAX_BYTES // 10**6} MB")
        try:
            statement = cls.model_validate(_members(read_document(path)), strict=True)
        except (ValidationError, ValueError, LookupError, TypeError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise IntegrityError(f"{path} is no statement of ptpipe: {reason}") from error
        if problem := next(statement.contradictions(), None):
            raise IntegrityError(f"{path} contradicts itself: {problem}")
        return statement

    def contradictions(self) -> Iterator[str]:
        """Yield what does not fit together: file, object, inputs, keys. Each is the hash of what it depends on."""
        results = {result.id: result for result in self.results}
        definitions = {definition.id: definition for definition in self.definitions}
        if list(results) != list(definitions) or self.stage not in results:
            yield "it has not one result for each stage"
            return
        output = results[self.stage].outputs.get(self.output)
        file = ((output and output.files) or {}).get(self.file)
        if output is None or file is None or file.sha256 != self.sha256:
            yield f"its subject is no file of {self.stage!r}"
        elif not StoredObject(output.digest, output.type, 0).has_files(
            {name: dict(each) for name, each in (output.files or {}).items()}
        ):
            yield f"the files of {self.stage!r} are not those of its output"
        made: set[tuple[str, str]] = set()
        for definition in self.definitions:
            result = results[definition.id]
            yield from _link_problems(definition, result, made)
            made |= {(f"{definition.key}/{name}", output.digest) for name, output in result.outputs.items()}


def is_key_of(key: str, parts: Mapping[str, Any]) -> bool:
    """Return whether a key is the hash of these parts, as they were read back from strict JSON."""
    # There, infinity is a string.
    return key in (Key.of(parts).digest, Key.of(json.loads(_NON_FINITE.sub(r"\1", json.dumps(parts)))).digest)


def _link_problems(
    definition: StageDefinition, result: StageResult, made: Collection[tuple[str, str]]
) -> Iterator[str]:
    """Yield where a stage's key is not that of its parts, or its inputs are not what the stages above made."""
    if not is_key_of(definition.key, definition.parts):
        yield f"the key of {definition.id!r} is not that of its parts"
    for port, references in definition.parts["inputs"].items():
        digests = result.inputs.get(port, [])
        if len(digests) != len(references):
            yield f"{definition.id!r} has {len(digests)} inputs {port!r}, not {len(references)}"
        for reference, digest in zip(references, digests, strict=False):
            if (reference.rpartition("=")[2], digest) not in made:
                yield f"{definition.id!r} read {digest[:12]}, which no stage above made"


def _members(content: dict[str, Any]) -> dict[str, Any]:
    types = (content["_type"], content["predicateType"])
    definition = content["predicate"]["buildDefinition"]
    if (*types, definition["buildType"]) != (STATEMENT_TYPE, PREDICATE_TYPE, BUILD_TYPE):
        raise ValueError("it is of another type")
    (subject,) = content["subject"]
    metadata = content["predicate"]["runDetails"]["metadata"]
    return {
        **definition["externalParameters"],
        "sha256": subject["digest"]["sha256"],
        "file": subject["name"],
        "run_id": metadata["invocationId"],
        "definitions": definition["internalParameters"]["stages"],
        "results": metadata["ptpipe_results"],
    }
