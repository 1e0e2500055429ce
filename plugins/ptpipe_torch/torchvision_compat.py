"""Import torchvision, also with a CPU build of torch.

PyPI's torchvision wheel is built for CUDA. With a CPU build of torch its C++ operators can't be loaded, and the import
fails where it registers fake implementations for two of them. Declaring their schemas is enough: data sets, transforms
and classification models use none of them. Where the operators exist, nothing is declared.
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
    """Import and return the torchvision module.

    Raises ImportError where it isn't installed, RuntimeError where it is incompatible with torch for another reason.
    """
    return _imported()[0]


def is_of_missing_operators(error: RuntimeError) -> bool:
    """Return whether an import of torchvision failed for its C++ operators alone: `torchvision()` would succeed."""
    return _SYMPTOM in str(error)


@cache  # keeps the Library objects alive too: a schema is unregistered when its Library is collected
def _imported() -> tuple[ModuleType, list[Library]]:
    try:
        return _import(), []
    except RuntimeError as error:
        if not is_of_missing_operators(error):
            raise
    libraries = _declare_operators()
    try:
        return _import(), libraries
    except BaseException:
        libraries.clear()  # the traceback would keep them alive
        raise


def _import() -> ModuleType:
    """Import torchvision; after a failure, remove its modules so that the next attempt starts from scratch."""
    try:
        return importlib.import_module("torchvision")
    except BaseException:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        raise


def _declare_operators() -> list[Library]:
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch.library is not annotated
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return [library]
