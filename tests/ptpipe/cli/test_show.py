"""`ptpipe show` on a terminal: nothing of a value is cut off."""

import sys

from ptpipe.cli.common import print_entries

ENTRIES = {"first": "loss=0.25, val_accuracy=0.987654321, precision=fp32", "second_stage": "worst_layer=" + "x" * 60}


def test_entries_are_folded_on_a_terminal_between_words(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    print_entries("metrics", ENTRIES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "",
        "metrics",
        "first         loss=0.25,",
        "              val_accuracy=0.987654321,",
        "              precision=fp32",
    ]
    assert lines[5] == f"second_stage  {ENTRIES['second_stage']}"  # wider than the terminal, whole all the same


def test_entries_are_whole_lines_in_a_pipe(capsys):
    print_entries("metrics", ENTRIES)
    assert capsys.readouterr().out.splitlines()[2] == f"first         {ENTRIES['first']}"


def test_nothing_is_printed_without_entries(capsys):
    print_entries("metrics", {})
    assert capsys.readouterr().out == ""
