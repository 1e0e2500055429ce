"""Names and quotation marks of CSV and TSV files, as the reader of tables has them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import StageError
from ptpipe_data import table_csv
from ptpipe_data.table_config import TableConfig
from ptpipe_data.table_file import TableFile, read_files, read_table

CLASSES: dict[str, Any] = {"task": "classification", "targets": ("y",)}


def config(path: Path | str, **options: Any) -> TableConfig:
    return TableConfig(**{"path": str(path)} | CLASSES | options)


def read(path: Path, content: str, **options: Any) -> TableFile:
    path.write_text(content, encoding="utf-8", newline="")
    return read_table(str(path), config(path, **options))


def column_of(values: list[str]) -> str:
    """A file of one input and the target `y`."""
    return "a,y\n" + "".join(f"{row},{value}\n" for row, value in enumerate(values))


class TestNames:
    """Values that identify something are no numbers, whatever they look like."""

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (["02134", "2134", "90210"], None),
            (["01", "02", "1"], None),
            (["12345678901234567890", "12345678901234567891"], None),
            (["1E5", "100000", "1e5"], None),
            (["1.10", "1.1", "2.50"], None),
            (["2020-01-01", "2021-01-01"], None),
            (["12:30", "13:30"], None),
            (["2020-01-01 10:00:00", "2021-01-01 10:00:00"], None),
            (["1.0", "2", " 10", "-3.0", "-0.5"], ["1", "2", "10", "-3", "-0.5"]),
            (["True", "false", "TRUE"], ["true", "false", "true"]),
        ],
    )
    @pytest.mark.parametrize("is_target", [True, False])
    def test_they_stay_as_they_are_written(
        self, tmp_path: Path, values: list[str], expected: list[str] | None, is_target: bool
    ) -> None:
        options = {"targets": ("y",)} if is_target else {"targets": ("a",), "categorical": ("y",)}
        assert read(tmp_path / "t.csv", column_of(values), **options).texts("y") == (expected or values)

    def test_a_missing_number_is_no_name(self, tmp_path: Path) -> None:
        numbers = read(tmp_path / "t.csv", column_of(["01", "NA", "", "02"]))
        assert numbers.texts_or_none("y", allow_missing=True) == ["01", None, None, "02"]
        texts = read(tmp_path / "t.csv", column_of(["A1", "NA", "", "02"]))
        assert texts.texts_or_none("y", allow_missing=True) == ["A1", "NA", None, "02"]

    def test_files_of_val_and_test_are_read_as_that_of_train(self, tmp_path: Path) -> None:
        contents = {"path": ["01", "2.0", "NA"], "val_path": ["01", "x", "NA"], "test_path": ["2", " 01"]}
        for name, values in contents.items():
            (tmp_path / f"{name}.csv").write_text(column_of(values))
        files = read_files(config(**{name: str(tmp_path / f"{name}.csv") for name in contents}))
        assert [file.texts_or_none("y", allow_missing=True) for file in files.values()] == [
            ["01", "2", None], ["01", "x", None], ["2", "01"],
        ]  # fmt: skip

    @pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
    def test_files_of_other_formats_fit(self, tmp_path: Path, suffix: str) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        train, other = tmp_path / "train.csv", tmp_path / f"other{suffix}"
        train.write_text(column_of(["1", "2"]))
        if suffix == ".jsonl":
            other.write_text('{"a": 1, "y": 2}\n{"a": 1, "y": 1}\n')
        else:
            parquet.write_table(pa.table({"a": [1, 1], "y": [2, 1]}), other)
        for first, second in ((train, other), (other, train)):
            files = read_files(config(first, test_path=str(second)))
            assert sorted(files["train"].texts("y")) == sorted(files["test"].texts("y")) == ["1", "2"]

    def test_columns_of_numbers_stay_numbers(self, tmp_path: Path) -> None:
        table = read(tmp_path / "t.csv", "a,y\n02134,1\n3,2\n", task="regression")
        assert table.numbers("a").tolist() == [2134, 3] and table.numbers("y").tolist() == [1, 2]


class TestQuotation:
    @pytest.mark.parametrize("end", ["\n", "\r\n", ""])
    @pytest.mark.parametrize("mark", ['"', '"a ""word"" ', '"""'])
    def test_a_mark_that_is_never_closed_is_refused(self, tmp_path: Path, end: str, mark: str) -> None:
        path = tmp_path / "t.tsv"
        content = (end or "\n").join(["y\ttext", "1\tx", f"2\t{mark}x", "3\tx", "4\tx"]) + end
        message = rf"^{path}, row 2, column 'text': a quotation mark that is never closed: .*set `quoting` to false$"
        with pytest.raises(StageError, match=message):
            read(path, content)
        assert len(read(path, content, quoting=False).content) == 4

    def test_a_column_that_a_mark_swallowed(self, tmp_path: Path) -> None:
        message = r't\.csv, lines 2 to 3: 2 fields, where the header has 3: 1,"x,2 3,.*: if quotation marks are part of'
        with pytest.raises(StageError, match=message):
            read(tmp_path / "t.csv", 'a,b,y\n1,"x,2\n3,x,4\n')

    @pytest.mark.parametrize(
        ("content", "notice"),
        [
            (
                'a,y\n1,u\n2,"v\n3,w"\n4,"x\n\ny"\n',
                "2 values in quotation marks have 3 line breaks, the first in row 2,",
            ),
            ('a,y\n"v\r\n3",w\n', "1 value in quotation marks has 1 line break, the first in row 1, column 'a': if"),
        ],
    )
    def test_line_breaks_in_marks_give_a_notice(self, tmp_path: Path, content: str, notice: str) -> None:
        """Of two stray marks, all rows between them are one value."""
        (found,) = read(path := tmp_path / "t.csv", content).notices
        assert found.startswith(f"{path}: {notice}")

    @pytest.mark.parametrize(("num_lines", "num_notices"), [(3, 0), (40, 1)])
    def test_texts_of_a_few_lines_are_usual_where_many_are(
        self, tmp_path: Path, num_lines: int, num_notices: int
    ) -> None:
        rows = [f'{number},"{chr(10).join(["x"] * num_lines)}"\n' for number in range(30)]
        assert len(read(tmp_path / "t.csv", "a,y\n" + "".join(rows)).notices) == num_notices

    @pytest.mark.parametrize(
        "content", ['a,y\n1,5" x\n2,"v"\n', 'a,y\n1,"5"" x"\n2,"v', 'a,y\n"1","""', 'a,y\n1,"5" """"""""""""']
    )
    def test_other_marks_give_none(self, tmp_path: Path, content: str) -> None:
        assert not read(tmp_path / "t.csv", content).notices


