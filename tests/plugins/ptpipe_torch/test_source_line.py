"""Lines of code as they stand in messages."""

from __future__ import annotations

import linecache

from ptpipe_torch.source_line import described_line, running_line


def test_a_line_has_its_code() -> None:
    line = running_line(())
    assert line.endswith("test_source_line.py:11: `line = running_line(())`")


def test_code_that_no_file_has_is_left_out(tmp_path, monkeypatch) -> None:
    assert described_line(str(tmp_path / "gone.py"), 3) == f"{tmp_path / 'gone.py'}:3"
    # As Python 3.13 does for `python -c`, of which processes of a test may be started.
    monkeypatch.setitem(linecache.cache, "<string>", (9, None, ["import sys\n"], "<string>"))
    assert described_line("<string>", 1) == "<string>:1"
