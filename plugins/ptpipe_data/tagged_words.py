"""Words with a tag each, of which some have no token: the tokenizer drops them, or truncation cuts them.

Shape legend: N texts of a file, V tokens of all of them, W words of all of them, M words without a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ptpipe_data.table_file import TableFile
from ptpipe_data.tokenizer import Encoded
from ptpipe_torch.data.shards import MAX_LENGTH
from ptpipe_torch.task.token_classification import IGNORE, OUTSIDE, missed_words


@dataclass(frozen=True)
class TaggedWords:
    """The words of a file's texts, where their tokens begin, and their tags."""

    encoded: Encoded
    tags_W: npt.NDArray[np.int64]
    texts_W: npt.NDArray[np.int64]
    """The text of each word."""
    firsts_W: npt.NDArray[np.int64]
    """The first token, among those of all texts, that is the word's, or stands after it."""
    is_missed_W: npt.NDArray[np.bool_]
    """Whether a word has no token."""

    @classmethod
    def found(cls, encoded: Encoded, tags: Sequence[Sequence[int]]) -> Self:
        """Return the words of texts. `tags`: of each text a number for each word."""
        num_words_N = np.array([len(of) for of in tags], dtype=np.int64)
        texts_V, texts_W = (np.arange(len(tags)).repeat(counts_N) for counts_N in (encoded.lengths_N, num_words_N))
        begins_V = encoded.words_V >= 0
        words_V = encoded.words_V + (num_words_N.cumsum() - num_words_N)[texts_V]
        firsts_W, is_missed_W = encoded.offsets[1:][texts_W], np.ones(len(texts_W), dtype=np.bool_)
        firsts_W[words_V[begins_V]], is_missed_W[words_V[begins_V]] = begins_V.nonzero()[0], False
        firsts_W = np.minimum.accumulate(firsts_W[::-1])[::-1]
        tags_W = np.array([tag for of in tags for tag in of], dtype=np.int64)
        return cls(encoded, tags_W, texts_W, firsts_W, is_missed_W)

    @property
    def token_tags(self) -> npt.NDArray[np.int64]:
        """The tag of each word at its first token, (V,); `IGNORE` at others."""
        tags_V = np.full(len(self.encoded.ids_V), IGNORE)
        tags_V[self.firsts_W[~self.is_missed_W]] = self.tags_W[~self.is_missed_W]
        return tags_V

    def missed(self, num_classes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the target `missed` of all texts, one after the other, and where each begins, and the end of all."""
        texts_M = self.texts_W[self.is_missed_W]
        places_M = self.firsts_W[self.is_missed_W] - self.encoded.offsets[texts_M]
        values_M = missed_words(places_M, self.tags_W[self.is_missed_W], num_classes)
        counts_N = np.bincount(texts_M, minlength=len(self.encoded.lengths_N))
        return values_M, np.concatenate([[0], counts_N.cumsum()])

    def refuse_many_missed(self, file: TableFile, column: str) -> None:
        """Raise StageError where a text has more words without a token than can be stored. `column`: of the words."""
        counts_N = np.bincount(self.texts_W[self.is_missed_W], minlength=1)
        if counts_N.max() > MAX_LENGTH:
            problem = f"a text with {counts_N.max()} words that have no token: divide it"
            raise file.error(column, int(counts_N.argmax()), problem)

    def description(self, file: TableFile, words: Sequence[Sequence[str]], names: Sequence[str]) -> tuple[str, bool]:
        """Return a sentence about words without a token, empty where all have one, and whether one has a tag but O.

        `words`: of each text. `names`: of the tags.
        """
        missed_M = self.is_missed_W.nonzero()[0]
        if not len(missed_M):
            return "", False
        is_tagged_M = np.array([names[tag] != OUTSIDE for tag in self.tags_W[missed_M].tolist()])
        word = int(missed_M[is_tagged_M.argmax()])
        row = int(self.texts_W[word])
        text = words[row][word - int(np.searchsorted(self.texts_W, row))]
        is_end_M = self.firsts_W[missed_M] == self.encoded.offsets[1:][self.texts_W[missed_M]]
        is_cut = bool(self.encoded.num_truncated)
        remedies = (["a larger max_length, or shorter texts"] if is_cut else []) + (
            [] if is_cut and is_end_M.all() else ["a tokenizer that drops no word, such as one with an unknown token"]
        )
        return (
            f"{len(missed_M)} of {len(self.texts_W)} words in {file.path} have no token, {int(is_tagged_M.sum())} of "
            f"them with another tag than {OUTSIDE} (such as {text!r}, {names[self.tags_W[word]]}, in row "
            f"{file.row_name(row)}): nothing is predicted for them, and metrics count that; remedy: "
            f"{', and '.join(remedies)}"
        ), bool(is_tagged_M.any())
