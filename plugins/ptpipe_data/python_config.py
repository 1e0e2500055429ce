"""Options of `data.python`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, WithJsonSchema, model_validator

from ptpipe_data.config import ArrayTask, ArrayTaskConfig, Augmentation, Size

_ANY_JSON = {"type": ["boolean", "integer", "number", "string", "array", "object", "null"]}


class PythonDataConfig(ArrayTaskConfig):
    """Options of `data.python`."""

    file: str = Field(min_length=1, description="a Python file, relative to the working directory")
    function: str = Field(
        pattern=r"^[^\W\d]\w*$",
        description="a function in it that returns, by split (train, val, test), a torch Dataset, arrays or tensors: "
        "inputs and target in this order, or by name",
    )
    arguments: dict[str, Annotated[JsonValue, WithJsonSchema(_ANY_JSON)]] = Field(
        {}, max_length=100, description="what the function is called with, by name"
    )
    inputs: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="names of the inputs, in the order of a network's arguments; none: input (or input_0, "
        "input_1, ...) without names, all but the target with names",
    )
    images: tuple[str, ...] = Field(
        (),
        description="inputs that are pixels, uint8 or PIL images: they are normalized by train, and may be augmented",
    )
    target: str = Field("target", min_length=1, description="name of the target, where there are names")
    task: ArrayTask = Field(
        description="classification: numbers of classes, or names; multi_label: 0 or 1 for each label; regression: "
        "numbers, also for each pixel or time step; segmentation: the number of a class for each pixel; unlabeled: "
        "there is no target, and networks return anything"
    )
    loss_function: str | None = Field(
        None,
        pattern=r"^[^\W\d]\w*$",
        description="a function in the file, (outputs, targets) -> the loss of each sample; none: the task's",
    )
    metric_function: str | None = Field(
        None,
        pattern=r"^[^\W\d]\w*$",
        description="a function in the file, (outputs, targets) -> a number for each sample, whose mean is the metric "
        "that models are compared by; none: the task's",
    )
    higher_is_better: bool = Field(True, description="of two values of metric_function, which one is better")
    augment: tuple[Augmentation, ...] = Field(
        (), description="augmentations of training batches of images, in this order: see data.image_folder"
    )
    test_size: Size | None = Field(
        None,
        description="maximum number of test samples; without a test split: fraction or number of all samples held out "
        "for test (none: 0.2)",
    )
    reads: tuple[str, ...] = Field(
        (),
        max_length=1000,
        description="files and folders that the function reads and that Python does not open, as for PyArrow, OpenCV "
        "and HDF5, or more than 20,000 files: a change of one reruns the stage, as for a file that Python opens",
    )

    @model_validator(mode="after")
    def _fits_itself(self) -> Self:
        if self.augment and not self.images:
            raise ValueError("augment is for images: name these inputs under images")
        if self.loss_function and (self.loss or self.classes):
            raise ValueError("loss and classes are options of the task's own loss, and there is a loss_function")
        if self.task == "unlabeled" and (self.loss_function or self.metric_function):
            raise ValueError("loss_function and metric_function need a target, which the task unlabeled has not")
        if self.inputs is not None:
            if len({*self.inputs, self.target}) <= len(self.inputs):
                raise ValueError("the inputs and the target need different names")
            for name in self.images:
                if name not in self.inputs:
                    raise ValueError(f"images: {name!r} is not among the inputs")
        return self
