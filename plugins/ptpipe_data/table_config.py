"""Options of data.table and data.text."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ptpipe_data.config import PathsConfig


class TableFileConfig(PathsConfig):
    """Options of data sets in files of named columns."""

    column_names: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        max_length=10_000,
        description="names of the columns, of .csv and .tsv files without a header",
    )
    quoting: bool = Field(
        True,
        description="in .csv and .tsv files, quotation marks enclose values; false: they are part of them",
    )

    group: str | None = Field(
        None,
        description="a column that is no input, such as the number of a patient: rows of the same value stay in one "
        "split. Splits are drawn in whole groups, of as nearly so many rows",
    )
    targets: tuple[str, ...]

    @property
    def name_columns(self) -> frozenset[str]:
        """The columns whose values are names, also where they look like numbers."""
        return frozenset((*(self.targets if self.task == "classification" else ()), *filter(None, [self.group])))

    @model_validator(mode="after")
    def _draws_groups(self) -> Self:
        if self.group is not None and self.group in self.targets:
            raise ValueError(f"group: {self.group!r} is among the targets")
        if self.group is not None and self.val_path and self.test_path:
            raise ValueError("group is for splits that are drawn: val_path and test_path name all of them")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for name in self.column_names or ():
            if (self.column_names or ()).count(name) > 1:
                raise ValueError(f"column_names has {name!r} twice")
        return self


class TableConfig(TableFileConfig):
    """Options of `data.table`."""

    path: str = Field(
        description="a .csv, .tsv, .jsonl (an object per line), .json (an array of objects, or as .jsonl) or .parquet "
        "file; the first line of .csv and .tsv files has the names of the columns"
    )
    targets: tuple[str, ...] = Field(min_length=1, max_length=1000, description="the columns to predict")
    task: Literal["classification", "multi_label", "regression"] = Field(
        description="classification: one target, whose different values are the classes; multi_label: each target is 0 "
        "or 1, true or false; regression: numbers"
    )
    features: tuple[str, ...] | None = Field(
        None, min_length=1, description="the input columns; none: all that are neither targets nor in `exclude`"
    )
    exclude: tuple[str, ...] = Field((), description="columns that are no inputs, such as the number of a customer")
    categorical: tuple[str, ...] = Field(
        (), description="input columns of numbers that are categories; text and booleans are in any case"
    )
    missing: Literal["refuse", "mean"] = Field(
        "refuse",
        description="mean: missing numbers are the mean of train, missing categories 0, as new ones; refuse: an error",
    )

    @property
    def name_columns(self) -> frozenset[str]:
        return super().name_columns | {*self.categorical}

    @model_validator(mode="after")
    def _names_each_column_once(self) -> Self:
        if self.task == "classification" and len(self.targets) > 1:
            raise ValueError("a classification has one target")
        if self.features and self.exclude:
            raise ValueError("features names all inputs: leave out exclude")
        if self.group is not None and self.group in (*(self.features or ()), *self.categorical):
            raise ValueError(f"group: {self.group!r} is no input: leave it out of features and categorical")
        names = (*self.targets, *(self.features or self.exclude))
        for name in names:
            if names.count(name) > 1:
                others = "features" if self.features else "exclude"
                raise ValueError(f"{name!r} is named twice, in targets or {others}")
        return self


class TextConfig(TableFileConfig):
    """Options of `data.text`."""

    path: str = Field(
        description="a .csv, .tsv, .jsonl, .json or .parquet file; a .txt file with a text on each line; or a folder "
        "with a folder of .txt files per class, or with train, test and optionally val, each with these"
    )
    text: str = Field("text", min_length=1, description="the column of texts; token_classification: of lists of words")
    targets: tuple[str, ...] = Field(
        (), max_length=1000, description="the columns to predict; none: language_modeling, and classes that are folders"
    )
    task: Literal["classification", "multi_label", "regression", "token_classification", "language_modeling"] = Field(
        description="classification: one target, whose different values are the classes; multi_label: each target is 0 "
        "or 1, true or false; regression: numbers; token_classification: one target, a list with the tag of each word; "
        "language_modeling: the next token"
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="a tokenizer.json file of the tokenizers library; none: one is trained on train"
    )
    vocabulary_size: int | None = Field(
        None,
        ge=300,
        le=1_000_000,
        description="maximum number of tokens of a trained tokenizer (byte-level BPE); none: 8000",
    )
    lowercase: bool | None = Field(None, description="whether a trained tokenizer ignores case; none: false")
    max_length: int = Field(
        256, ge=2, le=65_536, description="maximum number of a text's tokens, longer ones are truncated; of a block"
    )
    padding: Literal["longest", "max_length"] = Field(
        "longest",
        description="what a batch is padded to: its longest text, or max_length, for what needs one shape (pp)",
    )
    batch_by_length: bool = Field(
        False, description="train on batches of texts of similar lengths, in random order: less padding"
    )

    @model_validator(mode="after")
    def _fits_the_text(self) -> Self:
        num_targets = {"language_modeling": 0, "classification": 1, "token_classification": 1}.get(self.task)
        if self.targets and num_targets is not None and len(self.targets) != num_targets:
            raise ValueError(f"the task {self.task} has {num_targets or 'no'} target{'s'[: not num_targets]}")
        if self.task not in ("language_modeling", "classification") and not self.targets:
            raise ValueError(f"the task {self.task} needs targets: the columns to predict")
        if self.text == self.group:
            raise ValueError(f"group: {self.group!r} is the column of texts")
        if self.text in self.targets:
            raise ValueError(f"{self.text!r} is the column of texts, and among the targets")
        for option in ("vocabulary_size", "lowercase"):
            if self.tokenizer and getattr(self, option) is not None:
                raise ValueError(f"{option} is an option of a trained tokenizer; {self.tokenizer} is one already")
        return self
