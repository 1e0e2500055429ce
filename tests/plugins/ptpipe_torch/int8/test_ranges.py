from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import IntegrityError
from ptpipe_torch import Ranges

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(st.text(max_size=20), st.tuples(FINITE, FINITE), max_size=5), st.integers(0, 10**9))
def test_there_and_back(tmp_path_factory, limits, num_samples) -> None:
    folder = tmp_path_factory.mktemp("ranges")
    ranges = Ranges(limits, num_samples)
    ranges.save(folder)
    assert Ranges.load(folder) == ranges
    assert ranges.summary() == {"num_tensors": len(limits), "num_samples": num_samples}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"limits": {"a": [1]}, "num_samples": 1}',
        '{"limits": {"a": ["x", 1]}, "num_samples": 1}',
        '{"limits": {}, "num_samples": "many"}',
        "\xff\xfe",
    ],
)
def test_anything_else_is_refused(tmp_path, content) -> None:
    (tmp_path / "ranges.json").write_text(content, encoding="latin-1")
    with pytest.raises(IntegrityError, match="not a file of ranges"):
        Ranges.load(tmp_path)
