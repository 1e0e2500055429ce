"""Options of data.image_folder, data.image_table and data.shards."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ptpipe_data.class_names import ClassNames
from ptpipe_data.config import ClassesConfig, ImageConfig, ImageSide, LabelledImageConfig, Size
from ptpipe_data.table_config import TableFileConfig
from ptpipe_torch import Resizing
from ptpipe_torch.data.images import MAX_PIXELS

_PATTERN = r"^[^/]+$"
InMemory: TypeAlias = Annotated[
    bool, Field(description="decode once and keep the pixels; false: decode in every epoch, in bounded memory")
]


class EncodedImageConfig(ImageConfig):
    """Options of images that are decoded on demand."""

    image_size: ImageSide | tuple[ImageSide, ImageSide] = Field(
        224,
        description="side of the center crop, in pixels; [height, width]: both sides are resized to these, and nothing "
        "is cropped",
    )
    resize: int | None = Field(
        None, ge=8, le=8192, description="length of the shorter side before cropping, in pixels; none: image_size"
    )
    channels: Literal[1, 3] = Field(3, description="3: RGB; 1: grayscale")
    normalize: Literal["imagenet", "measured"] = Field(
        "imagenet",
        description="imagenet: by ImageNet's mean and standard deviation, as pretrained weights expect; "
        "measured: by those of 512 training images",
    )
    mean: tuple[float, ...] | None = Field(
        None,
        description="of each channel, of pixels scaled to [0, 1], in place of `normalize`: what a network from "
        "elsewhere was trained with. [0, 0, 0] with a `std` of [1, 1, 1] leaves them as they are",
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(None, description="beside `mean`: of each channel")
    max_pixels: int = Field(
        MAX_PIXELS,
        ge=1,
        le=178_000_000,  # Pillow opens no larger one
        description="maximum width times height of an image, as stored and after resizing; a larger one is an error "
        "before it is decoded, which takes up to 16 bytes per pixel",
    )
    num_workers: int = Field(2, ge=0, le=256, description="worker processes that decode and augment; 0: none")

    @property
    def shorter_side(self) -> int | None:
        """The length of the shorter side before cropping, in pixels; None: both sides are resized."""
        return self.resize or (self.image_size if isinstance(self.image_size, int) else None)

    @property
    def resizing(self) -> Resizing:
        """How images of any size become those of the data set."""
        return Resizing(shorter_side=self.shorter_side)

    @model_validator(mode="after")
    def _normalizes_each_channel(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std belong together")
        for values in (self.mean, self.std):
            if values is not None and len(values) != self.channels:
                raise ValueError(f"mean and std have {self.channels} numbers, one for each of the channels")
        return self

    @model_validator(mode="after")
    def _crop_fits(self) -> Self:
        if self.resize is None:
            return self
        if not isinstance(self.image_size, int):
            raise ValueError("resize: image_size has both sides, and nothing is cropped; leave resize out")
        if self.resize < self.image_size:
            raise ValueError(f"resize: {self.resize} is smaller than image_size: {self.image_size}")
        return self


class ImageFolderConfig(EncodedImageConfig, LabelledImageConfig):
    """Options of `data.image_folder`."""

    path: str = Field(
        description="folder that contains a folder per class, or train, test and optionally val, each with a folder "
        "per class"
    )
    unlabeled: bool = Field(
        False,
        description="images in any folders, whose names say nothing: for networks that return anything, to quantize, "
        "export and time them",
    )
    in_memory: InMemory = False
    test_size: Size | None = Field(
        None,
        description="maximum number of test images; without a test folder: fraction or number of all images held out "
        "for test (none: 0.1)",
    )

    @model_validator(mode="after")
    def _has_classes_to_weight(self) -> Self:
        if self.unlabeled and self.classes != ClassesConfig():
            raise ValueError("classes: unlabeled images have none")
        return self


class ImageTableConfig(TableFileConfig, EncodedImageConfig):
    """Options of `data.image_table`."""

    path: str = Field(
        description="a .csv, .tsv, .jsonl (an object per line), .json (an array of objects, or as .jsonl) or .parquet "
        "file with a row for each image"
    )
    image: str = Field("image", min_length=1, description="the column of image files, as paths relative to `folder`")
    folder: str | None = Field(None, description="folder of the image files; none: that of the file `path`")
    suffix: str | None = Field(
        None, pattern=r"^\.\w+$", description="what file names end with that the column leaves out, such as .jpg"
    )
    targets: tuple[str, ...] = Field(min_length=1, max_length=1000, description="the columns to predict")
    task: Literal["classification", "multi_label", "regression"] = Field(
        description="classification: one target, whose different values are the classes; multi_label: each target is 0 "
        "or 1, true or false; regression: numbers"
    )
    in_memory: InMemory = False

    @model_validator(mode="after")
    def _names_each_column_once(self) -> Self:
        if self.task == "classification" and len(self.targets) > 1:
            raise ValueError("a classification has one target")
        for name in self.targets:
            if self.targets.count(name) > 1:
                raise ValueError(f"{name!r} is named twice in targets")
        if self.image in self.targets:
            raise ValueError(f"{self.image!r} is the column of images, and among the targets")
        return self


class ShardsConfig(EncodedImageConfig, LabelledImageConfig):
    """Options of `data.shards`."""

    path: str = Field(description="folder of the tar files")
    train: str = Field("train-*.tar", pattern=_PATTERN, description="names of the shards of train: `*` is any text")
    val: str = Field("val-*.tar", pattern=_PATTERN, description="names of the shards of val; without any, see val_size")
    test: str = Field(
        "test-*.tar", pattern=_PATTERN, description="names of the shards of test; without any, see test_size"
    )
    label: str = Field(
        "cls",
        pattern=r"^(cls|json\..+)$",
        description="where the class of an image KEY.jpg is: cls, in the member KEY.cls; json.FIELD, in a field of the "
        "member KEY.json; a number, or a name",
    )
    class_names: ClassNames | None = Field(
        None,
        description="names of the classes 0, 1, 2, ...; none: the names that train has, sorted, or the numbers",
    )
    shuffle_buffer: int | None = Field(
        10_000,
        ge=1,
        description="samples in the window that moves over the shards of an epoch, which come in random order, and in "
        "which samples are shuffled; it takes no memory; none: all samples, read from anywhere",
    )
    batch_by_length: bool = Field(
        False, description="train on batches of texts of similar lengths, in random order: less padding"
    )
    test_size: Size | None = Field(
        None,
        description="maximum number of test samples; without shards of test: fraction or number of all samples held "
        "out for test (none: 0.1)",
    )
