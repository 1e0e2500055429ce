"""The words that the torch plugins share. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable

from ptpipe import Finding, hookimpl
from ptpipe_torch.data import ArrayImages, Batch, Data, DataFacts, Images, LoaderOptions, Split, epoch_order
from ptpipe_torch.deployable import Deployable, Predictor
from ptpipe_torch.model import Model, Recipe
from ptpipe_torch.onnx_file import OnnxFile
from ptpipe_torch.predictions import Predictions
from ptpipe_torch.ranges import Ranges
from ptpipe_torch.registry import Part, builder, transform
from ptpipe_torch.training import RangeHolder, TrainingListener

__all__ = [
    "ArrayImages",
    "Batch",
    "Data",
    "DataFacts",
    "Deployable",
    "Images",
    "LoaderOptions",
    "Model",
    "OnnxFile",
    "Part",
    "Predictions",
    "Predictor",
    "RangeHolder",
    "Ranges",
    "Recipe",
    "Split",
    "TrainingListener",
    "builder",
    "epoch_order",
    "transform",
]


@hookimpl
def ptpipe_diagnose() -> Iterable[Finding]:
    """Look at torch, torchvision, the processor and the CUDA devices."""
    from ptpipe_torch.diagnosis import findings

    return findings()
