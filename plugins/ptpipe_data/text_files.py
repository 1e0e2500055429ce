"""Texts in files of columns, in files of lines, and in folders of files, all read as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from ptpipe import StageError
from ptpipe_data.paths import split_folders
from ptpipe_data.table_file import TableFile, read_table
from ptpipe_data.table_paths import refuse_utf16
from ptpipe_data.text_paths import LINES, class_folders, find_source, text_files

if TYPE_CHECKING:
    from ptpipe_data.table_config import TextConfig

LABEL = "label"
"""The column of classes that are folders."""


def read_texts(config: TextConfig) -> dict[str, TableFile]:
    """Return the table of train, and those of val and test where they have their own.

    Raises StageError where a file can't be read, or a folder isn't laid out as one.
    """
    source = find_source(config.path)
    if config.column_names and (source.is_dir() or source.suffix.lower() == LINES):
        raise StageError(f"column_names names the columns of .csv and .tsv files; {source} has none")
    if source.is_dir():
        return _read_folders(source, config)
    schema = None if config.task == "token_classification" else pa.schema([(config.text, pa.string())])
    tables: dict[str, TableFile] = {}
    for name, path in config.paths.items():
        file = find_source(path)
        if file.is_dir():
            raise StageError(f"{file} is a folder, and {source} is a file: both must be one or the other")
        if file.suffix.lower() == LINES:
            tables[name] = _read_lines(file, config)
        else:
            tables[name] = read_table(path, config, tables["train"].content.schema if tables else schema)
    return tables


def target_names(config: TextConfig) -> tuple[str, ...]:
    """Return the columns to predict."""
    return config.targets or ((LABEL,) if config.task == "classification" else ())


def _read_lines(file: Path, config: TextConfig) -> TableFile:
    if config.task != "language_modeling":
        raise StageError(f"{file}: a file of lines has no targets; the task {config.task} needs some")
    lines = [(number, line) for number, line in enumerate(_text_of(file).split("\n"), start=1) if line.strip()]
    if not lines:
        raise StageError(f"{file} has no text")
    return TableFile(file, pa.table({config.text: [line for _, line in lines]}), [str(number) for number, _ in lines])


def _read_folders(root: Path, config: TextConfig) -> dict[str, TableFile]:
    if config.val_path or config.test_path:
        raise StageError(f"val_path and test_path go with files; {root} is a folder, with val and test beside train")
    if config.targets or config.task != "classification":
        raise StageError(f"{root}: the classes of texts in folders are the folders; the task is classification")
    return {name: _read_folder(root / folder, config) for name, folder in split_folders(root).items()}


def _read_folder(folder: Path, config: TextConfig) -> TableFile:
    texts, labels, names = [], [], []
    for class_folder in class_folders(folder):
        files = text_files(class_folder)
        if not files:
            raise StageError(f"{class_folder} has no .txt files")
        for file in files:
            texts.append(_text_of(file))
            labels.append(class_folder.name)
            names.append(f"{class_folder.name}/{file.name}")
    if not texts:
        raise StageError(f"{folder} has no folders of .txt files: a folder per class")
    return TableFile(folder, pa.table({config.text: texts, LABEL: labels}), names)


def _text_of(file: Path) -> str:
    try:
        refuse_utf16(file)
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise StageError(f"{file} can't be read: it is not UTF-8 text, at byte {error.start}") from error
    except OSError as error:
        raise StageError(f"{file} can't be read: {error.strerror}") from error
