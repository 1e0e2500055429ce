"""The words that the torch plugins share. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from ptpipe import Check, hookimpl
from ptpipe_torch.data.data import ArrayImages, Batch, Data, DatasetInfo, Images, LoaderOptions, Split, epoch_order
from ptpipe_torch.int8.ranges import Ranges
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.model.model import Model, Recipe
from ptpipe_torch.model.onnx_file import OnnxFile
from ptpipe_torch.model.predictions import Predictions
from ptpipe_torch.model.registry import FunctionRef, builder, transform
from ptpipe_torch.protocols import RangeObserver, TrainingCallback

__all__ = [
    "ArrayImages",
    "Batch",
    "Data",
    "DatasetInfo",
    "Deployable",
    "FunctionRef",
    "Images",
    "LoaderOptions",
    "Model",
    "OnnxFile",
    "Predictions",
    "Predictor",
    "RangeObserver",
    "Ranges",
    "Recipe",
    "Split",
    "TrainingCallback",
    "builder",
    "epoch_order",
    "transform",
]


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Look at torch, torchvision, the processor and the CUDA devices."""
    from ptpipe_torch.doctor import findings

    return findings()


@hookimpl(wrapper=True)
def ptpipe_launch() -> Generator[None, Any, Any]:
    """Free the memory of a stage that ran in this process before its results are stored."""
    from ptpipe_torch.runtime import released_memory

    with released_memory():
        return (yield)
