"""Tokenizers of the `tokenizers` library: trained on train, or read from a `tokenizer.json`.

Shape legend: V tokens of all texts, N texts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ptpipe import StageError
from ptpipe_data.text_paths import find_tokenizer

if TYPE_CHECKING:
    from ptpipe_data.table_config import TextConfig

_PADDING, _FIRST, _SEPARATOR = "[PAD]", "[CLS]", "[SEP]"
_PADDINGS = (_PADDING, "<pad>", "<|pad|>")
_SEPARATORS = (_SEPARATOR, "</s>", "<|endoftext|>", "<eos>", "[EOS]")
_VOCABULARY_SIZE = 8000
_MAX_VOCABULARY_SIZE = 10_000_000
_LONG_WORD = re.compile(r"\S{256}(?=\S)")
_NOTHING = np.empty(0, dtype=np.int64)
_CHUNK = 4096
"""Texts that are encoded at once: an encoded text takes many times the memory of its ids."""


@dataclass(frozen=True)
class Encoded:
    """Texts as token ids."""

    ids_V: npt.NDArray[np.int64]
    """Of all texts, one after the other."""
    words_V: npt.NDArray[np.int64]
    """Of lists of words: which word each token is the first one of; -1 for further tokens and those of no word."""
    lengths_N: npt.NDArray[np.int64]
    num_truncated: int

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each text begins, and the end of all."""
        return np.concatenate([[0], np.cumsum(self.lengths_N)])


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with the ids of its special tokens."""

    tokenizer: Tokenizer
    padding_id: int
    separator_id: int | None
    """What ends a text where texts follow one another; None: nothing does."""
    vocabulary_size: int

    @property
    def num_special(self) -> int:
        """Special tokens that each text gets."""
        number: int = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        return number

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a `tokenizer.json`. Raises StageError where it is none, or has no token for padding."""
        file = find_tokenizer(path)
        try:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises Exception itself
            raise StageError(f"{file} is not a tokenizer.json: {' '.join(str(error).split())[:300]}") from error
        padding = (tokenizer.padding or {}).get("pad_token")
        padding_id = _id_of(tokenizer, (padding, *_PADDINGS) if padding else _PADDINGS)
        if padding_id is None:
            raise StageError(f"{file} has no token for padding: add one of {', '.join(_PADDINGS)}")
        size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        if size > _MAX_VOCABULARY_SIZE:
            raise StageError(f"{file} has the token id {size - 1}; ids are below {_MAX_VOCABULARY_SIZE}")
        if size < 2:
            raise StageError(f"{file} has no token but that for padding")
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None  # each run, and the deployed model, would see other tokens
        return cls(tokenizer, padding_id, _id_of(tokenizer, _SEPARATORS), size)

    @classmethod
    def trained(cls, texts: Iterable[str], config: TextConfig) -> Self:
        """Train byte-level BPE (Sennrich et al., 2016; Radford et al., 2019): no text has unknown tokens."""
        tokenizer = Tokenizer(models.BPE())
        if config.lowercase:
            tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocabulary_size or _VOCABULARY_SIZE,
            min_frequency=2,
            special_tokens=[_PADDING, _FIRST, _SEPARATOR],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        # A word of n characters takes n**2 steps.
        tokenizer.train_from_iterator((_LONG_WORD.sub(r"\g<0> ", text) for text in texts), trainer)
        first_id = tokenizer.token_to_id(_FIRST)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_FIRST} $A", special_tokens=[(_FIRST, first_id)]
        )
        return cls(tokenizer, 0, tokenizer.token_to_id(_SEPARATOR), tokenizer.get_vocab_size())

    def configured(self, config: TextConfig) -> tuple[str, str]:
        """Return the `tokenizer.json` for users of the model, and the SHA-256 of what decides on a text's ids in it.

        It truncates and pads as the data set's texts are, and adds special tokens where they have some. The digest is
        without truncation and padding: ids stand for the same whatever the length.
        """
        content = json.loads(self.tokenizer.to_str()) | {"truncation": None, "padding": None}
        if config.task == "language_modeling":
            content["post_processor"] = None
        copied = Tokenizer.from_str(json.dumps(content))
        digest = hashlib.sha256(copied.to_str().encode()).hexdigest()
        copied.enable_truncation(config.max_length)
        length = config.max_length if config.padding == "max_length" else None
        copied.enable_padding(pad_id=self.padding_id, pad_token=copied.id_to_token(self.padding_id), length=length)
        return copied.to_str(pretty=True), digest

    def encode(self, texts: Sequence[Any], max_length: int | None) -> Encoded:
        """Return the ids of texts, or of lists of words; of special tokens too, where they are truncated.

        `max_length`: None for what is divided into blocks afterwards. Characters that spell a special token are text.
        """
        tokenizer = self.tokenizer
        tokenizer.no_padding()
        if max_length is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(max_length)
        tokenizer.encode_special_tokens = True
        if max_length is not None and max_length <= self.num_special:
            raise StageError(f"max_length: {max_length} tokens leave no room beside {self.num_special} special ones")
        are_words = bool(texts) and not isinstance(texts[0], str)
        ids, words, lengths, num_truncated = [_NOTHING], [_NOTHING], [_NOTHING], 0
        for start in range(0, len(texts), _CHUNK):
            with _errors_of_the_library():
                found = tokenizer.encode_batch(
                    texts[start : start + _CHUNK], is_pretokenized=are_words, add_special_tokens=max_length is not None
                )
            ids.append(_flat(of.ids for of in found))
            words.append(_flat(map(_words_begun, found) if are_words else ()))
            lengths.append(np.array([len(of.ids) for of in found], dtype=np.int64))
            num_truncated += sum(bool(of.overflowing) for of in found)
        return Encoded(np.concatenate(ids), np.concatenate(words), np.concatenate(lengths), num_truncated)


@contextmanager
def _errors_of_the_library() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # Exception itself; a panic of Rust code is not even that
        raise StageError(f"the tokenizer can't read the texts: {' '.join(str(error).split())[:300]}") from error


def _flat(parts: Iterable[Iterable[int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(parts), dtype=np.int64)


def _words_begun(encoding: Encoding) -> Iterator[int]:
    """Yield for each token the number of the word that it is the first token of, else -1."""
    before = None
    for word in encoding.word_ids:
        yield -1 if word is None or word == before else word
        before = word


def _id_of(tokenizer: Tokenizer, names: Iterable[str]) -> int | None:
    """Return the id of the first of these tokens that there is."""
    return next((number for name in names if (number := tokenizer.token_to_id(name)) is not None), None)
