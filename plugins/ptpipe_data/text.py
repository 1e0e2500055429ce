"""Texts as token ids, with a target for each text, for each word, or none but the next token.

Shape legend: N texts of a file, V tokens of all of them, L of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError
from ptpipe_data.duplicates import report_shared
from ptpipe_data.paths import dataset_name
from ptpipe_data.table_file import TableFile
from ptpipe_data.table_targets import TableReader, draw_rows, rows_of, source_of
from ptpipe_data.tagged_words import TaggedWords
from ptpipe_data.text_files import read_texts, target_names
from ptpipe_data.text_paths import find_source
from ptpipe_data.tokenizer import Encoded, TextTokenizer
from ptpipe_torch import (
    ArrayColumn,
    Column,
    Data,
    DatasetInfo,
    LanguageModeling,
    RaggedColumn,
    Split,
    Task,
    TokenClassification,
    TokensInfo,
)
from ptpipe_torch.data.column import SubsetColumn
from ptpipe_torch.task.token_classification import IGNORE, MISSED, TAGS

if TYPE_CHECKING:
    from ptpipe_data.table_config import TextConfig

_TOKENS = "tokens"
_MANY_TRUNCATED = 0.01
"""Of a file's texts: more give a notice."""


def load_text(config: TextConfig, ctx: Context) -> Data:
    """Return the data set. Tokenizer and classes are those of train alone."""
    files = read_texts(config)
    for notice in (text for file in files.values() for text in file.notices):
        ctx.notice(notice)
    are_words = config.task == "token_classification"
    texts = {name: file.words(config.text) if are_words else _texts(file, config.text) for name, file in files.items()}
    drawn = draw_rows(files, config, ctx.seed)
    train_rows = rows_of(drawn["train"]).tolist()
    if config.tokenizer:
        tokenizer = TextTokenizer.read(config.tokenizer)
    else:
        tokenizer = TextTokenizer.trained((_joined(texts["train"][row]) for row in train_rows), config)
    tokenizer_json, digest = tokenizer.configured(config)
    tokens = TokensInfo(
        vocabulary_size=tokenizer.vocabulary_size,
        max_length=config.max_length,
        padding_id=tokenizer.padding_id,
        padding=config.padding,
        tokenizer_sha256=digest,
    )
    reader = _TextReader(config, ctx, files, drawn, tokenizer, tokens)
    task, splits = reader.read(texts)
    report_shared(splits, ctx, may_repeat=False)
    source = find_source(config.path)
    info = DatasetInfo(dataset_name(source), {_TOKENS: tokens}, task)
    return Data(info, splits, config.loader_options(), {"tokenizer.json": tokenizer_json.encode()})


