"""Data sets: MNIST, Fashion-MNIST, CIFAR-10, digits, images, masks, arrays, tables, texts, shards (stages data.*)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ptpipe import JSON, Context, Plan, Problem, Stage, StageError, hookimpl, stage
from ptpipe_data.config import (
    ArraysConfig,
    CatalogConfig,
    DigitsConfig,
    MnistConfig,
    SegmentationFolderConfig,
    SyntheticConfig,
)
from ptpipe_data.image_config import ImageFolderConfig, ImageTableConfig, ShardsConfig
from ptpipe_data.python_config import PythonDataConfig
from ptpipe_data.table_config import TableConfig, TableFileConfig, TextConfig
from ptpipe_data.teacher_config import TeacherOutputsConfig
from ptpipe_torch import Data, Deployable

if TYPE_CHECKING:
    from ptpipe_data.catalog import CatalogEntry


def _entry(name: str) -> CatalogEntry:
    from ptpipe_data import catalog

    return {"mnist": catalog.MNIST, "fashion_mnist": catalog.FASHION_MNIST, "cifar10": catalog.CIFAR10}[name]


def _fingerprint(name: str, config: CatalogConfig) -> JSON:
    from ptpipe_data.catalog import fingerprint

    return fingerprint(_entry(name), config.path, getattr(config, "fallback", None))


def _preflight(name: str, config: CatalogConfig) -> Iterable[str]:
    """Download missing files; return why that failed, unless there is a fallback."""
    from ptpipe_data.catalog import cache_folder, describe_missing, find_files

    entry = _entry(name)
    if find_files(entry, config.path) is not None:
        return []
    if config.path is not None:
        return [describe_missing(entry, config.path)]
    from ptpipe_data.download import download

    try:
        download(entry, cache_folder(name))
    except StageError as error:
        return [] if getattr(config, "fallback", None) else [f"{describe_missing(entry, None)}. {error}"]
    return []


def _functions_for(name: str) -> dict[str, Any]:
    return {"fingerprint": partial(_fingerprint, name), "preflight": partial(_preflight, name)}


def _load(name: str, config: CatalogConfig, ctx: Context) -> Data:
    from ptpipe_data.catalog import describe_missing, find_files
    from ptpipe_data.catalog_reader import read_data

    entry = _entry(name)
    found = find_files(entry, config.path)
    if found is None:
        raise StageError(describe_missing(entry, config.path))
    return read_data(entry, found, config, ctx)


@stage("data.mnist", packages=("numpy",), **_functions_for("mnist"))
def load_mnist(config: MnistConfig, ctx: Context) -> Data:
    """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 grayscale.

    Searched for in $PTPIPE_DATA/mnist (IDX, gzipped or not; torchvision's layout too), then in the user's cache, then
    downloaded to the cache. Every file is verified against its published digest.
    """
    from ptpipe_data.catalog import describe_missing, find_files
    from ptpipe_data.digits import load_digits_like_mnist

    entry = _entry("mnist")
    if config.fallback is None or find_files(entry, config.path) is not None:
        return _load("mnist", config, ctx)
    ctx.log(describe_missing(entry, None))
    ctx.notice(
        "MNIST was not found and could not be downloaded: this run uses the bundled digits instead (1,797 images, "
        "resized to 28 x 28; nine shifted copies of each training image). "
        "To use MNIST, put its four files into $PTPIPE_DATA/mnist, or connect to a network, "
        f"and run with --fresh {ctx.stage_id}"
    )
    return load_digits_like_mnist("mnist", config, ctx.seed)


@stage("data.fashion_mnist", packages=("numpy",), **_functions_for("fashion_mnist"))
def load_fashion_mnist(config: CatalogConfig, ctx: Context) -> Data:
    """Fashion-MNIST: 60,000 + 10,000 images of clothes in 10 classes, 28 x 28 grayscale.

    Searched for in $PTPIPE_DATA/fashion_mnist (IDX, gzipped or not; torchvision's layout too), then in the user's
    cache, then downloaded to the cache. Every file is verified against its published digest.
    """
    return _load("fashion_mnist", config, ctx)


@stage("data.cifar10", packages=("numpy",), **_functions_for("cifar10"))
def load_cifar10(config: CatalogConfig, ctx: Context) -> Data:
    """CIFAR-10: 50,000 + 10,000 photographs in 10 classes, 32 x 32 RGB.

    Its binary version (the Python version is pickled), searched for in $PTPIPE_DATA/cifar10 (cifar-10-binary.tar.gz
    or cifar-10-batches-bin), then in the user's cache, then downloaded to the cache (170 MB) and verified against its
    published digest.
    """
    return _load("cifar10", config, ctx)


def _fingerprint_digits(config: DigitsConfig) -> JSON:
    from ptpipe_data.catalog import DIGITS_FILE
    from ptpipe_torch.files import file_digest

    return file_digest(DIGITS_FILE)


@stage("data.digits", packages=("numpy",), fingerprint=_fingerprint_digits)
def load_digits(config: DigitsConfig, ctx: Context) -> Data:
    """Bundled digits: 1,797 handwritten digits, 8 x 8 grayscale (scikit-learn's load_digits); no download."""
    from ptpipe_data import digits

    return digits.load_digits(config, ctx.seed)


def _fingerprint_folder(config: ImageFolderConfig | SegmentationFolderConfig) -> JSON:
    from ptpipe_data.image_folder import fingerprint

    return fingerprint(config.path)


@stage("data.image_folder", packages=("numpy", "pillow"), fingerprint=_fingerprint_folder)
def load_image_folder(config: ImageFolderConfig, ctx: Context) -> Data:
    """Images in class folders, of any number and size, decoded on demand.

    Either PATH/CLASS/*.jpg, from which test and val are drawn, or PATH/train/CLASS/*.jpg with test and optionally val
    beside train. The images stay where they are: the result refers to them.
    """
    from ptpipe_data import image_folder

    return image_folder.load_image_folder(config, ctx)


def _fingerprint_image_table(config: ImageTableConfig) -> JSON:
    from ptpipe_data.image_table_paths import fingerprint

    return fingerprint(config)


def _preflight_table(kind: str, config: TableFileConfig) -> Iterable[str]:
    if find_spec("pyarrow") is None:
        yield f"{kind} needs pyarrow: pip install 'ptpipe[table]'"


@stage(
    "data.image_table",
    packages=("numpy", "pillow", "pyarrow"),
    fingerprint=_fingerprint_image_table,
    preflight=partial(_preflight_table, "data.image_table"),
)
def load_image_table(config: ImageTableConfig, ctx: Context) -> Data:
    """Images that the rows of a CSV, TSV, JSON lines, JSON or Parquet file name, with targets in its columns.

    Classes, several labels, or numbers for each image. Images are decoded on demand, and stay where they are: the
    result refers to them. Needs `ptpipe[table]`.
    """
    from ptpipe_data import image_table

    return image_table.load_image_table(config, ctx)


@stage("data.segmentation_folder", packages=("numpy", "pillow"), fingerprint=_fingerprint_folder)
def load_segmentation_folder(config: SegmentationFolderConfig, ctx: Context) -> Data:
    """Images and masks of the same names: PATH/images/* with PATH/masks/*, or both in PATH/train, PATH/test, PATH/val.

    Subfolders of both must be the same. A mask has one byte a pixel, the number of its class or its value in `values`
    (a palette's colours don't matter). Both are decoded once and kept as arrays; a mask is augmented as its image is.
    """
    from ptpipe_data import segmentation_folder

    return segmentation_folder.load_segmentation_folder(config, ctx)


@stage("data.synthetic", packages=("numpy",))
def make_synthetic(config: SyntheticConfig, ctx: Context) -> Data:
    """Synthetic images that a small network learns in an epoch or two, for quick experiments."""
    from ptpipe_data import synthetic

    return synthetic.make_synthetic(config, ctx.seed)


def _fingerprint_arrays(config: ArraysConfig) -> JSON:
    from ptpipe_data.array_paths import fingerprint

    return fingerprint(config)


@stage("data.arrays", packages=("numpy", "safetensors"), fingerprint=_fingerprint_arrays)
def load_arrays(config: ArraysConfig, ctx: Context) -> Data:
    """Arrays in an .npz or .safetensors file, or in a folder of .npy files: a row is a sample.

    Inputs are taken as they are (float16 and float64 as float32), but for `images`, which are normalized. Names of
    arrays become names of a network's inputs.
    """
    from ptpipe_data import arrays

    return arrays.load_arrays(config, ctx)


def _fingerprint_table(config: TableConfig) -> JSON:
    from ptpipe_data.table_paths import fingerprint

    return fingerprint(config)


@stage(
    "data.table",
    packages=("numpy", "pyarrow"),
    fingerprint=_fingerprint_table,
    preflight=partial(_preflight_table, "data.table"),
)
def load_table(config: TableConfig, ctx: Context) -> Data:
    """A table in a CSV, TSV, JSON lines, JSON or Parquet file: a row is a sample.

    Numeric columns become the input `numbers`, standardized; categorical ones the input `categories`. Statistics,
    categories and classes are those of train alone; a category that train does not have is one of its own, a class is
    an error. Needs `ptpipe[table]`.
    """
    from ptpipe_data import table

    return table.load_table(config, ctx)


def _fingerprint_text(config: TextConfig) -> JSON:
    from ptpipe_data.text_paths import fingerprint

    return fingerprint(config)


def _preflight_text(config: TextConfig) -> Iterable[str]:
    missing = [name for name in ("pyarrow", "tokenizers") if find_spec(name) is None]
    if missing:
        yield f"data.text needs {' and '.join(missing)}: pip install 'ptpipe[text]'"


@stage(
    "data.text", packages=("numpy", "pyarrow", "tokenizers"), fingerprint=_fingerprint_text, preflight=_preflight_text
)
def load_text(config: TextConfig, ctx: Context) -> Data:
    """Texts in a CSV, TSV, JSON lines or Parquet file, or in a folder per class, as token ids: a row is a sample.

    The input is `tokens`, padded to the longest text of a batch. The tokenizer is a `tokenizer.json`, or byte-level BPE
    trained on train; either way the run's folder has the one to use with the model, as `tokenizer.json`. Texts of
    language_modeling follow one another in blocks of max_length. Needs `ptpipe[text]`.
    """
    from ptpipe_data import text

    return text.load_text(config, ctx)


def _fingerprint_shards(config: ShardsConfig) -> JSON:
    from ptpipe_data.shards_paths import fingerprint

    return fingerprint(config)


@stage("data.shards", packages=("numpy", "pillow"), fingerprint=_fingerprint_shards)
def load_shards(config: ShardsConfig, ctx: Context) -> Data:
    """Tar shards (WebDataset), read in bounded memory: PATH/train-000000.tar, and those of val and test.

    Either images and their classes, as members KEY.jpg and KEY.cls, or what `ptpipe shards` wrote of any data set: then
    data.json beside the shards has its facts. The shards stay where they are: the result refers to them.
    """
    from ptpipe_data import shards

    return shards.load_shards(config, ctx)


def _fingerprint_python(config: PythonDataConfig) -> JSON:
    from ptpipe_torch.paths import read_digests

    return read_digests(config.reads)


def _python_function(config: PythonDataConfig) -> Iterable[str]:
    names = (config.function, config.loss_function, config.metric_function)
    return [f"{config.file}:{name}" for name in names if name is not None]


@stage(
    "data.python",
    packages=("numpy", "torch"),
    fingerprint=_fingerprint_python,
    source_functions=_python_function,
)
def load_python(config: PythonDataConfig, ctx: Context) -> Data:
    """A data set of your own: what a function in a Python file returns, `{"train": ..., "val": ..., "test": ...}`.

    Each is a torch Dataset of tuples or dicts, a tuple of arrays or tensors, or a dict of them; a tuple ends in the
    target. Without val or test, these are drawn from train. The file needs to know nothing of ptpipe. Values are read
    once and stored: random transforms are applied once, too. Random numbers of torch, NumPy and Python depend on the
    seed alone. The result is invalidated by any change of the file's code, or of what it imports from its own folder,
    of the files that it opens in Python, and of those under `reads`.
    """
    from ptpipe_data import python_file

    return python_file.load_data(config, ctx)


@stage("data.teacher_outputs", packages=("numpy", "torch", "onnxruntime"))
def add_teacher_outputs(config: TeacherOutputsConfig, ctx: Context, model: Deployable, data: Data) -> Data:
    """The samples of a data set, with what a model returns for them as targets.

    With the float model as teacher, a data set without targets gets what quant.tune, quant.analyze and eval.compare
    measure by and what quantization-aware training learns: `fidelity`, 1 where outputs are the teacher's. Any number of
    outputs of any fixed sizes; integers among them are not compared. Every output of every sample is stored, float32.
    """
    from ptpipe_data.teacher_outputs import with_teacher_outputs

    return with_teacher_outputs(ctx, model, data)


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find functions that are not in the files that options name, and arguments that they don't take."""
    from ptpipe_torch.python_signature import function_problems

    for planned in plan.stages:
        if planned.kind == load_python.kind:
            yield from function_problems(plan, planned.id)
            for option in ("loss_function", "metric_function"):
                if planned.options[option] is not None:
                    yield from function_problems(plan, planned.id, option, num_given=2)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Data]]:
    """Return the stages of this plugin."""
    return [
        load_mnist,
        load_fashion_mnist,
        load_cifar10,
        load_digits,
        load_image_folder,
        load_image_table,
        load_segmentation_folder,
        make_synthetic,
        load_arrays,
        load_python,
        load_table,
        load_text,
        load_shards,
        add_teacher_outputs,
    ]
