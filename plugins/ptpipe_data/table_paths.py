"""The files of tables. Imports neither numpy nor pyarrow."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, StageError
from ptpipe_torch.files import file_digest
from ptpipe_torch.paths import find_path

if TYPE_CHECKING:
    from ptpipe_data.table_config import TableFileConfig

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".json")


def find_file(path: str) -> Path:
    """Return the file as an absolute path. Raises StageError where it is missing or of another kind."""
    file = find_path(path)
    if not file.is_file():
        raise StageError(f"{file} is not a file")
    if file.suffix.lower() not in (*DELIMITERS, *JSON_SUFFIXES, ".parquet"):
        raise StageError(f"{file}: tables are .csv, .tsv, .jsonl, .json or .parquet files")
    return file


def refuse_utf16(file: Path) -> None:
    """Raise StageError for a text file with two bytes a character, as some programs for Windows write."""
    with file.open("rb") as stream:
        head = stream.read(2)
    if head in (BOM_UTF16_LE, BOM_UTF16_BE) or 0 in head:
        raise StageError(f"{file} can't be read: it is UTF-16 text; save it as UTF-8")


def fingerprint(config: TableFileConfig) -> JSON:
    """Return the digest of every file by its path as it is written."""
    return {path: file_digest(find_file(path)) for path in config.paths.values()}