@dataclass(frozen=True)
class _TextReader:
    """Makes splits of the texts of files."""

    config: TextConfig
    ctx: Context
    files: Mapping[str, TableFile]
    drawn: Mapping[str, Split]
    """The rows of each split."""
    tokenizer: TextTokenizer
    tokens: TokensInfo

    def read(self, texts: Mapping[str, Sequence[str] | Sequence[list[str]]]) -> tuple[Task, dict[str, Split]]:
        """Return the task and the splits. `texts`: of each file."""
        if self.config.task == "language_modeling":
            encoded = {name: self.tokenizer.encode(of, None) for name, of in texts.items()}
            task = LanguageModeling(vocabulary_size=self.tokens.vocabulary_size, length=self.tokens.length)
            (target,) = task.targets
            return task, {name: self._blocks(name, rows, encoded, target) for name, rows in self.drawn.items()}
        encoded = {name: self._encoded(name, of) for name, of in texts.items()}
        return self._tagged(texts, encoded) if self.config.task == "token_classification" else self._labelled(encoded)

    def _encoded(self, name: str, texts: Sequence[str] | Sequence[list[str]]) -> Encoded:
        encoded, file = self.tokenizer.encode(texts, self.config.max_length), self.files[name]
        if (is_empty_N := encoded.lengths_N <= self.tokenizer.num_special).any():
            raise file.error(self.config.text, int(is_empty_N.argmax()), "in which the tokenizer finds no token")
        if (is_padding_V := encoded.ids_V == self.tokens.padding_id).any():
            row = int(np.searchsorted(encoded.offsets, is_padding_V.argmax(), side="right")) - 1
            raise file.error(self.config.text, row, "which has the token that pads texts")
        if encoded.num_truncated:
            tell = self.ctx.notice if encoded.num_truncated > _MANY_TRUNCATED * len(texts) else self.ctx.log
            tell(
                f"{encoded.num_truncated} of {len(texts)} texts in {file.path} have more than max_length: "
                f"{self.config.max_length} tokens; they were truncated"
            )
        return encoded

    def _labelled(self, encoded: Mapping[str, Encoded]) -> tuple[Task, dict[str, Split]]:
        reader = TableReader(self.files, rows_of(self.drawn["train"]))
        task, values = reader.task(self.config, target_names(self.config))
        (target,) = task.targets
        return task, self._splits(encoded, {target: {name: ArrayColumn(of) for name, of in values.items()}})

    def _tagged(
        self, words: Mapping[str, Sequence[Sequence[str]]], encoded: Mapping[str, Encoded]
    ) -> tuple[Task, dict[str, Split]]:
        (target,) = self.config.targets
        tags = {name: _tags(file, target, words[name]) for name, file in self.files.items()}
        names = sorted({tag for row in rows_of(self.drawn["train"]).tolist() for tag in tags["train"][row]})
        numbers = {name: number for number, name in enumerate(names)}
        tagged = {}
        for name, rows in tags.items():
            for row, of in enumerate(rows):
                if unseen := [tag for tag in of if tag not in numbers]:
                    raise self.files[name].error(target, row, f"where {unseen[0]!r} is a tag that train does not have")
            tagged[name] = TaggedWords.found(encoded[name], [[numbers[tag] for tag in of] for of in rows])
            tagged[name].refuse_many_missed(self.files[name], self.config.text)
            sentence, is_tagged = tagged[name].description(self.files[name], words[name], names)
            if sentence:
                (self.ctx.notice if is_tagged else self.ctx.log)(sentence)
        has_missed = any(of.is_missed_W.any() for of in tagged.values())
        task = TokenClassification(class_names=tuple(names), length=self.tokens.length, has_missed=has_missed)
        return task, self._splits(encoded, self._tag_columns(task, tagged))

    def _tag_columns(
        self, task: TokenClassification, tagged: Mapping[str, TaggedWords]
    ) -> dict[str, dict[str, RaggedColumn]]:
        columns: dict[str, dict[str, RaggedColumn]] = {target: {} for target in task.targets}
        missed = {name: of.missed(task.num_classes) for name, of in tagged.items()}
        most = max(int(np.diff(offsets_N).max()) for _, offsets_N in missed.values())
        for name, of in tagged.items():
            columns[TAGS][name] = self._column(of.token_tags, of.encoded.offsets, IGNORE)
            if task.has_missed:
                length = None if self.config.padding == "longest" else most
                columns[MISSED][name] = RaggedColumn(*missed[name], IGNORE, length)
        return columns

    def _splits(self, encoded: Mapping[str, Encoded], targets: Mapping[str, Mapping[str, Column]]) -> dict[str, Split]:
        """Return the splits. `targets`: for each target the column of each file."""
        inputs = {name: self._column(of.ids_V, of.offsets, self.tokens.padding_id) for name, of in encoded.items()}
        splits = {}
        for name, rows in self.drawn.items():
            source, rows_N = source_of(name, self.config, self.files), rows_of(rows)
            columns = {target: SubsetColumn(of[source], rows_N) for target, of in targets.items()}
            splits[name] = Split(rows.ids, {_TOKENS: SubsetColumn(inputs[source], rows_N)}, columns)
        return splits

    def _column(self, values_V: npt.NDArray[np.int64], offsets_N: npt.NDArray[np.int64], padding: int) -> RaggedColumn:
        length = self.config.max_length if self.config.padding == "max_length" else None
        return RaggedColumn(values_V, offsets_N, padding, length)

    def _blocks(self, name: str, rows: Split, encoded: Mapping[str, Encoded], target: str) -> Split:
        """Return the split's texts, one after the other, in blocks; the last one may be shorter."""
        source = encoded[source_of(name, self.config, self.files)]
        offsets_N, rows_N = source.offsets, rows_of(rows)
        end = [] if self.tokenizer.separator_id is None else [self.tokenizer.separator_id]
        parts = [part for row in rows_N for part in (source.ids_V[offsets_N[row] : offsets_N[row + 1]], end)]
        stream_V = np.concatenate([np.empty(0, dtype=np.int64), *parts]).astype(np.int64)
        num_tokens = max(0, len(stream_V) - 1)
        if len(rows_N) and not num_tokens:
            raise StageError(f"split {name}: its texts have too few tokens for a block")
        blocks_N = np.array([*range(0, num_tokens, self.config.max_length), num_tokens])
        ids = np.array([f"{name}/{number}" for number in range(1, len(blocks_N))], dtype=np.str_)
        tokens = self._column(stream_V[:num_tokens], blocks_N, self.tokens.padding_id)
        return Split(ids, {_TOKENS: tokens}, {target: self._column(stream_V[1:], blocks_N, IGNORE)})


def _texts(file: TableFile, name: str) -> list[str]:
    texts = file.texts(name)
    for row, text in enumerate(texts):
        if not text or text.isspace():
            raise file.error(name, row, "an empty text; remove the row")
    return texts


def _tags(file: TableFile, name: str, words: Sequence[Sequence[str]]) -> list[list[str]]:
    tags = file.words(name)
    for row, (of_words, of_tags) in enumerate(zip(words, tags, strict=True)):
        if len(of_words) != len(of_tags):
            raise file.error(name, row, f"which are {len(of_tags)} tags for {len(of_words)} words")
    return tags


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else " ".join(text)
