"""Texts of real files as token ids, read as a stage reads them.

Shape legend: N texts of a split, V tokens of all of them.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe.events import LogLine, Notice
from ptpipe_torch import (
    Classification,
    Column,
    Data,
    LanguageModeling,
    MultiLabel,
    RaggedColumn,
    Regression,
    TokenClassification,
    TokensInfo,
)
from ptpipe_torch.data.column import flatten

from ...datasets import class_names_of, labels_of

Load = Callable[..., Data]
CLASSES: dict[str, Any] = {"task": "classification", "targets": ["y"]}
TAGS: dict[str, Any] = {"task": "token_classification", "text": "words", "targets": ["tags"]}
LANGUAGE: dict[str, Any] = {"task": "language_modeling"}
CLS = 1
"""The id of a trained tokenizer's [CLS]; that of [PAD] is 0, that of [SEP] 2."""


def config(path: Path, /, **options: Any) -> front.TextConfig:
    """The options as a manifest gives them."""
    return front.TextConfig.model_validate_json(json.dumps({"path": str(path)} | CLASSES | options), strict=True)


def context(scratch: Path, seed: int = 7) -> Context:
    return Context("data", "data.text", seed=seed, scratch=scratch, _tell=lambda event: None)


def load_text(path: Path, seed: int = 7, ctx: Context | None = None, **options: Any) -> Data:
    """Read texts as the stage does, without test and val unless they are asked for, with a small vocabulary."""
    sizes = {name: 0 for name in ("test_size", "val_size") if name.replace("size", "path") not in options}
    small = {} if "tokenizer" in options else {"vocabulary_size": 300}
    return front.load_text(config(path, **sizes | small | options), ctx or context(path.parent, seed))


@pytest.fixture
def load(ctx: Context) -> Load:
    def load(path: Path, seed: int = 7, **options: Any) -> Data:
        seeded = Context(ctx.stage_id, ctx.kind, seed=seed, scratch=ctx.scratch, _tell=ctx._tell)
        return load_text(path, ctx=seeded, **options)

    return load


