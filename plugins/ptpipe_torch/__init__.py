"""Shared types of the torch plugins: models, data, worker groups. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from ptpipe import Check, hookimpl
from ptpipe_torch.data.column import ArrayColumn, Column, RaggedColumn
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo, ImageInfo
from ptpipe_torch.data.data import Batch, Data, LoaderOptions, Split
from ptpipe_torch.data.dataset_info import DatasetInfo
from ptpipe_torch.data.images import ImageFileColumn
from ptpipe_torch.data.meaning import Misfit
from ptpipe_torch.data.order import epoch_order
from ptpipe_torch.data.raw_form import InputForm, RawForm
from ptpipe_torch.data.resizing import Resizing
from ptpipe_torch.data.tokens import LENGTH, TokensInfo
from ptpipe_torch.distributed.worker_group import (
    SINGLE_WORKER,
    WorkerGroup,
    WorkerGroupError,
    group_device,
    init_worker_group,
    is_comm_failure,
)
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.ranges import Ranges
from ptpipe_torch.model.deployable import Deployable, Predictor
from ptpipe_torch.model.function_ref import FunctionRef, builder, transform
from ptpipe_torch.model.model import Model
from ptpipe_torch.model.onnx_file import FileInterface, OnnxFile
from ptpipe_torch.model.predictions import Predictions
from ptpipe_torch.model.recipe import Recipe
from ptpipe_torch.model.selected import Selected
from ptpipe_torch.model.signature import BATCH, Signature, TensorSpec
from ptpipe_torch.protocols import Freezing, RangeObserver, RangeReducer, TrainingCallback, Undecayed
from ptpipe_torch.runtime import (
    exit_with_parent,
    freed_memory_kept,
    released_memory,
    seeded,
    torch_threads,
)
from ptpipe_torch.task.classification import Classification
from ptpipe_torch.task.language_modeling import LanguageModeling
from ptpipe_torch.task.multi_label import MultiLabel
from ptpipe_torch.task.regression import Regression
from ptpipe_torch.task.segmentation import Segmentation
from ptpipe_torch.task.task import Metric, Task
from ptpipe_torch.task.teacher_outputs import TeacherOutputs
from ptpipe_torch.task.token_classification import TokenClassification
from ptpipe_torch.task.unlabeled import Unlabeled
from ptpipe_torch.torch_state import torch_defaults
from ptpipe_torch.torchvision_compat import torchvision

if TYPE_CHECKING:
    from ptpipe_torch.distributed.shared_memory import SharedMemory, share_memory

__all__ = [
    "ArrayColumn",
    "ArrayInfo",
    "BATCH",
    "Batch",
    "Classification",
    "Column",
    "ColumnInfo",
    "Data",
    "DatasetInfo",
    "Deployable",
    "FileInterface",
    "Freezing",
    "FunctionRef",
    "ImageFileColumn",
    "ImageInfo",
    "InputForm",
    "LENGTH",
    "LanguageModeling",
    "LoaderOptions",
    "Metric",
    "Misfit",
    "Model",
    "MultiLabel",
    "OnnxFile",
    "Predictions",
    "Predictor",
    "RaggedColumn",
    "RangeObserver",
    "RangeReducer",
    "Ranges",
    "RawForm",
    "Recipe",
    "Regression",
    "Resizing",
    "SINGLE_WORKER",
    "Segmentation",
    "Selected",
    "SharedMemory",
    "Signature",
    "Split",
    "Task",
    "TeacherOutputs",
    "TensorSpec",
    "TokenClassification",
    "TokensInfo",
    "TrainingCallback",
    "Undecayed",
    "Unlabeled",
    "WorkerGroup",
    "WorkerGroupError",
    "builder",
    "epoch_order",
    "exit_with_parent",
    "freed_memory_kept",
    "group_device",
    "init_worker_group",
    "is_comm_failure",
    "quantized_engine",
    "released_memory",
    "seeded",
    "share_memory",
    "torch_threads",
    "torchvision",
    "transform",
]


def __getattr__(name: str) -> Any:
    if name not in ("SharedMemory", "share_memory"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ptpipe_torch.distributed import shared_memory  # imports torch

    return getattr(shared_memory, name)


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Check torch, torchvision, the processor and the CUDA devices."""
    from ptpipe_torch.doctor import run_checks

    return run_checks()


@hookimpl(wrapper=True, tryfirst=True)  # what other wrappers set for the stage then stays set inside
def ptpipe_launch() -> Generator[None, Any, Any]:
    """Give the stage torch's own settings; free the memory that it no longer needs, before its results are stored."""
    with torch_defaults(), released_memory():
        return (yield)
