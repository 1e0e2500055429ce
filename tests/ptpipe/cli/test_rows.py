from __future__ import annotations

import re

import pytest

from ptpipe import UsageError
from ptpipe.cli.rows import Cell, html_page, markdown_table, print_rows, sorted_rows, split_columns


def row(**values):
    return {name: Cell.of(value) for name, value in values.items()}


ROWS = [row(run="b", size=10, lr=0.1, seed=7), row(run="a", size=9, lr=None, seed=7), row(run="c", size=100, seed=7)]


def names(rows):
    return [each["run"].text for each in rows]


def test_rows_are_sorted_by_values_and_those_without_one_are_last():
    assert names(sorted_rows(ROWS, None)) == ["b", "a", "c"]
    assert names(sorted_rows(ROWS, "size")) == ["a", "b", "c"]  # 9 before 10: not by text
    assert names(sorted_rows(ROWS, "-size")) == ["c", "b", "a"]
    assert names(sorted_rows(ROWS, "-run")) == ["c", "b", "a"]
    assert names(sorted_rows(ROWS, "lr")) == names(sorted_rows(ROWS, "-lr")) == ["b", "a", "c"]
    assert names(sorted_rows([row(run="b", n="x"), row(run="a", n=3)], "n")) == ["a", "b"]


def test_a_column_that_is_not_there():
    with pytest.raises(UsageError, match=r"--sort siez: there is no such column \(did you mean 'size'\?\)"):
        sorted_rows(ROWS, "siez")
    with pytest.raises(UsageError, match="--sort zebra: there is no such column; there are run, size, lr, seed"):
        sorted_rows(ROWS, "zebra")


def test_columns_that_do_not_differ_are_named_below(capsys):
    assert split_columns(ROWS, ["run"]) == (["run", "size", "lr"], {"seed": "7"})
    assert split_columns(ROWS[:1], []) == (["run", "size", "lr", "seed"], {})
    assert split_columns([row(run="a", x=""), row(run="a", x="")], ["run"]) == (["run"], {})
    print_rows(ROWS, ["run"], None, "Runs", ["a note"])
    assert capsys.readouterr().out.splitlines() == [
        "run  size  lr",
        "b    10    0.1",
        "a    9",
        "c    100",
        "a note",
        "the same in all: seed 7",
    ]


def test_a_narrow_terminal_names_what_it_has_no_room_for(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    wide = [row(**{f"column{number}": number * each for number in range(9)}) for each in (1, 2)]
    print_rows(wide, ["column0"], None, "Runs")
    assert "no room for: column4, column5, column6, column7, column8" in capsys.readouterr().out


ATTACK = "<script>alert(1)</script>|`\x1b[31m\n& *x* [y](z)"


def test_markdown_is_text():
    table = markdown_table(["run", ATTACK], [row(run=ATTACK)])
    assert len(table.splitlines()) == 3
    assert not re.search(r"(?<!\\)[<*`\[]", table) and "\x1b" not in table
    assert all(line.count("|") - line.count("\\|") == 3 for line in table.splitlines())


def test_html_is_a_page_of_its_own_whose_text_is_text():
    page = html_page(ATTACK, ["run", ATTACK], [row(run=ATTACK), row(run=3)], [ATTACK])
    assert page.count("&lt;script&gt;") == 5 and "<script" not in page and "\x1b" not in page
    assert "default-src 'none'" in page and not re.search(r"https?:|src=|href=", page)
    assert '<td class="number">3</td><td></td>' in page
