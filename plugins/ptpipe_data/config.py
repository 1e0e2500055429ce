"""Options of the data.* stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from ptpipe import StageConfig
from ptpipe_data.class_names import ClassNames
from ptpipe_torch import LoaderOptions
from ptpipe_torch.data.data import LOADING_OPTIONS
from ptpipe_torch.data.images import MAX_PIXELS

Augmentation = Literal["crop", "erase", "flip", "rotate", "shift", "zoom"]


def _fraction_or_number(size: float) -> float:
    if size >= 1 and size != int(size):
        raise ValueError("must be a fraction below 1 or a whole number of samples")
    return size


Size = Annotated[float, Field(ge=0), AfterValidator(_fraction_or_number)]
ImageSide = Annotated[int, Field(ge=8, le=4096)]


class ClassesConfig(StageConfig):
    """How the classes of a classification count."""

    weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: weight losses in inverse proportion to how often train has the class"
    )
    focal_gamma: float = Field(
        0.0,
        ge=0,
        le=10,
        description="focal loss: multiply losses by (1 - p)^gamma, p: probability of the label",
    )
    positive: str | None = Field(
        None,
        min_length=1,
        description="the class to find: F1, area under the ROC curve and average precision are computed for it",
    )
    metric: Literal["f1", "roc_auc", "average_precision", "roc_auc_ovr"] = Field(
        "f1",
        description="which of the positive class's metrics models are compared by. Without `positive`, of 3 to 100 "
        "classes: roc_auc_ovr or average_precision, the mean over all classes, each against the rest; f1: accuracy",
    )

    @model_validator(mode="after")
    def _has_the_classes_of_its_metric(self) -> Self:
        if self.metric == "roc_auc" and self.positive is None:
            raise ValueError(f"metric: {self.metric} is of one class: name it as `positive`, or write roc_auc_ovr")
        if self.metric == "roc_auc_ovr" and self.positive is not None:
            raise ValueError("metric: roc_auc_ovr is of all classes: leave out `positive`, or write roc_auc")
        return self


class BatchConfig(StageConfig):
    """Options of batching, named as in torch.utils.data.DataLoader."""

    unkeyed_options: ClassVar[frozenset[str]] = frozenset(LOADING_OPTIONS)

    batch_size: int = Field(128, ge=1, le=1_000_000, description="samples per batch")
    num_workers: int = Field(
        0,
        ge=0,
        le=256,
        description="worker processes that decode and augment; 0: load in the main process. "
        "The batches do not depend on it",
    )
    pin_memory: bool = Field(
        True,
        description="page-locked batches where they are copied to a CUDA device, so that no copy makes the process "
        "wait for the steps before it; false: save that memory",
    )
    prefetch_factor: int = Field(2, ge=1, le=1000, description="batches that each worker loads in advance")
    persistent_workers: bool = Field(False, description="keep the workers alive between epochs")

    @model_validator(mode="after")
    def _has_workers_to_persist(self) -> Self:
        if self.persistent_workers and not self.num_workers:
            raise ValueError("persistent_workers needs num_workers of at least 1")
        return self

    def loader_options(self) -> LoaderOptions:
        """Return these options as `Data` takes them."""
        names = [field.name for field in fields(LoaderOptions) if field.name in type(self).model_fields]
        return LoaderOptions(**{name: getattr(self, name) for name in names})


class SplitConfig(BatchConfig):
    """Options of the splits: what is drawn from the training samples, and how much of a data set is used."""

    val_size: Size = Field(0.05, description="training samples held out for val: a fraction below 1, or a number")
    calibration_size: Size = Field(
        2000,
        description="maximum number of calibration samples: a fraction below 1 of the split they are drawn from, "
        "or a number",
    )
    calibration_from: Literal["train", "val"] = Field("train", description="split that calibration is drawn from")
    train_size: Size | None = Field(
        None, description="maximum number of training samples: a fraction below 1, or a number; none: all"
    )
    test_size: Size | None = Field(
        None, description="maximum number of test samples: a fraction below 1, or a number; none: all"
    )


class ImageConfig(SplitConfig):
    """Options of images."""

    augment: tuple[Augmentation, ...] = Field(
        (),
        description="augmentations of training batches, in this order: crop (after padding by 1/8), erase (a square), "
        "flip (horizontally), rotate (up to 10 degrees), shift (by up to 1/14), zoom (by up to 1/0.7)",
    )


class LabelledImageConfig(ImageConfig):
    """Options of images and their classes."""

    classes: ClassesConfig = Field(ClassesConfig(), description="how the classes count, in training and in metrics")


class CatalogConfig(LabelledImageConfig):
    """Options of data sets that are published as files."""

    path: str | None = Field(None, description="folder of the files, instead of $PTPIPE_DATA and the cache")
    verify: bool = Field(True, description="reject files that differ from the published ones; false: your own data")


class MnistConfig(CatalogConfig):
    """Options of `data.mnist`."""

    renamed_options: ClassVar[Mapping[str, str]] = {"offline": "fallback"}

    fallback: Literal["digits"] | None = Field(
        None, description="digits: use the bundled digits, with a notice, where MNIST can't be downloaded"
    )


class DigitsConfig(LabelledImageConfig):
    """Options of `data.digits`."""


class SyntheticConfig(LabelledImageConfig):
    """Options of `data.synthetic`."""

    num_classes: int = Field(10, ge=2, le=1000, description="number of classes")
    num_train: int = Field(2048, ge=2, le=10_000_000, description="number of training images, including val")
    num_test: int = Field(512, ge=1, le=10_000_000, description="number of test images")
    image_size: int = Field(16, ge=4, le=1024, description="height and width in pixels")
    channels: Literal[1, 3] = Field(1, description="3: RGB; 1: grayscale")
    calibration_size: Size = Field(
        256, description="maximum number of calibration images: a fraction below 1, or a number"
    )


ArrayTask: TypeAlias = Literal["classification", "multi_label", "regression", "segmentation", "unlabeled"]
PixelValue: TypeAlias = Annotated[int, Field(ge=0, le=255)]
Ignore: TypeAlias = Annotated[
    int, Field(ge=0, le=255, description="value of mask pixels that don't count, in training or in metrics")
]


class TaskConfig(SplitConfig):
    """Options of data sets whose task is chosen."""

    classes: ClassesConfig | None = Field(
        None, description="how the classes of a classification count, in training and in metrics; none: alike"
    )
    loss: Literal["mse", "mae", "huber"] | None = Field(
        None, description="loss of a regression, in standard deviations of the targets; none: mse"
    )
    huber_delta: float | None = Field(
        None, gt=0, description="where huber turns from squares to absolute values, in standard deviations; none: 1"
    )
    task: str

    @model_validator(mode="after")
    def _fits_the_task(self) -> Self:
        if self.task != "regression" and self.loss:
            raise ValueError("loss is an option of the task regression")
        if self.task != "classification" and self.classes:
            raise ValueError("classes is an option of the task classification")
        if self.loss != "huber" and self.huber_delta is not None:
            raise ValueError("huber_delta is an option of the loss huber")
        return self


class TokensConfig(StageConfig):
    """What an input of token ids holds."""

    padding_id: int = Field(0, ge=0, description="the id that rows end with where they have fewer tokens")
    vocabulary_size: int | None = Field(None, ge=2, description="number of ids; none: one more than the largest")

    @model_validator(mode="after")
    def _has_padding(self) -> Self:
        if self.vocabulary_size and self.padding_id >= self.vocabulary_size:
            raise ValueError("padding_id is not among the ids 0 to vocabulary_size - 1")
        return self


class ArrayTaskConfig(TaskConfig):
    """Options of data sets whose targets are arrays."""

    tokens: dict[str, TokensConfig] = Field(
        {},
        max_length=100,
        description="inputs of token ids, (N, length), padded on the right, and masks of them: a batch is padded to "
        "its longest row alone, and exported files take any length",
    )
    names: ClassNames | None = Field(
        None,
        description="names of the classes, labels or targets, in the order of their numbers; none: 0, 1, 2, ..., or "
        "the sorted names that the target has",
    )
    ignore: Ignore = 255
    data_range: float | None = Field(
        None,
        gt=0,
        description="difference of the largest and the smallest value that a regression's targets can have (1, 255): "
        "reports the peak signal-to-noise ratio (PSNR), by which models are compared; none: not reported",
    )

    @model_validator(mode="after")
    def _fits_the_array(self) -> Self:
        if self.task != "regression" and self.data_range is not None:
            raise ValueError("data_range is an option of the task regression")
        return self


class PathsConfig(TaskConfig):
    """Options of data sets whose splits are files or folders."""

    path: str
    val_path: str | None = Field(None, description="the same for val; none: val is drawn from path")
    test_path: str | None = Field(None, description="the same for test; none: test is drawn from path")
    test_size: Size | None = Field(
        None,
        description="maximum number of test samples; without test_path: fraction or number of all samples held out for "
        "test (none: 0.2)",
    )

    @property
    def paths(self) -> Mapping[str, str]:
        """The path of train, first, and those of val and test, where they have their own."""
        paths = {"train": self.path, "val": self.val_path, "test": self.test_path}
        return {name: path for name, path in paths.items() if path is not None}


class ArraysConfig(PathsConfig, ArrayTaskConfig):
    """Options of `data.arrays`."""

    path: str = Field(description="a .npz or .safetensors file, or a folder of .npy files, whose names are the arrays'")
    inputs: tuple[str, ...] = Field(
        min_length=1, max_length=100, description="the arrays that a network takes, in the order of its arguments"
    )
    images: tuple[str, ...] = Field(
        (),
        description="inputs that are pixels, uint8 (N, height, width) or with 1 or 3 channels as last or second axis: "
        "they are normalized by train",
    )
    target: str | None = Field(None, description="the array to predict; of the task unlabeled, none")
    task: ArrayTask = Field(
        description="classification: numbers of classes, truth values or names (N,); multi_label: 0 or 1, "
        "(N, labels); regression: numbers, (N,), (N, targets) or, for maps, images and signals, (N, targets, ...) as "
        "the network returns them; segmentation: integers (N, height, width), numbers of classes; unlabeled: no "
        "target, networks return anything"
    )

    @model_validator(mode="after")
    def _names_each_array_once(self) -> Self:
        if (self.target is None) != (self.task == "unlabeled"):
            raise ValueError("target: every task has one, but for the task unlabeled")
        names = (*self.inputs, self.target)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is named twice, in inputs or as target")
        for name in self.images:
            if name not in self.inputs:
                raise ValueError(f"images: {name!r} is not among the inputs")
        return self


class SegmentationFolderConfig(ImageConfig):
    """Options of `data.segmentation_folder`."""

    path: str = Field(
        description="folder with `images` and `masks`, or with train, test and optionally val, each with these two"
    )
    class_names: ClassNames = Field(
        max_length=255, description="names of the classes of the masks' pixels, in the order of their numbers"
    )
    values: tuple[PixelValue, ...] = Field(
        (), description="the pixel value of each class, as [0, 255] of black and white masks; empty: 0, 1, 2, ..."
    )
    ignore: PixelValue | None = Field(
        None,
        description="value of mask pixels that don't count, in training or in metrics; none: 255 where no class has it",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: weight pixels' losses in inverse proportion to how often train has their class"
    )
    image_size: tuple[ImageSide, ImageSide] | None = Field(
        None,
        description="height and width that images (bilinear) and masks (nearest) are resized to; none: as they are, "
        "all of one size",
    )
    normalize: Literal["imagenet", "measured"] = Field(
        "measured",
        description="measured: by the training images' mean and standard deviation; imagenet: by ImageNet's, as "
        "pretrained weights expect",
    )
    max_pixels: int = Field(
        MAX_PIXELS, ge=1, le=178_000_000, description="maximum width times height of an image; a larger one is an error"
    )

    @model_validator(mode="after")
    def _gives_each_class_one_value(self) -> Self:
        if self.values and len(self.values) != len(self.class_names):
            raise ValueError(f"values: {len(self.values)} for {len(self.class_names)} class_names")
        for value in self.values:
            if self.values.count(value) > 1:
                raise ValueError(f"values: {value} is the value of two classes")
        if self.ignore in self.values:
            raise ValueError(f"ignore: {self.ignore} is among values; a class that is ignored needs no name")
        return self

    @property
    def ignored_value(self) -> int | None:
        """The value of mask pixels that don't count; None where 255 is a class's."""
        return (None if 255 in self.values else 255) if self.ignore is None else self.ignore
