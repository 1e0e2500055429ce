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


@cache
def torchvision() -> ModuleType:
    """The torchvision module, importable beside any torch."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declare_operators()
    return importlib.import_module("torchvision")


@cache  # which also keeps the Library objects: a schema goes when its Library is collected
def _declare_operators() -> list[object]:
    import torch

    libraries = []
    for name in ("nms", "qnms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        libraries.append(library)
    return libraries
