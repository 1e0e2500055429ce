"""The files of texts. Imports neither numpy nor pyarrow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, StageError
from ptpipe_data import table_paths
from ptpipe_data.paths import split_folders, written_names
from ptpipe_torch.files import file_digest
from ptpipe_torch.paths import find_path

if TYPE_CHECKING:
    from ptpipe_data.table_config import TextConfig

LINES = ".txt"


def find_source(path: str) -> Path:
    """Return the file or folder as an absolute path. Raises StageError where it is missing or of another kind."""
    source = find_path(path)
    if source.is_dir() or (source.is_file() and source.suffix.lower() == LINES):
        return source
    try:
        return table_paths.find_file(path)
    except StageError as error:
        raise StageError(
            f"{source}: texts are in .csv, .tsv, .jsonl, .json, .parquet or .txt files, or in folders"
        ) from error


def find_tokenizer(path: str) -> Path:
    """Return the file as an absolute path. Raises StageError where it is missing."""
    file = find_path(path)
    if not file.is_file():
        raise StageError(f"{file} is not a file: the tokenizer is a tokenizer.json")
    return file


def class_folders(root: Path) -> list[Path]:
    """Return the folders of a folder, sorted by name, without hidden ones."""
    return _checked(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def text_files(folder: Path) -> list[Path]:
    """Return the .txt files of a folder, sorted by name."""
    return _checked(entry for entry in folder.iterdir() if entry.suffix.lower() == LINES and entry.is_file())


def _checked(entries: Iterable[Path]) -> list[Path]:
    """Return them, sorted. Raises StageError for a name that is not UTF-8, which no id or class could have."""
    found = sorted(entries)
    for entry in found:
        try:
            entry.name.encode()
        except UnicodeEncodeError as error:
            raise StageError(f"{str(entry)!r} has a name that is not UTF-8: rename it") from error
    return found


def fingerprint(config: TextConfig) -> JSON:
    """Return the digest of every file by its path as it is written."""
    files = {config.tokenizer: find_tokenizer(config.tokenizer)} if config.tokenizer else {}
    for path in config.paths.values():
        source = find_source(path)
        files |= written_names(path, source, _files_of(source) if source.is_dir() else [source])
    return {name: file_digest(file) for name, file in files.items()}


def _files_of(root: Path) -> list[Path]:
    folders = [folder for split in split_folders(root).values() for folder in class_folders(root / split)]
    return [file for folder in folders for file in text_files(folder)]
