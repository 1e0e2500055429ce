"""Import torchvision, also beside a CPU build of torch.

The registry's torchvision wheel is built for CUDA; beside a CPU torch its C++ operators are absent, and importing
it stops where it registers shapes for two of them. Declaring their schemas is enough: data sets, transforms and
classification models need none of them. Where the operators are there, nothing is declared.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.library import Library

_SYMPTOM = "operator torchvision::nms does not exist"


def torchvision() -> ModuleType:
    """The torchvision module, importable beside any torch.

    Raises ImportError where it isn't installed, RuntimeError where it doesn't fit torch for another reason.
    """
    return _imported()[0]


@cache  # which keeps the Library objects too: a schema goes when its Library is collected
def _imported() -> tuple[ModuleType, list[Library]]:
    try:
        return _import(), []
    except RuntimeError as error:
        if _SYMPTOM not in str(error):
            raise
    libraries = _declare_operators()
    try:
        return _import(), libraries
    except BaseException:
        libraries.clear()  # the traceback would keep them
        raise


def _import() -> ModuleType:
    """Import torchvision; a failed try leaves none of its modules behind, so that the next one starts anew."""
    try:
        return importlib.import_module("torchvision")
    except BaseException:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        raise


def _declare_operators() -> list[Library]:
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return [library]