def write(path: Path, columns: Mapping[str, Sequence[Any]], quoting: Any = csv.QUOTE_MINIMAL) -> Path:
    """Write a table as what its name says; None is a missing value."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(dict(columns)), path)
        return path
    rows = list(zip(*columns.values(), strict=True))
    with path.open("w", newline="", encoding="utf-8") as file:
        objects = [dict(zip(columns, row, strict=True)) for row in rows]
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in objects)
        elif path.suffix == ".json":
            json.dump(objects, file)
        else:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",", quoting=quoting)
            writer.writerows([list(columns), *rows])
    return path


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def reviews(num: int = 20) -> dict[str, list[Any]]:
    texts = [f"review {number} of a {'good' if number % 2 else 'bad'} film, with wörds" for number in range(num)]
    return {"text": texts, "y": ["pos" if number % 2 else "neg" for number in range(num)]}


def sentences() -> dict[str, list[Any]]:
    """Words of several tokens, with the tags of their entities."""
    words = [["Anna", "Karenina", "visits", "Ulm"], ["It", "rains"], ["Supercalifragilistic", "Anna"]]
    return {"words": words, "tags": [["B-PER", "I-PER", "O", "B-LOC"], ["O", "O"], ["O", "B-PER"]]}


def rows(column: Column) -> list[list[int]]:
    """The values of each row, without padding."""
    source, positions_N = flatten(column)
    assert isinstance(source, RaggedColumn)
    offsets = source.offsets_N.tolist()
    return [source.values_V[offsets[row] : offsets[row + 1]].tolist() for row in positions_N.tolist()]


def token_ids(data: Data, split: str = "train") -> list[list[int]]:
    return rows(data.splits[split].inputs["tokens"])


def flat(parts: Iterable[Sequence[Any]]) -> list[Any]:
    return [value for part in parts for value in part]


def ids(data: Data, split: str = "train") -> list[str]:
    return data.splits[split].ids.tolist()


def delivered(data: Data) -> Tokenizer:
    return Tokenizer.from_str(data.assets["tokenizer.json"].decode())


def tokens_info(data: Data) -> TokensInfo:
    info = data.info.inputs["tokens"]
    assert isinstance(info, TokensInfo)
    return info


def decoded(data: Data, split: str = "train") -> list[str]:
    """The texts that the ids are of; a trained tokenizer puts a space before each."""
    return [text.removeprefix(" ") for text in delivered(data).decode_batch(token_ids(data, split))]


def batch_of(data: Data, split: str = "train") -> dict[str, torch.Tensor]:
    (batch,) = data.batches(split, batch_size=10_000)
    return {**batch.inputs, **batch.targets}


def own_tokenizer(
    path: Path, words: str, special: Mapping[str, int], change: Callable[[Tokenizer], object] = repr
) -> str:
    """Write a tokenizer of whole words, whose special tokens have these ids."""
    numbers = [number for number in range(1000) if number not in special.values()]
    vocabulary = dict(zip(["[UNK]", *words.split()], numbers, strict=False)) | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    change(tokenizer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return str(path)


@pytest.fixture(params=[".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def suffix(request: pytest.FixtureRequest) -> str:
    return request.param


class TestFiles:
    def test_a_classification(self, tmp_path: Path, load: Load, suffix: str) -> None:
        table = reviews()
        data = load(write(tmp_path / f"films{suffix}", table))
        assert data.info.name == "films" and isinstance(data.info.task, Classification)
        assert class_names_of(data.info) == ("neg", "pos")
        assert labels_of(data.splits["train"]).tolist() == [number % 2 for number in range(20)]
        assert decoded(data) == table["text"] and ids(data)[:2] == [f"films{suffix}/1", f"films{suffix}/2"]
        assert str(data.info.signature) == "tokens (batch, length) int64 -> logits (batch, 2) float32"
        assert tokens_info(data).vocabulary_size == delivered(data).get_vocab_size() <= 300

    def test_several_labels(self, tmp_path: Path, load: Load, suffix: str) -> None:
        table = {"text": ["a b", "c d", "e f"], "good": [0, 1, 1], "short": [1, 0, 1]}
        data = load(write(tmp_path / f"t{suffix}", table), task="multi_label", targets=["good", "short"])
        assert data.info.task == MultiLabel(label_names=("good", "short"))
        assert data.splits["train"].targets["labels"].values().tolist() == [[0, 1], [1, 0], [1, 1]]

    def test_a_regression(self, tmp_path: Path, load: Load, suffix: str) -> None:
        table = {"text": ["a b", "c d", "e f"], "stars": [1.0, 2.0, 6.0]}
        data = load(write(tmp_path / f"t{suffix}", table), task="regression", targets=["stars"])
        assert isinstance(data.info.task, Regression) and data.info.task.mean == (3.0,)
        assert data.splits["train"].targets["targets"].values().ravel().tolist() == [1, 2, 6]

    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
    def test_tags_of_words(self, tmp_path: Path, load: Load, suffix: str) -> None:
        data = load(write(tmp_path / f"t{suffix}", sentences()), **TAGS)
        assert isinstance(data.info.task, TokenClassification)
        assert data.info.task.class_names == ("B-LOC", "B-PER", "I-PER", "O")
        assert str(data.info.signature) == "tokens (batch, length) int64 -> logits (batch, length, 4) float32"

    def test_the_next_token(self, tmp_path: Path, load: Load, suffix: str) -> None:
        data = load(write(tmp_path / f"t{suffix}", {"text": ["one two", "three"]}), **LANGUAGE, targets=[])
        assert data.info.task == LanguageModeling(vocabulary_size=tokens_info(data).vocabulary_size)
        assert decoded(data) == ["one two three"]

    def test_tabs_without_header_or_quotation_marks(self, tmp_path: Path, load: Load) -> None:
        """As many corpora have it: quotation marks are characters, also where no second one follows."""
        texts = ['He said "no', '"Yes" was all', "it's 5' 10\""]
        lines = "".join(
            f"{label}\tx{number}\t{text}\n" for number, (label, text) in enumerate(zip("aba", texts, strict=True))
        )
        path = write_files(tmp_path, {"t.tsv": lines}) / "t.tsv"
        data = load(path, column_names=["y", "id", "text"], quoting=False)
        assert decoded(data) == texts and ids(data)[0] == "t.tsv/1"

    def test_a_text_of_several_lines_in_quotation_marks(self, tmp_path: Path, load: Load) -> None:
        table = {"text": ['a\nb, "c"', "d"], "y": ["u", "v"]}
        data = load(write(tmp_path / "t.csv", table))
        assert decoded(data) == table["text"]

    def test_texts_that_look_like_something_else(self, tmp_path: Path, load: Load, suffix: str) -> None:
        texts = ["7", "1.5", "true", "NA", "null", "2024-01-01", "nan"]
        data = load(write(tmp_path / f"t{suffix}", {"text": texts, "y": list("abababa")}))
        assert decoded(data) == texts

    def test_lines(self, tmp_path: Path, load: Load) -> None:
        """Empty lines are no texts, but they count: an id is the line of an editor."""
        path = write_files(tmp_path, {"book.txt": "first line\n\n  \nsecond line\r\nthird"}) / "book.txt"
        data = load(path, **LANGUAGE, targets=[], max_length=500)
        sep = delivered(data).token_to_id("[SEP]")
        (tokens,) = token_ids(data)
        assert tokens.count(sep) == 2 and decoded(data) == ["first line second line third"]
        assert ids(data) == ["train/1"]

    def test_a_folder_per_class(self, tmp_path: Path, load: Load) -> None:
        files = {"neg/1.txt": "bad", "neg/2.TXT": "very\nbad", "pos/1.txt": "good", ".git/1.txt": "x", "neg/3.md": "x"}
        data = load(write_files(tmp_path / "films", files), targets=[])
        assert data.info.name == "films" and class_names_of(data.info) == ("neg", "pos")
        assert decoded(data) == ["bad", "very\nbad", "good"]
        assert labels_of(data.splits["train"]).tolist() == [0, 0, 1]
        assert ids(data) == ["films/neg/1.txt", "films/neg/2.TXT", "films/pos/1.txt"]

    def test_folders_of_splits(self, tmp_path: Path, load: Load) -> None:
        files = {f"{split}/{name}/1.txt": f"{split} {name}" for split in ("train", "val", "test") for name in "ab"}
        data = load(write_files(tmp_path, files), targets=[], test_size=None)
        for split in ("train", "val", "test"):
            assert decoded(data, split) == [f"{split} a", f"{split} b"]
            assert labels_of(data.splits[split]).tolist() == [0, 1]
            assert ids(data, split) == [f"{split}/a/1.txt", f"{split}/b/1.txt"]

    def test_files_of_splits(self, tmp_path: Path, load: Load, suffix: str) -> None:
        paths = {
            name: write(tmp_path / f"{name}{suffix}", {"text": [f"{name} one", f"{name} two"], "y": ["a", "b"]})
            for name in ("train", "val", "test")
        }
        options = {"val_path": str(paths["val"]), "test_path": str(paths["test"]), "calibration_from": "val"}
        data = load(paths["train"], **options)
        for split in ("train", "val", "test"):
            assert decoded(data, split) == [f"{split} one", f"{split} two"]
        assert decoded(data, "calibration") == decoded(data, "val")

    def test_val_and_test_are_drawn(self, tmp_path: Path, load: Load) -> None:
        table = reviews(40)
        data = load(write(tmp_path / "t.csv", table), test_size=None, val_size=0.25)
        assert [len(split) for split in data.splits.values()] == [24, 8, 8, 24]
        for split in data.splits:
            numbers = [int(name.rpartition("/")[2]) - 1 for name in ids(data, split)]
            assert decoded(data, split) == [table["text"][number] for number in numbers]
            assert labels_of(data.splits[split]).tolist() == [number % 2 for number in numbers]

    def test_a_batch_is_as_long_as_its_longest_text(self, tmp_path: Path, load: Load) -> None:
        data = load(write(tmp_path / "t.csv", {"text": ["a", "a b c", "a b", "a"], "y": list("uvuv")}))
        lengths = [len(tokens) for tokens in token_ids(data)]
        batches = list(data.batches("train", batch_size=2))
        assert [batch.inputs["tokens"].shape[1] for batch in batches] == [max(lengths[:2]), max(lengths[2:])]
        for batch in batches:
            for position, tokens_L in zip(batch.indices_N.tolist(), batch.inputs["tokens"].tolist(), strict=True):
                assert tokens_L == token_ids(data)[position] + [0] * (len(tokens_L) - lengths[position])


class TestTrainedTokenizer:
    def test_it_learns_of_train_alone(self, tmp_path: Path, load: Load) -> None:
        train = write(tmp_path / "train.csv", {"text": ["apple apple", "apple"], "y": ["a", "b"]})
        others = {
            f"{split}_path": str(write(tmp_path / f"{split}.csv", {"text": ["zebra zebra"] * 9, "y": ["a"] * 9}))
            for split in ("val", "test")
        }
        data = load(train, **others, vocabulary_size=400)
        vocabulary = delivered(data).get_vocab()
        assert "Ġapple" in vocabulary and not [token for token in vocabulary if "ze" in token]
        assert decoded(data, "test") == ["zebra zebra"] * 9 and len(token_ids(data, "test")[0]) > 10
        assert len(token_ids(data)[1]) == 2, "[CLS] and the word"

    def test_rows_that_were_drawn_for_test_are_not_of_train(self, tmp_path: Path, load: Load) -> None:
        texts = [f"{chr(97 + number) * 6} {chr(97 + number) * 6}" for number in range(20)]
        path = write(tmp_path / "t.csv", {"text": texts, "y": ["u", "v"] * 10})
        found = []
        for seed in (7, 8):
            data = load(path, seed=seed, test_size=0.5, vocabulary_size=1000)
            letters = {text[0] for text in decoded(data)}
            words = {token.strip("Ġ") for token in delivered(data).get_vocab() if len(token.strip("Ġ")) == 6}
            assert words == {letter * 6 for letter in letters} and len(words) == 10
            found.append(data.assets["tokenizer.json"])
        assert found[0] != found[1]

    def test_it_is_the_same_in_every_run_and_process(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.csv", reviews())
        one, other = (load(path, vocabulary_size=350) for _ in range(2))
        assert one.assets == other.assets and token_ids(one) == token_ids(other)
        code = (
            "import sys, hashlib, pathlib, ptpipe_data as front; from ptpipe import Context; "
            f"c = front.TextConfig(path={str(path)!r}, task='classification', targets=('y',), test_size=0, val_size=0, "
            "vocabulary_size=350); data = front.load_text(c, Context('d', 'data.text', 7, pathlib.Path(), {}, print)); "
            "print(data.info.inputs['tokens'].tokenizer_sha256)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == tokens_info(one).tokenizer_sha256

    @pytest.mark.parametrize("lowercase", [True, False])
    def test_case(self, tmp_path: Path, load: Load, lowercase: bool) -> None:
        data = load(
            write(tmp_path / "t.csv", {"text": ["Good film", "good FILM"], "y": ["a", "b"]}), lowercase=lowercase
        )
        one, other = token_ids(data)
        assert (one == other) == lowercase
        assert decoded(data)[1] == ("good film" if lowercase else "good FILM")

    def test_the_size_of_its_vocabulary(self, tmp_path: Path, load: Load) -> None:
        texts = ["".join(letters) for letters in itertools.product("abcd", repeat=3)] * 2
        path = write(tmp_path / "t.csv", {"text": texts, "y": ["u", "v"] * 64})
        for size in (300, 310):
            data = load(path, vocabulary_size=size)
            assert tokens_info(data).vocabulary_size == size == delivered(data).get_vocab_size()
            assert max(map(max, token_ids(data))) < size
        large = load(path, vocabulary_size=None)
        assert 310 < tokens_info(large).vocabulary_size < 8000, "as many as the texts give"
        assert len(flat(token_ids(large))) < len(flat(token_ids(load(path))))

    def test_no_character_is_unknown(self, tmp_path: Path, load: Load) -> None:
        texts = ["日本 \U0001f600 ñ", "a\0b", "\u200b", "tab\there", "  two  spaces "]
        data = load(write(tmp_path / "t.jsonl", {"text": texts, "y": list("abcde")}))
        assert delivered(data).decode_batch(token_ids(data)) == [
            text if text.startswith(" ") else f" {text}" for text in texts
        ]

    def test_texts_that_spell_special_tokens(self, tmp_path: Path, load: Load) -> None:
        texts = ["[PAD]", "a [CLS] b", "[SEP][SEP]", "[PAD] [PAD]"]
        data = load(write(tmp_path / "t.csv", {"text": texts, "y": list("abab")}))
        for tokens in token_ids(data):
            assert tokens[0] == CLS and min(tokens[1:]) > 2
        assert decoded(data) == texts


class TestLengths:
    def test_longer_texts_are_truncated_and_it_is_said(self, tmp_path: Path, load: Load, events) -> None:
        path = write(tmp_path / "t.csv", {"text": ["a b c d e f", "a b", "a b c d"], "y": list("uvu")})
        whole = token_ids(load(path))
        assert not [event for event in events if isinstance(event, LogLine)]
        data = load(path, max_length=4)
        assert token_ids(data) == [tokens[:4] for tokens in whole] and tokens_info(data).max_length == 4
        assert events.notices == [f"2 of 3 texts in {path} have more than max_length: 4 tokens; they were truncated"]

    @pytest.mark.parametrize(("num", "kind"), [(99, Notice), (100, LogLine)])
    def test_few_truncated_texts_are_in_the_log_alone(
        self, tmp_path: Path, load: Load, events: list[Any], num: int, kind: type
    ) -> None:
        rows = {"text": ["a b c d", *["a"] * (num - 1)], "y": ["u", *["v"] * (num - 1)]}
        load(write(tmp_path / "t.csv", rows), max_length=3)
        (event,) = [event for event in events if isinstance(event, Notice | LogLine)]
        assert isinstance(event, kind) and "1 of " in event.text

    def test_every_batch_has_max_length_where_that_is_wanted(self, tmp_path: Path, load: Load) -> None:
        data = load(write(tmp_path / "t.csv", reviews()), max_length=64, padding="max_length")
        assert str(data.info.signature) == "tokens (batch, 64) int64 -> logits (batch, 2) float32"
        for batch in data.batches("train", batch_size=3):
            assert batch.inputs["tokens"].shape == (len(batch), 64)
        data = load(write(tmp_path / "t.jsonl", sentences()), **TAGS, max_length=32, padding="max_length")
        assert batch_of(data)["tokens"].shape == batch_of(data)["tags"].shape == (3, 32)
        data = load(write(tmp_path / "l.csv", reviews()), **LANGUAGE, targets=[], max_length=32, padding="max_length")
        assert {tuple(batch.inputs["tokens"].shape) for batch in data.batches("train", batch_size=1)} == {(1, 32)}
        assert {tuple(batch.targets["next_tokens"].shape) for batch in data.batches("train", batch_size=1)} == {(1, 32)}

    def test_a_text_of_a_megabyte(self, tmp_path: Path, load: Load) -> None:
        table = {"text": ["lorem ipsum " * 80_000, "a"], "y": ["u", "v"]}
        data = load(write(tmp_path / "t.parquet", table), max_length=100)
        assert len(token_ids(data)[0]) == 100 and decoded(data)[1] == "a"


class TestDelivered:
    @pytest.mark.parametrize("padding", ["longest", "max_length"])
    def test_it_gives_the_ids_of_the_data_set(self, tmp_path: Path, load: Load, padding: str) -> None:
        table = reviews() | {"text": [text * (number + 1) for number, text in enumerate(reviews()["text"])]}
        data = load(write(tmp_path / "t.csv", table), test_size=0.3, max_length=120, padding=padding)
        for split in ("train", "test"):
            texts = [table["text"][int(name.rpartition("/")[2]) - 1] for name in ids(data, split)]
            found = [encoding.ids for encoding in delivered(data).encode_batch(texts)]
            assert found == batch_of(data, split)["tokens"].tolist()

    def test_it_gives_the_ids_of_words(self, tmp_path: Path, load: Load) -> None:
        table = sentences()
        data = load(write(tmp_path / "t.jsonl", table), **TAGS)
        found = [of.ids for of in delivered(data).encode_batch(table["words"], is_pretokenized=True)]
        assert found == batch_of(data)["tokens"].tolist()

    def test_its_digest_is_among_the_facts(self, tmp_path: Path, load: Load) -> None:
        data = load(write(tmp_path / "t.csv", reviews()))
        tokenizer = delivered(data)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        assert hashlib.sha256(tokenizer.to_str().encode()).hexdigest() == tokens_info(data).tokenizer_sha256

    @pytest.mark.parametrize("task", [CLASSES, LANGUAGE | {"targets": []}], ids=["classes", "language"])
    def test_texts_of_another_file_and_length_fit(self, tmp_path: Path, load: Load, task: dict[str, Any]) -> None:
        data = load(write(tmp_path / "t.csv", reviews()), **task)
        (tmp_path / "t.json").write_bytes(data.assets["tokenizer.json"])
        other = write(tmp_path / "u.csv", {"text": ["a film", "words"], "y": ["pos", "neg"]})
        shorter, longer = (load(other, **task, tokenizer=str(tmp_path / "t.json"), max_length=of) for of in (64, 512))
        shorter.info.check_fit("net", data.info.signature)
        with pytest.raises(StageError, match=r"\[at most 256 in a text\]; u has \[at most 512 in a text\]: the model"):
            longer.info.check_fit("net", data.info.signature)

    def test_that_of_a_language_model_adds_nothing(self, tmp_path: Path, load: Load) -> None:
        """Of special tokens, the training has seen what ends a text alone."""
        table = reviews()
        data = load(write(tmp_path / "t.csv", table), **LANGUAGE, targets=[])
        stream = flat(token_ids(data))
        assert CLS not in stream and delivered(data).encode(table["text"][0]).ids == stream[: stream.index(2)]

        def change(tokenizer: Tokenizer) -> None:
            tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 8)])

        own = own_tokenizer(tmp_path / "t.json", "a b", {"[CLS]": 8, "[PAD]": 9}, change)
        data = load(write(tmp_path / "u.csv", {"text": ["a b", "b"]}), **LANGUAGE, targets=[], tokenizer=own)
        assert delivered(data).encode("a b").ids == [1, 2]

    def test_a_model_of_another_tokenizer_does_not_fit(self, tmp_path: Path, load: Load) -> None:
        data = load(write(tmp_path / "t.csv", reviews()))
        other = load(tmp_path / "t.csv", lowercase=True)
        with pytest.raises(
            StageError, match=r"net takes tokens of \[tokenizer \w{12}, \d+ tokens\]; t has \[tokenizer"
        ):
            other.info.check_fit("net", data.info.signature)

    def test_it_is_stored_with_the_data_set(self, tmp_path: Path, load: Load) -> None:
        data = load(write(tmp_path / "t.csv", reviews()))
        (tmp_path / "stored").mkdir()
        data.save(tmp_path / "stored")
        again = Data.load(tmp_path / "stored")
        assert again.assets == data.assets and again.info == data.info and token_ids(again) == token_ids(data)
        assert Data.deliverables(tmp_path / "stored") == ("tokenizer.json",)


class TestOwnTokenizer:
    def test_ids_and_padding_are_its_own(self, tmp_path: Path, load: Load) -> None:
        tokenizer = own_tokenizer(tmp_path / "tokenizer.json", "good bad film", {"[PAD]": 3})
        path = write(tmp_path / "t.csv", {"text": ["good film", "bad", "good bad thing"], "y": list("uvu")})
        data = load(path, tokenizer=tokenizer)
        assert token_ids(data) == [[1, 4], [2], [1, 2, 0]]
        assert batch_of(data)["tokens"].tolist() == [[1, 4, 3], [2, 3, 3], [1, 2, 0]]
        assert (tokens_info(data).padding_id, tokens_info(data).vocabulary_size) == (3, 5)

    @pytest.mark.parametrize("name", ["<pad>", "<|pad|>", "[PAD]"])
    def test_names_of_padding(self, tmp_path: Path, load: Load, name: str) -> None:
        tokenizer = own_tokenizer(tmp_path / "tokenizer.json", "a b", {name: 7})
        data = load(write(tmp_path / "t.csv", {"text": ["a", "a b"], "y": ["u", "v"]}), tokenizer=tokenizer)
        assert batch_of(data)["tokens"].tolist() == [[1, 7], [1, 2]]
        assert tokens_info(data).vocabulary_size == 8, "ids may have gaps"

    def test_its_own_truncation_and_padding_are_replaced(self, tmp_path: Path, load: Load) -> None:
        def change(tokenizer: Tokenizer) -> None:
            tokenizer.enable_truncation(2, direction="left")
            tokenizer.enable_padding(direction="left", pad_id=9, pad_token="[NONE]", length=7)

        tokenizer = own_tokenizer(tmp_path / "t.json", "a b c", {"[NONE]": 9, "[PAD]": 5}, change)
        path = write(tmp_path / "t.csv", {"text": ["a b c a", "b"], "y": ["u", "v"]})
        data = load(path, tokenizer=tokenizer, max_length=3)
        assert batch_of(data)["tokens"].tolist() == [[1, 2, 3], [2, 9, 9]]
        assert [of.ids for of in delivered(data).encode_batch(["a b c a", "b"])] == [[1, 2, 3], [2, 9, 9]]

    def test_its_special_tokens_are_added(self, tmp_path: Path, load: Load) -> None:
        def change(tokenizer: Tokenizer) -> None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 10), ("[SEP]", 11)]
            )

        special = {"[CLS]": 10, "[SEP]": 11, "[PAD]": 12}
        tokenizer = own_tokenizer(tmp_path / "t.json", "a b c", special, change)
        path = write(tmp_path / "t.csv", {"text": ["a b c a", "b"], "y": ["u", "v"]})
        assert token_ids(load(path, tokenizer=tokenizer)) == [[10, 1, 2, 3, 1, 11], [10, 2, 11]]
        assert token_ids(load(path, tokenizer=tokenizer, max_length=4)) == [[10, 1, 2, 11], [10, 2, 11]]
        language = load(path, **LANGUAGE, targets=[], tokenizer=tokenizer)
        assert token_ids(language) == [[1, 2, 3, 1, 11, 2]], "of special tokens the separator alone"
        words = write(tmp_path / "w.jsonl", {"words": [["a", "b"], ["c"]], "tags": [["O", "X"], ["O"]]})
        assert rows(load(words, **TAGS, tokenizer=tokenizer).splits["train"].targets["tags"]) == [
            [-1, 0, 1, -1],
            [-1, 0, -1],
        ]

    def test_word_pieces(self, tmp_path: Path, load: Load) -> None:
        vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "[PAD]": 3, "##s": 4, "he": 5}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
        (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
        words = [["He", "plays", "playing"], ["xyz"]]
        path = write(tmp_path / "t.jsonl", {"words": words, "tags": [["O", "A", "B"], ["O"]]})
        data = load(path, **TAGS, tokenizer=str(tmp_path / "tokenizer.json"))
        assert token_ids(data) == [[5, 1, 4, 1, 2], [0]]
        assert batch_of(data)["tags"].tolist() == [[2, 0, -1, 1, -1], [2, -1, -1, -1, -1]]
        assert batch_of(data)["tokens"].tolist()[1] == [0, 3, 3, 3, 3]

    def test_texts_that_spell_its_padding(self, tmp_path: Path, load: Load) -> None:
        tokenizer = own_tokenizer(tmp_path / "t.json", "a b", {"<pad>": 0})
        data = load(write(tmp_path / "t.csv", {"text": ["a b", "b a"], "y": ["u", "v"]}), tokenizer=tokenizer)
        assert token_ids(data) == [[2, 3], [3, 2]]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("hello", "is not a tokenizer.json: "),
            ("{}", "is not a tokenizer.json: "),
            ("[" * 100_000, "is not a tokenizer.json: "),
            (b"\xff\xfe\x00", "is not a tokenizer.json: "),
            ("", "is not a tokenizer.json: "),
        ],
        ids=["text", "an empty object", "nested", "not UTF-8", "nothing"],
    )
    def test_what_is_no_tokenizer(self, tmp_path: Path, load: Load, content: str | bytes, message: str) -> None:
        path = write(tmp_path / "t.csv", reviews())
        file = write_files(tmp_path, {"tokenizer.json": content}) / "tokenizer.json"
        with pytest.raises(StageError, match=rf"^{file} {message}") as caught:
            load(path, tokenizer=str(file))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000

    def test_a_tokenizer_that_is_not_there(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.csv", reviews())
        with pytest.raises(StageError, match=r"nowhere\.json does not exist$"):
            load(path, tokenizer=str(tmp_path / "nowhere.json"))
        with pytest.raises(StageError, match=rf"^{tmp_path} is not a file: the tokenizer is a tokenizer\.json$"):
            load(path, tokenizer=str(tmp_path))

    def test_a_tokenizer_without_padding(self, tmp_path: Path, load: Load) -> None:
        tokenizer = own_tokenizer(tmp_path / "t.json", "a b", {})
        with pytest.raises(
            StageError, match=r"t\.json has no token for padding: add one of \[PAD\], <pad>, <\|pad\|>$"
        ):
            load(write(tmp_path / "t.csv", reviews()), tokenizer=tokenizer)

    def test_a_tokenizer_of_a_huge_id(self, tmp_path: Path, load: Load) -> None:
        tokenizer = Path(own_tokenizer(tmp_path / "t.json", "a b", {"[PAD]": 3}))
        content = json.loads(tokenizer.read_text())
        content["model"]["vocab"]["c"] = 4_000_000_000
        tokenizer.write_text(json.dumps(content))
        with pytest.raises(StageError, match=r"t\.json has the token id 4000000000; ids are below 10000000$"):
            load(write(tmp_path / "t.csv", reviews()), tokenizer=str(tokenizer))

    def test_a_text_of_no_token_is_named(self, tmp_path: Path, load: Load) -> None:
        def change(tokenizer: Tokenizer) -> None:
            tokenizer.normalizer = normalizers.Replace("~", "")

        tokenizer = own_tokenizer(tmp_path / "t.json", "a b", {"[PAD]": 9}, change)
        path = write(tmp_path / "t.csv", {"text": ["a", "~~"], "y": ["u", "v"]})
        with pytest.raises(
            StageError, match=r"t\.csv, row 2, column 'text': '~~', in which the tokenizer finds no token$"
        ):
            load(path, tokenizer=tokenizer)

    def test_a_text_of_special_tokens_alone_is_named(self, tmp_path: Path, load: Load) -> None:
        def change(tokenizer: Tokenizer) -> None:
            tokenizer.normalizer = normalizers.Replace("~", "")
            tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 8)])

        tokenizer = own_tokenizer(tmp_path / "t.json", "a b", {"[CLS]": 8, "[PAD]": 9}, change)
        path = write(tmp_path / "t.csv", {"text": ["a", "~~"], "y": ["u", "v"]})
        with pytest.raises(StageError, match=r"row 2, column 'text': '~~', in which the tokenizer finds no token$"):
            load(path, tokenizer=tokenizer)
        tokenizer = own_tokenizer(tmp_path / "u.json", "a b", {"[CLS]": 8, "[PAD]": 9}, two_special_tokens)
        with pytest.raises(StageError, match=r"max_length: 2 tokens leave no room beside 2 special ones$"):
            load(path, tokenizer=tokenizer, max_length=2)

    def test_a_text_with_the_token_for_padding_is_named(self, tmp_path: Path, load: Load) -> None:
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "b": 2}, unk_token="b"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        (tmp_path / "t.json").write_text(tokenizer.to_str())
        path = write(tmp_path / "t.csv", {"text": ["a", "b <pad> a"], "y": ["u", "v"]})
        with pytest.raises(
            StageError, match=r"row 2, column 'text': 'b <pad> a', which has the token that pads texts$"
        ):
            load(path, tokenizer=str(tmp_path / "t.json"))

    @pytest.mark.parametrize(
        ("model", "pattern", "text"),
        [
            (models.WordLevel({"a": 0, "[PAD]": 1}), None, "b"),
            (models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="a"), "(a+)+$", "a" * 40 + "!"),
        ],
        ids=["no unknown token", "a pattern that backtracks"],
    )
    def test_texts_that_it_can_not_read(
        self, tmp_path: Path, load: Load, model: Any, pattern: str | None, text: str
    ) -> None:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None
        (tmp_path / "t.json").write_text(tokenizer.to_str())
        path = write(tmp_path / "t.csv", {"text": ["a", text], "y": ["u", "v"]})
        with pytest.raises(StageError, match=r"^the tokenizer can't read the texts: "):
            load(path, tokenizer=str(tmp_path / "t.json"))

    def test_one_of_padding_alone(self, tmp_path: Path, load: Load) -> None:
        tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
        (tmp_path / "t.json").write_text(tokenizer.to_str())
        with pytest.raises(StageError, match=r"t\.json has no token but that for padding$"):
            load(write(tmp_path / "t.csv", reviews()), tokenizer=str(tmp_path / "t.json"))

    def test_dropout_is_off(self, tmp_path: Path, load: Load) -> None:
        data = load(write(tmp_path / "t.csv", reviews()))
        tokenizer = delivered(data)
        tokenizer.model.dropout = 0.5
        (tmp_path / "t.json").write_text(tokenizer.to_str())
        one, other = (load(tmp_path / "t.csv", tokenizer=str(tmp_path / "t.json")) for _ in range(2))
        assert token_ids(one) == token_ids(other) == token_ids(data)


def two_special_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [CLS]", special_tokens=[("[CLS]", 8)])


class TestOddFiles:
    def test_a_missing_column_of_json_lines_has_its_nearest_name(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.jsonl", {"tekst": ["a", "b"], "y": ["u", "v"]})
        with pytest.raises(StageError, match=r"t\.jsonl has no column 'text' \(did you mean 'tekst'\?\)$"):
            load(path)

    @pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
    def test_rows_of_megabytes(self, tmp_path: Path, load: Load, suffix: str) -> None:
        texts = ["word " * 500_000, "b"]
        data = load(write(tmp_path / f"t{suffix}", {"text": texts, "y": ["u", "v"]}), max_length=8)
        assert [len(row) for row in token_ids(data)] == [8, 3]

    def test_a_word_of_a_megabyte_is_learned_in_time(self, tmp_path: Path, load: Load) -> None:
        data = load(write(tmp_path / "t.csv", {"text": ["a" * 1_000_000, "b"], "y": ["u", "v"]}), max_length=8)
        assert len(data.splits["train"]) == 2

    @pytest.mark.parametrize(("column", "message"), [("text", "which is no text"), ("y", "which is no text")])
    def test_values_that_are_no_text(self, tmp_path: Path, load: Load, column: str, message: str) -> None:
        path = write(tmp_path / "t.parquet", {"text": ["a", "b"], "y": ["u", "v"]} | {column: [["a"], ["b"]]})
        with pytest.raises(StageError, match=rf"row 1, column '{column}': \['a'\], {message}$"):
            load(path)

    def test_tags_that_are_no_text_and_empty_words(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.jsonl", {"words": [["a", "b"]], "tags": [[True, False]]})
        with pytest.raises(StageError, match=r"row 1, column 'tags': .* which is no list of texts$"):
            load(path, **TAGS)
        path = write(tmp_path / "u.jsonl", {"words": [["a", ""]], "tags": [["O", "O"]]})
        with pytest.raises(StageError, match=r"row 1, column 'words': .* in which a value is missing$"):
            load(path, **TAGS)

    def test_lines_end_at_newlines_alone_and_begin_behind_a_mark(self, tmp_path: Path, load: Load) -> None:
        (tmp_path / "book.txt").write_bytes("\ufeffone\u2028line\x0cof text\r\nanother".encode())
        data = load(tmp_path / "book.txt", **LANGUAGE, targets=[], max_length=100)
        assert decoded(data)[0].strip() == "one\u2028line\x0cof text another"

    def test_too_few_tokens_for_a_block(self, tmp_path: Path, load: Load) -> None:
        tokenizer = own_tokenizer(tmp_path / "t.json", "a b", {"[PAD]": 9})
        (tmp_path / "book.txt").write_text("a\n")
        with pytest.raises(StageError, match=r"^split train: its texts have too few tokens for a block$"):
            load(tmp_path / "book.txt", **LANGUAGE, targets=[], tokenizer=tokenizer)

    def test_names_that_are_not_utf8(self, tmp_path: Path, load: Load) -> None:
        folder = tmp_path / "films" / "good"
        folder.mkdir(parents=True)
        Path(os.fsdecode(os.fsencode(folder) + b"/y\xff.txt")).write_text("a")
        with pytest.raises(StageError, match=r"has a name that is not UTF-8: rename it$"):
            load(tmp_path / "films", targets=[])

    def test_column_names_of_files_that_have_their_own(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.jsonl", {"text": ["a", "b"], "y": ["u", "v"]})
        with pytest.raises(StageError, match=r"^column_names names the columns of \.csv and \.tsv files; "):
            load(path, column_names=["text", "y"])

    def test_the_name_of_a_folder_of_splits(self, tmp_path: Path, load: Load) -> None:
        files = {"films/train/good/1.txt": "a b", "films/train/bad/1.txt": "c", "films/test/bad/2.txt": "c"}
        assert load(write_files(tmp_path, files) / "films", targets=[]).info.name == "films"


class TestTags:
    def test_the_first_token_of_a_word_has_its_tag(self, tmp_path: Path, load: Load) -> None:
        table = sentences()
        data = load(write(tmp_path / "t.jsonl", table), **TAGS)
        names, tokenizer = data.info.task.class_names, delivered(data)
        for words, tags, tokens, numbers in zip(
            *table.values(), token_ids(data), rows(data.splits["train"].targets["tags"]), strict=True
        ):
            assert tokens[0] == CLS and numbers[0] == -1 and len(tokens) == len(numbers)
            expected = [-1]
            for word, tag in zip(words, tags, strict=True):
                num_tokens = len(tokenizer.encode(word, add_special_tokens=False).ids)
                expected += [names.index(tag), *[-1] * (num_tokens - 1)]
            assert numbers == expected and len(expected) > 1 + len(words)
        assert (batch_of(data)["tags"][batch_of(data)["tokens"] == 0] == -1).all()

    def test_tags_are_truncated_as_their_words(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.jsonl", sentences())
        whole, data = load(path, **TAGS), load(path, **TAGS, max_length=4)
        tags = rows(whole.splits["train"].targets["tags"])
        assert rows(data.splits["train"].targets["tags"]) == [of[:4] for of in tags]

    @pytest.mark.parametrize("padding", ["longest", "max_length"])
    def test_words_that_truncation_cuts_count_as_missed(self, tmp_path: Path, load: Load, events, padding: str) -> None:
        table = {"words": [["a", "b", "c", "d"], ["e"]], "tags": [["O", "B-x", "I-x", "B-x"], ["O"]]}
        path = write(tmp_path / "t.jsonl", table)
        data = load(path, **TAGS, max_length=5, padding=padding)
        assert data.info.task == TokenClassification(
            class_names=("B-x", "I-x", "O"), length="length" if padding == "longest" else 5, has_missed=True
        )
        assert rows(data.splits["train"].targets["tags"]) == [[-1, 2, -1, 0, -1], [-1, 2, -1]]
        assert rows(data.splits["train"].targets["missed"]) == [[5 * 3 + 1, 5 * 3 + 0], []]
        assert batch_of(data)["missed"].shape == (2, 2)
        assert events.notices[-1] == (
            f"2 of 5 words in {path} have no token, 2 of them with another tag than O (such as 'c', I-x, in row 1): "
            "nothing is predicted for them, and metrics count that; remedy: a larger max_length, or shorter texts"
        )

    def test_words_that_the_tokenizer_drops_count_as_missed(self, tmp_path: Path, load: Load, events) -> None:
        tokenizer = Tokenizer(models.BPE({"[PAD]": 0, **{chr(97 + number): 1 + number for number in range(26)}}, []))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        own = {**TAGS, "tokenizer": str(tmp_path / "tokenizer.json")}
        table = {
            "words": [["A", "b", "C", "D", "ef"], ["gH", "1"]],
            "tags": [["B-x", "I-x", "O", "I-x", "O"], ["O"] * 2],
        }
        path, other = write(tmp_path / "t.jsonl", table), {"words": [["a"], ["b"]], "tags": [["O"], ["B-x"]]}
        data = load(path, **own, test_path=str(write(tmp_path / "u.jsonl", other)))
        assert rows(data.splits["train"].targets["tags"]) == [[1, 2, -1], [2]]
        assert rows(data.splits["train"].targets["missed"]) == [[0 * 3 + 0, 1 * 3 + 2, 1 * 3 + 1], [1 * 3 + 2]]
        assert rows(data.splits["test"].targets["missed"]) == [[], []]
        (notice,) = events.notices
        assert notice.startswith(
            f"4 of 7 words in {path} have no token, 2 of them with another tag than O (such as 'A', "
        )
        assert notice.endswith("remedy: a tokenizer that drops no word, such as one with an unknown token")
        (folder := tmp_path / "stored").mkdir()
        data.save(folder)
        stored = Data.load(folder).splits["test"].targets["missed"]
        assert stored.values().shape == (2, 0)

    def test_dropped_words_outside_of_entities_are_in_the_log_alone(self, tmp_path: Path, load: Load, events) -> None:
        tokenizer = Tokenizer(models.BPE({"[PAD]": 0, "a": 1}, []))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        path = write(tmp_path / "t.jsonl", {"words": [["a", "\u200b"]], "tags": [["B-x", "O"]]})
        data = load(path, **TAGS, tokenizer=str(tmp_path / "tokenizer.json"))
        assert events.notices == [] and "missed" in data.splits["train"].targets
        (line,) = [event.text for event in events if isinstance(event, LogLine)]
        assert line.startswith(f"1 of 2 words in {path} have no token, 0 of them with another tag than O ")

    def test_words_that_spell_special_tokens(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.jsonl", {"words": [["[PAD]", "a"]], "tags": [["X", "O"]]})
        data = load(path, **TAGS)
        assert min(token_ids(data)[0][1:]) > 2
        assert [tag for tag in rows(data.splits["train"].targets["tags"])[0] if tag >= 0] == [1, 0]

    def test_tags_of_splits(self, tmp_path: Path, load: Load) -> None:
        words = [[chr(97 + number)] * (number + 1) for number in range(10)]
        path = write(tmp_path / "t.jsonl", {"words": words, "tags": [["O"] * len(of) for of in words]})
        data = load(path, **TAGS, test_size=0.3)
        for split in ("train", "test"):
            numbers = [int(name.rpartition("/")[2]) for name in ids(data, split)]
            assert [of.count(0) for of in rows(data.splits[split].targets["tags"])] == numbers

    @pytest.mark.parametrize(
        ("words", "tags", "message"),
        [
            ([["a", "b"]], [["O"]], r"column 'tags': \['O'\], which are 1 tags for 2 words$"),
            ([["a"]], [["O", "O"]], r"column 'tags': \['O', 'O'\], which are 2 tags for 1 words$"),
            ([["a"], []], [["O"], []], r"row 2, column 'words': \[\], an empty list; remove the row$"),
            ([["a"], None], [["O"], ["O"]], r"row 2, column 'words': an empty list; remove the row$"),
            ([["a"], ["b", None]], [["O"], ["O", "O"]], r"row 2, column 'words': .*in which a value is missing$"),
            ([["a"], ["b"]], [["O"], [None]], r"row 2, column 'tags': .*in which a value is missing$"),
            (["a b"], [["O", "O"]], r"row 1, column 'words': 'a b', which is no list of texts$"),
            ([["a", "b"]], [[1, 2]], r"row 1, column 'tags': \[1, 2\], which is no list of texts$"),
            ([["a"]], ["O"], r"row 1, column 'tags': 'O', which is no list of texts$"),
        ],
    )
    @pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
    def test_lists_that_do_not_fit(
        self, tmp_path: Path, load: Load, suffix: str, words: list[Any], tags: list[Any], message: str
    ) -> None:
        path = write(tmp_path / f"t{suffix}", {"words": words, "tags": tags})
        with pytest.raises(StageError, match=rf"^{path}, row \d, {message}|^{path}, {message}"):
            load(path, **TAGS)

    def test_a_tag_that_train_does_not_have(self, tmp_path: Path, load: Load) -> None:
        train = write(tmp_path / "t.jsonl", sentences())
        test = write(tmp_path / "u.jsonl", {"words": [["a"], ["b", "c"]], "tags": [["O"], ["O", "B-ORG"]]})
        with pytest.raises(
            StageError,
            match=r"u\.jsonl, row 2, column 'tags': .*, where 'B-ORG' is a tag that train does not have$",
        ):
            load(train, **TAGS, test_path=str(test))


class TestBlocks:
    TEXTS = ("the first text", "a second text that is longer", "third", "the last text of all")

    def stream(self, data: Data, texts: Sequence[str] = TEXTS) -> list[int]:
        """The texts' ids and what ends each of them."""
        tokenizer = delivered(data)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [token for of in encodings for token in (*of.ids, tokenizer.token_to_id("[SEP]"))]

    @pytest.mark.parametrize("max_length", [2, 5, 7, 1000])
    def test_each_token_is_followed_by_the_next_over_all_borders(
        self, tmp_path: Path, load: Load, max_length: int
    ) -> None:
        path = write(tmp_path / "t.csv", {"text": self.TEXTS})
        data = load(path, **LANGUAGE, targets=[], max_length=max_length)
        stream, blocks = self.stream(data), token_ids(data)
        following = rows(data.splits["train"].targets["next_tokens"])
        assert flat(blocks) == stream[:-1] and flat(following) == stream[1:]
        assert [len(block) for block in blocks] == [len(block) for block in following]
        assert {len(block) for block in blocks[:-1]} <= {max_length} and 1 <= len(blocks[-1]) <= max_length
        assert ids(data) == [f"train/{number}" for number in range(1, len(blocks) + 1)]
        assert stream.count(2) == 4 and (max_length > 100) == (len(blocks) == 1)

    def test_padding_of_a_shorter_last_block(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.csv", {"text": self.TEXTS})
        (tokens,) = token_ids(load(path, **LANGUAGE, targets=[]))
        data = load(path, **LANGUAGE, targets=[], max_length=len(tokens) - 3)
        tensors = batch_of(data)
        assert tensors["tokens"].tolist() == [tokens[:-3], tokens[-3:] + [0] * (len(tokens) - 6)]
        assert tensors["next_tokens"][1, 3:].tolist() == [-1] * (len(tokens) - 6)
        assert (tensors["next_tokens"][:-1] >= 0).all()

    def test_splits_are_of_whole_texts(self, tmp_path: Path, load: Load) -> None:
        texts = [f"text number {number}" for number in range(20)]
        path = write(tmp_path / "t.csv", {"text": texts})
        data = load(path, **LANGUAGE, targets=[], test_size=0.3, val_size=0.1, max_length=10)
        found = {}
        for split in ("train", "val", "test"):
            tokens = [token for block in token_ids(data, split) for token in block]
            words = delivered(data).decode(tokens, skip_special_tokens=False).split("[SEP]")
            found[split] = [word.strip() for word in words]
        assert sorted(flat(found.values())) == sorted(texts)
        assert [len(of) for of in found.values()] == [13, 1, 6]

    def test_texts_are_not_truncated(self, tmp_path: Path, load: Load, events: list[Any]) -> None:
        path = write(tmp_path / "t.csv", {"text": ["word " * 100, "end"]})
        data = load(path, **LANGUAGE, targets=[], max_length=3)
        assert flat(token_ids(data)) == self.stream(data, ["word " * 100, "end"])[:-1]
        assert not [event for event in events if isinstance(event, LogLine)]

    @pytest.mark.parametrize(("special", "ends"), [({}, []), ({"</s>": 9}, [9]), ({"<|endoftext|>": 8}, [8])])
    def test_what_ends_a_text(self, tmp_path: Path, load: Load, special: dict[str, int], ends: list[int]) -> None:
        tokenizer = own_tokenizer(tmp_path / "t.json", "a b c", {"[PAD]": 0, **special})
        path = write(tmp_path / "t.csv", {"text": ["a b", "c", "a"]})
        data = load(path, **LANGUAGE, targets=[], tokenizer=tokenizer)
        stream = [2, 3, *ends, 4, *ends, 2, *ends]
        assert token_ids(data) == [stream[:-1]]
        assert rows(data.splits["train"].targets["next_tokens"]) == [stream[1:]]


BAD: dict[str, tuple[str, str | bytes, dict[str, Any], str]] = {
    "a missing column": ("t.csv", "txt,y\na,b\n", {}, r" has no column 'text' \(did you mean 'txt'\?\)$"),
    "a missing target": ("t.jsonl", '{"text": "a", "label": "b"}\n', {}, r" has no column 'y' \(it has text, label\)$"),
    "no label": ("t.csv", "text,class\na,b\n", {"targets": []}, r" has no column 'label' \("),
    "an empty text": ("t.jsonl", '{"text": "", "y": "a"}\n', {}, ", row 1, column 'text': '', an empty text"),
    "a blank text": ("t.jsonl", '{"text": " \\n", "y": "a"}\n', {}, ", row 1, column 'text': .*, an empty text"),
    "no-break space": ("t.jsonl", '{"text": "\\u00a0", "y": "a"}\n', {}, ", row 1, column 'text': .*, an empty text"),
    "a null": (
        "t.jsonl", '{"text": "a", "y": "a"}\n{"text": null, "y": "a"}\n', {},
        ", row 2, column 'text': a missing value; remove the row$",
    ),
    "a text left out": (
        "t.jsonl", '{"text": "a", "y": "a"}\n{"y": "a"}\n', {}, ", row 2, column 'text': a missing value; remove",
    ),
    "an empty value": ("t.csv", "text,y\na,b\n,b\n", {}, ", row 2, column 'text': a missing value; remove the row$"),
    "blanks in quotation marks": ("t.csv", 'text,y\na,b\n"  ",b\n', {}, ", row 2, column 'text': '  ', an empty text"),
    "a number for a text": ("t.jsonl", '{"text": 7, "y": "a"}\n', {}, " can't be read: .*/text.* to number"),
    "a label of two types": ("t.jsonl", '{"text": "a", "y": 1}\n{"text": "b", "y": "x"}\n', {}, " can't be read: .*/y"),
    "a lone surrogate": ("t.jsonl", '{"text": "a \\ud800 b", "y": "a"}\n', {}, " can't be read: .*surrogate"),
    "not UTF-8, JSON": ("t.jsonl", b'{"text": "\xff", "y": "a"}\n', {}, " can't be read: .*UTF"),
    "not UTF-8, CSV": ("t.csv", b"text,y\n\xff,a\n", {}, " can't be read: .*(?i:utf)"),
    "not UTF-8, lines": ("t.txt", b"a\n\xff", LANGUAGE | {"targets": []}, " can't be read: it is not UTF-8 text, at b"),
    "UTF-16, lines": ("t.txt", b"a\0\n\0", LANGUAGE | {"targets": []}, " can't be read: it is UTF-16 text; save it as"),
    "no rows, CSV": ("t.csv", "text,y\n", {}, " has no rows$"),
    "no rows, JSON": ("t.jsonl", "\n\n", {}, " has no rows$"),
    "nothing, CSV": ("t.csv", "", {}, " can't be read: Empty CSV file"),
    "nothing, JSON": ("t.jsonl", "", {}, " can't be read: Empty JSON file"),
    "nothing, Parquet": ("t.parquet", "", {}, " can't be read: "),
    "nothing, lines": ("t.txt", "\n \n", LANGUAGE | {"targets": []}, " has no text$"),
    "half an object": ("t.jsonl", '{"text": "a"', {}, " can't be read: JSON parse error"),
    "lists for objects": ("t.jsonl", '["a"]\n', {}, " can't be read: JSON parse error"),
    "nested": ("t.jsonl", '{"text": ' + "[" * 10_000 + "\n", {}, " can't be read: JSON parse error"),
    "lines for a classification": ("t.txt", "a\n", {}, ": a file of lines has no targets; the task classification"),
    "lines for tags": ("t.txt", "a\n", TAGS, ": a file of lines has no targets; the task token_classif"),
    "another suffix": ("t.docx", "a", {}, r": texts are in \.csv, .* or \.txt files, or in folders$"),
    "an empty folder": ("t/.hidden/1.txt", "a", {"targets": []}, r" has no folders of \.txt files: a folder per class"),
    "a folder of files alone": ("t/1.txt", "a", {"targets": []}, r" has no folders of \.txt files: a folder per class"),
    "a class without texts": ("t/a/1.md", "a", {"targets": []}, r"/a has no \.txt files$"),
    "a blank file": ("t/a/1.txt", " \n", {"targets": []}, r", row a/1\.txt, column 'text': .*, an empty text"),
    "a file that is not UTF-8": ("t/a/1.txt", b"\xff", {"targets": []}, r"/a/1\.txt can't be read: it is not UTF-8"),
    "a folder with targets": ("t/a/1.txt", "a", {}, ": the classes of texts in folders are the folders; the task is"),
    "a folder of another task": ("t/a/1.txt", "a", LANGUAGE | {"targets": []}, ": the classes of texts in folders are"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "options", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(
    tmp_path: Path, load: Load, name: str, content: str | bytes, options: dict[str, Any], message: str
) -> None:
    source = write_files(tmp_path, {name: content}) / name.partition("/")[0]
    with pytest.raises(StageError, match=rf"^{source}{message}") as caught:
        load(source, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_a_class_that_train_does_not_have(tmp_path: Path, load: Load, suffix: str) -> None:
    train = write(tmp_path / f"train{suffix}", reviews())
    test = write(tmp_path / f"test{suffix}", {"text": ["a", "b"], "y": ["pos", "meh"]})
    with pytest.raises(StageError, match=rf"^{test}, row 2, column 'y': 'meh', a class that no row of train has"):
        load(train, test_path=str(test))


def test_a_class_folder_that_train_does_not_have(tmp_path: Path, load: Load) -> None:
    files = {"train/a/1.txt": "x", "train/b/1.txt": "y", "test/c/1.txt": "z"}
    with pytest.raises(StageError, match=r"/test, row c/1\.txt, column 'label': 'c', a class that no row of train has"):
        load(write_files(tmp_path, files), targets=[])


def test_a_folder_beside_a_file(tmp_path: Path, load: Load) -> None:
    file = write(tmp_path / "t.csv", reviews())
    folder = write_files(tmp_path / "films", {"a/1.txt": "x"})
    with pytest.raises(
        StageError, match=rf"^{folder} is a folder, and {file} is a file: both must be one or the other$"
    ):
        load(file, val_path=str(folder))
    with pytest.raises(StageError, match=rf"^val_path and test_path go with files; {folder} is a folder"):
        load(folder, targets=[], test_path=str(file))


@pytest.mark.parametrize("option", ["path", "val_path", "test_path"])
def test_a_file_that_is_not_there(tmp_path: Path, load: Load, option: str) -> None:
    path = write(tmp_path / "t.csv", reviews())
    with pytest.raises(StageError, match=r"nowhere\.csv does not exist$"):
        load(**{"path": path} | {option: str(tmp_path / "nowhere.csv")})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["a", "b"]}, "the task classification has 1 target "),
        (TAGS | {"targets": ["a", "b"]}, "the task token_classification has 1 target "),
        (TAGS | {"targets": []}, "the task token_classification needs targets: the columns to predict"),
        (LANGUAGE | {"targets": ["a"]}, "the task language_modeling has no targets "),
        ({"task": "regression", "targets": []}, "the task regression needs targets"),
        ({"task": "multi_label", "targets": []}, "the task multi_label needs targets"),
        ({"targets": ["text"]}, "'text' is the column of texts, and among the targets"),
        ({"text": "y"}, "'y' is the column of texts, and among the targets"),
        (
            {"tokenizer": "t.json", "vocabulary_size": 300},
            "vocabulary_size is an option of a trained tokenizer; t.json",
        ),
        ({"tokenizer": "t.json", "lowercase": False}, "lowercase is an option of a trained tokenizer; t.json is one"),
        ({"vocabulary_size": 299}, "greater than or equal to 300"),
        ({"max_length": 1}, "greater than or equal to 2"),
        ({"max_length": 65_537}, "less than or equal to 65536"),
        ({"padding": "none"}, "'longest' or 'max_length'"),
        ({"task": "translation"}, "'classification'.* or 'language_modeling'"),
        ({"column_names": ["text", "text"]}, "column_names has 'text' twice"),
        ({"column_names": []}, "at least 1 item"),
        (LANGUAGE | {"targets": [], "loss": "mse"}, "loss is an option of the task regression"),
        (LANGUAGE | {"targets": [], "classes": {}}, "classes is an option of the task classification"),
    ],
)
def test_options_that_do_not_fit_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(Path("t.csv"), **options)


