"""Data sets: published ones by name, images in folders, and ones that need no files at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ptpipe import JSON, Context, Stage, StageConfig, StageError, hookimpl, stage
from ptpipe_torch import Data, LoaderOptions

if TYPE_CHECKING:
    from ptpipe_data.published import Published

Augmentation = Literal["crop", "erase", "flip", "rotate", "shift", "zoom"]


def _share_or_number(size: float) -> float:
    if size >= 1 and size != int(size):
        raise ValueError("is neither a share below 1 nor a whole number of samples")
    return size


Size = Annotated[float, Field(ge=0), AfterValidator(_share_or_number)]


class LoaderConfig(StageConfig):
    """How batches are made; the words of torch's DataLoader."""

    batch_size: int = Field(128, ge=1, le=1_000_000, description="samples in a batch")
    num_workers: int = Field(
        0, ge=0, le=256, description="processes that decode and augment; 0: none. Batches are the same for any number"
    )
    pin_memory: bool = Field(False, description="page-locked batches, for faster copies to a CUDA device")
    prefetch_factor: int = Field(2, ge=1, le=1000, description="batches that each worker makes in advance")
    persistent_workers: bool = Field(False, description="keep the workers from one epoch to the next")
    augment: tuple[Augmentation, ...] = Field(
        (),
        description="done to training batches, in this order: crop (after padding by 1/8), erase (a square), "
        "flip (left and right), rotate (up to 10 degrees), shift (by up to 1/14), zoom (by up to 1/0.7)",
    )

    @model_validator(mode="after")
    def _workers_are_there_to_persist(self) -> Self:
        if self.persistent_workers and not self.num_workers:
            raise ValueError("persistent_workers needs num_workers of at least 1")
        return self

    def loader_options(self) -> LoaderOptions:
        """As `Data` takes them."""
        return LoaderOptions(**{name: getattr(self, name) for name in LoaderConfig.model_fields})


class SplitConfig(LoaderConfig):
    """What is drawn from the training images, and how much of a data set is used."""

    val_size: Size = Field(0.05, description="training images set aside for val: a share below 1, or a number")
    calibration_size: Size = Field(
        2000, description="images for calibration, at most: a share below 1 of what they are drawn from, or a number"
    )
    calibration_from: Literal["train", "val"] = Field("train", description="what calibration images are drawn from")
    train_size: Size | None = Field(None, description="use at most so many training images; none: all")
    test_size: Size | None = Field(None, description="use at most so many test images; none: all")


class PublishedConfig(SplitConfig):
    """Options of data sets that are published as files."""

    path: str | None = Field(None, description="folder that has the files, in place of $PTPIPE_DATA and the cache")
    verify: bool = Field(True, description="refuse files that are not the published ones; false: data of your own")


class MnistConfig(PublishedConfig):
    """Options of `data.mnist`."""

    offline: Literal["digits"] | None = Field(
        None, description="digits: go on with scikit-learn's digits, said loudly, where MNIST can't be had"
    )


class DigitsConfig(SplitConfig):
    """Options of `data.digits`."""


class ImageFolderConfig(SplitConfig):
    """Options of `data.image_folder`."""

    path: str = Field(
        description="folder with a folder for each class, or with train, test and maybe val that have them"
    )
    image_size: int = Field(224, ge=8, le=4096, description="side in pixels of the square that is cut from the centre")
    resize: int | None = Field(
        None, ge=8, le=8192, description="pixels that the shorter side is resized to before; none: image_size"
    )
    channels: Literal[1, 3] = Field(3, description="3: RGB; 1: grey")
    normalize: Literal["imagenet", "measured"] = Field(
        "imagenet",
        description="by ImageNet's mean and spread, as pretrained weights expect, or by those of 512 training images",
    )
    in_memory: bool = Field(
        False, description="decode once and keep the pixels; false: decode in every epoch, in bounded memory"
    )
    num_workers: int = Field(2, ge=0, le=256, description="processes that decode and augment; 0: none")
    test_size: Size | None = Field(
        None, description="test images, at most; without a test folder: so many of all are set aside (none: 0.1)"
    )

    @model_validator(mode="after")
    def _square_fits(self) -> Self:
        if self.resize is not None and self.resize < self.image_size:
            raise ValueError(f"resize: {self.resize} is smaller than image_size: {self.image_size}")
        return self


class SyntheticConfig(SplitConfig):
    """Options of `data.synthetic`."""

    num_classes: int = Field(10, ge=2, le=1000, description="classes")
    num_train: int = Field(2048, ge=2, le=10_000_000, description="training images, val included")
    num_test: int = Field(512, ge=1, le=10_000_000, description="test images")
    image_size: int = Field(16, ge=4, le=1024, description="height and width in pixels")
    channels: Literal[1, 3] = Field(1, description="3: RGB; 1: grey")
    calibration_size: Size = Field(256, description="images for calibration, at most: a share below 1, or a number")


def _published(name: str) -> Published:
    from ptpipe_data import published

    return {"mnist": published.MNIST, "fashion_mnist": published.FASHION_MNIST, "cifar10": published.CIFAR10}[name]


