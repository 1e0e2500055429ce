"""Trackers: reporters that send a run to TensorBoard or MLflow, where the user asked for it.

The environment variable `PTPIPE_TRACKERS` names them (`tensorboard,mlflow`). It is no option of a manifest: trackers
decide nothing about results, and a manifest runs where none is installed. An installed package alone switches nothing
on.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib import import_module

from ptpipe import Problem, Reporter, nearest

VARIABLE = "PTPIPE_TRACKERS"
_CLASSES = {"tensorboard": "TensorBoardTracker", "mlflow": "MlflowTracker"}


def tracker_problems() -> Iterator[Problem]:
    """Yield a problem for each named tracker that does not exist or is not installed."""
    for name in _named():
        if name not in _CLASSES:
            known = " and ".join(_CLASSES)
            yield Problem(f"{VARIABLE}: there is no tracker {name!r}, but {known}", suggestion=nearest(name, _CLASSES))
        elif importlib.util.find_spec(name) is None:
            yield Problem(f"{VARIABLE}: {name} is not installed: pip install 'ptpipe[{name}]'")


def new_trackers() -> Iterator[Reporter]:
    """Yield a new tracker for each name; what `tracker_problems` names is left out."""
    for name in _named():
        if name in _CLASSES:
            tracker: Reporter = getattr(import_module(f"{__name__}.{name}"), _CLASSES[name])()
            yield tracker


def _named() -> list[str]:
    words = (word.strip() for word in os.environ.get(VARIABLE, "").split(","))
    return list(dict.fromkeys(word for word in words if word))