WRITABLE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda text: text.strip())


@settings(max_examples=40)
@given(
    st.lists(WRITABLE, min_size=2, max_size=6),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from([",", "\t"]),
)
def test_any_text_is_the_same_in_every_file(texts: list[str], quoting: Any, delimiter: str) -> None:
    table = {"text": texts, "y": ["a", *["b"] * (len(texts) - 1)]}
    with tempfile.TemporaryDirectory() as folder:
        names = ("t.csv" if delimiter == "," else "t.tsv", "t.jsonl", "t.parquet")
        loaded = [load_text(write(Path(folder) / name, table, quoting), max_length=300) for name in names]
    expected = [text if text[0].isspace() else f" {text}" for text in texts]
    for data in loaded:
        assert token_ids(data) == token_ids(loaded[-1]) and data.assets == loaded[-1].assets
        decoded = delivered(data).decode_batch(token_ids(data))
        assert [text.lstrip(" ") for text in decoded] == [text.lstrip(" ") for text in expected]
        assert delivered(data).encode_batch(texts)[0].ids[: len(token_ids(data)[0])] == token_ids(data)[0]


def test_the_fingerprint_is_the_contents(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", reviews())
    tokenizer = Path(own_tokenizer(tmp_path / "tokenizer.json", "a b", {"[PAD]": 0}))
    fingerprint = front.load_text.fingerprint
    both = fingerprint(config(path, tokenizer=str(tokenizer)))
    assert both.keys() == {str(path), str(tokenizer)} and fingerprint(config(path, tokenizer=str(tokenizer))) == both
    own_tokenizer(tokenizer, "b a", {"[PAD]": 0})
    assert fingerprint(config(path, tokenizer=str(tokenizer))) != both
    folder = write_files(tmp_path / "films", {"train/a/1.txt": "x", "test/a/1.txt": "y", "test/a/1.md": "z"})
    before = fingerprint(config(folder, targets=[]))
    assert list(before) == [str(folder / "train/a/1.txt"), str(folder / "test/a/1.txt")]
    (folder / "test/a/1.txt").write_text("z")
    assert fingerprint(config(folder, targets=[])) != before


def test_importing_and_keys_need_neither_torch_nor_numpy_nor_pyarrow(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", reviews())
    code = (
        "import sys, ptpipe_data as front; "
        f"config = front.TextConfig(path={str(path)!r}, task='classification', targets=('y',)); "
        "assert front.load_text.fingerprint(config) and list(front.load_text.preflight(config)) == []; "
        "print([name for name in ('torch', 'numpy', 'pyarrow', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("missing", [("tokenizers",), ("pyarrow",), ("pyarrow", "tokenizers")])
def test_preflight_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]) -> None:
    path = write(tmp_path / "t.csv", reviews())
    found = importlib.util.find_spec
    monkeypatch.setattr(front, "find_spec", lambda name: None if name in missing else found(name))
    (problem,) = front.load_text.preflight(config(path))
    assert problem == f"data.text needs {' and '.join(missing)}: pip install 'ptpipe[text]'"


def test_texts_of_a_group_stay_in_one_split(tmp_path: Path, load: Load) -> None:
    users = [number // 4 for number in range(40)]
    path = write(tmp_path / "t.csv", reviews(40) | {"user": users})
    splits = load(path, group="user", test_size=0.2, val_size=0.1).splits
    found = [{users[int(id_.partition("/")[2]) - 1] for id_ in splits[name].ids} for name in ("train", "val", "test")]
    assert [len(of) for of in found] == [7, 1, 2] and len(set().union(*found)) == 10
    with pytest.raises(ValidationError, match="group: 'text' is the column of texts"):
        load(path, group="text")