def _reads(name: str, config: PublishedConfig) -> JSON:
    from ptpipe_data.published import fingerprint

    return fingerprint(_published(name), config.path, getattr(config, "offline", None))


def _fetch(name: str, config: PublishedConfig) -> Iterable[str]:
    """Download what is not there; answer why that failed, unless there is a stand-in."""
    from ptpipe_data.download import download
    from ptpipe_data.published import cache_folder, find, missing

    published = _published(name)
    if find(published, config.path) is not None:
        return []
    if config.path is not None:
        return [missing(published, config.path)]
    try:
        download(published, cache_folder(name))
    except StageError as error:
        return [] if getattr(config, "offline", None) else [f"{missing(published, None)}. {error}"]
    return []


@stage(
    "data.mnist",
    packages=("numpy",),
    fingerprint=lambda config: _reads("mnist", config),
    preflight=lambda config: _fetch("mnist", config),
)
def mnist(config: MnistConfig, ctx: Context) -> Data:
    """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 grey.

    Looked for in $PTPIPE_DATA/mnist (IDX, gzipped or not; torchvision's layout too), then in the user's cache, then
    downloaded there. Every file is checked against its published digest.
    """
    from ptpipe_data.named import published_data
    from ptpipe_data.published import find, missing

    found = find(_published("mnist"), config.path)
    if found is not None:
        return published_data(_published("mnist"), found, config, ctx)
    if config.offline is None:
        raise StageError(missing(_published("mnist"), config.path))
    from ptpipe_data.handwritten import digits_in_place_of

    ctx.log(missing(_published("mnist"), None))
    ctx.notice(
        "MNIST is not here and could not be downloaded: this is scikit-learn's digits in its place (1,797 images, "
        "enlarged to 28 x 28; those to train on in nine shifted copies). "
        "For the real thing, put its four files into $PTPIPE_DATA/mnist, or connect to a network, "
        f"and run with --fresh {ctx.stage_id}"
    )
    return digits_in_place_of("mnist", config, ctx.seed)


@stage(
    "data.fashion_mnist",
    packages=("numpy",),
    fingerprint=lambda config: _reads("fashion_mnist", config),
    preflight=lambda config: _fetch("fashion_mnist", config),
)
def fashion_mnist(config: PublishedConfig, ctx: Context) -> Data:
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes in 10 classes, 28 x 28 grey.

    Looked for in $PTPIPE_DATA/fashion_mnist (IDX, gzipped or not; torchvision's layout too), then in the user's
    cache, then downloaded there. Every file is checked against its published digest.
    """
    return _named("fashion_mnist", config, ctx)


@stage(
    "data.cifar10",
    packages=("numpy",),
    fingerprint=lambda config: _reads("cifar10", config),
    preflight=lambda config: _fetch("cifar10", config),
)
def cifar10(config: PublishedConfig, ctx: Context) -> Data:
    """CIFAR-10: 50,000 + 10,000 photographs in 10 classes, 32 x 32 RGB.

    Its binary version (the Python version is pickles), looked for in $PTPIPE_DATA/cifar10 (cifar-10-binary.tar.gz or
    cifar-10-batches-bin), then in the user's cache, then downloaded there (162 MB) and checked against its published
    digest.
    """
    return _named("cifar10", config, ctx)


def _named(name: str, config: PublishedConfig, ctx: Context) -> Data:
    from ptpipe_data.named import published_data
    from ptpipe_data.published import find, missing

    found = find(_published(name), config.path)
    if found is None:
        raise StageError(missing(_published(name), config.path))
    return published_data(_published(name), found, config, ctx)


@stage("data.digits", packages=("numpy", "scikit-learn"))
def digits(config: DigitsConfig, ctx: Context) -> Data:
    """scikit-learn's bundled digits: 1,797 real handwritten digits, 8 x 8 grey; needs no network."""
    from ptpipe_data.handwritten import digits as digits_data

    return digits_data(config, ctx.seed)


def _reads_folder(config: ImageFolderConfig) -> JSON:
    from ptpipe_data.folders import folder_fingerprint

    return folder_fingerprint(config.path)


@stage("data.image_folder", packages=("numpy", "pillow"), fingerprint=_reads_folder)
def image_folder(config: ImageFolderConfig, ctx: Context) -> Data:
    """Images in class folders, of any number and size; decoded when they are needed.

    Either PATH/CLASS/*.jpg, from which test and val are drawn, or PATH/train/CLASS/*.jpg with test and maybe val
    beside it. The images stay where they are: the result refers to them.
    """
    from ptpipe_data.folders import image_folder as folder_data

    return folder_data(config, ctx)


@stage("data.synthetic", packages=("numpy",))
def synthetic(config: SyntheticConfig, ctx: Context) -> Data:
    """Made-up images that a small network learns in an epoch or two; for trying things out in seconds."""
    from ptpipe_data.patterns import synthetic as synthetic_data

    return synthetic_data(config, ctx.seed)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Data]]:
    """The kinds of this plugin."""
    return [mnist, fashion_mnist, cifar10, digits, image_folder, synthetic]
