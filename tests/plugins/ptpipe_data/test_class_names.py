from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from ptpipe import StageConfig
from ptpipe_data.config import ArraysConfig, SegmentationFolderConfig
from ptpipe_data.image_config import ShardsConfig
from ptpipe_data.python_config import PythonDataConfig

ARRAYS = {"path": "x", "inputs": ("x",), "target": "y", "task": "classification"}


@pytest.mark.parametrize(
    ("config", "options", "name"),
    [
        (ArraysConfig, ARRAYS, "names"),
        (PythonDataConfig, {"file": "x.py", "function": "f", "task": "classification"}, "names"),
        (SegmentationFolderConfig, {"path": "x"}, "class_names"),
        (ShardsConfig, {"path": "x"}, "class_names"),
    ],
)
def test_names_differ(config: type[StageConfig], options: Mapping[str, Any], name: str) -> None:
    assert getattr(config(**options, **{name: ("a", "b")}), name) == ("a", "b")
    for names, message in ((("a", "b", "a"), "has 'a' twice"), ((), "at least 1 item")):
        with pytest.raises(ValidationError, match=message):
            config(**options, **{name: names})