@given(
    st.lists(st.text('"\n\ra,', min_size=1, max_size=6), min_size=1, max_size=4), st.sampled_from(["\n", "\r\n", ""])
)
def test_what_a_writer_quotes_is_never_refused(
    tmp_path_factory: pytest.TempPathFactory, values: list[str], end: str
) -> None:
    path = tmp_path_factory.mktemp("quoted") / "t.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
            [["a", "y"], *(["1", v] for v in values)]
        )
    path.write_bytes(path.read_bytes().removesuffix(b"\n") + end.encode())
    assert read_table(str(path), config(path)).texts("y") == values


class TestRowsOfOtherLengths:
    @pytest.mark.parametrize(
        ("row", "num_fields"), [("7", "1 field"), ("7,8,9", "3 fields"), ("7,", None), (",,", "3 fields"), ("", None)]
    )
    def test_the_line_is_named(self, tmp_path: Path, row: str, num_fields: str | None) -> None:
        """Behind empty lines, which are no rows, and a value of two lines."""
        path = tmp_path / "t.csv"
        content = f'a,y\n\n1,"x\nx"\n{"2,x" + chr(10)}{row}\n3,x\n'
        if num_fields is None:
            read(path, content)
        else:
            with pytest.raises(StageError, match=rf"^{path}, line 6: {num_fields}, where the header has 2: {row}$"):
                read(path, content)

    def test_a_value_that_is_longer_than_pythons_reader_takes(self, tmp_path: Path) -> None:
        with pytest.raises(
            StageError, match=r"t\.csv can't be read: CSV parse error: Expected 2 columns, got 3: 1,2,3$"
        ):
            read(tmp_path / "t.csv", f"a,y\n{'x' * 200_000},1\n1,2,3\n")

    def test_far_down(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In another block of the file than the header."""
        monkeypatch.setattr(table_csv, "BLOCK_BYTES", 1000)
        path, rows = tmp_path / "t.tsv", ["a\ty", *(f"{number}\tx" for number in range(500))]
        rows[432] = rows[470] = "432"
        with pytest.raises(StageError, match=rf"^{path}, line 433: 1 field, where the header has 2: 432$"):
            read(path, "\n".join(rows))

    def test_a_mark_of_byte_order_is_no_part_of_the_header(self, tmp_path: Path) -> None:
        with pytest.raises(StageError, match=r"t\.csv, line 3: 3 fields, where the header has 2: 1,2,3$"):
            read(tmp_path / "t.csv", '\ufeff"a,b",y\n1,2\n1,2,3\n')

    def test_marks_that_are_characters(self, tmp_path: Path) -> None:
        with pytest.raises(StageError, match=r't\.csv, line 3: 1 field, where the header has 2: 5" x$'):
            read(tmp_path / "t.csv", 'a,y\n5" x,1\n5" x\n5" x,2\n', quoting=False)


class TestAdvice:
    def test_semicolons_and_decimal_commas(self, tmp_path: Path) -> None:
        with pytest.raises(
            StageError, match=r"line 2: 3 fields, where the header has 1: 1,5;2,0: \.csv files separate columns by comm"
        ):
            read(tmp_path / "t.csv", "a;y\n1,5;2,0\n2,5;3,0\n")

    @pytest.mark.parametrize("content", ["5.1,3.5,setosa\n4.9,3.0,setosa\n", "ham,hello\nham,hi\nspam,win\n"])
    def test_a_row_in_place_of_a_header(self, tmp_path: Path, content: str) -> None:
        table = read(tmp_path / "t.csv", content)
        with pytest.raises(
            StageError, match=r"has no column 'qqqqqqqq' \(it has .*; if its first line is a row, give t"
        ):
            table.column("qqqqqqqq")
