"""The words that the torch plugins share. Importing this imports neither torch nor numpy."""

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
