"""What reads the files of an attack: the ways in which ptpipe reads what somebody else may have written."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import ptpipe_data as data
from ptpipe import Context, IntegrityError, ManifestError, StageError, load_plan
from ptpipe_torch import Data, ImageFileColumn, Model, OnnxFile, Predictions, Signature
from ptpipe_zoo import OnnxModelConfig, onnx_external_data, onnx_model

from .onnx_files import SIGNATURE


def context(folder: Path) -> Context:
    return Context("data", "data.test", seed=7, scratch=folder, _tell=lambda event: None)


def image(folder: Path) -> None:
    ImageFileColumn(folder, np.array([b"a.png"]), 224, 224, 3).take(np.arange(1))


def altered(load: Callable[[Path], None], folder: Path) -> None:
    """Alter a few bytes of one of the files and read it, many times over: nothing else than an error may come of it."""
    rng = random.Random(5)
    originals = {path: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    for _ in range(int(folder.name.rpartition("x")[2])):
        path, content = rng.choice(list(originals.items()))
        changed = bytearray(content)
        for _ in range(rng.randint(1, 8)):
            # Headers more often than values.
            changed[int(len(changed) * rng.random() ** 3)] = rng.randrange(256)
        path.write_bytes(changed[: rng.choice([len(changed), len(changed), rng.randrange(len(changed))])])
        try:
            load(folder)
        except ERRORS as error:
            assert str(error).isprintable(), error
        path.write_bytes(content)


def altered_images(folder: Path) -> None:
    def load(folder: Path) -> None:
        for path in folder.iterdir():
            with contextlib.suppress(StageError):
                ImageFileColumn(folder, np.array([path.name.encode()]), 16, 16, 3, 1_000_000).take(np.arange(1))

    altered(load, folder)


def image_folder(folder: Path) -> None:
    config = data.ImageFolderConfig(path=str(folder / "photos"), image_size=16, num_workers=0, val_size=0, test_size=1)
    loaded = data.load_image_folder(config, context(folder))
    for split in loaded.splits.values():
        split.inputs["images"].take(np.arange(len(split)))


def image_folder_key(folder: Path) -> None:
    data.load_image_folder.fingerprint(data.ImageFolderConfig(path=str(folder / "photos")))


def shards(folder: Path) -> None:
    config = data.ShardsConfig(path=str(folder / "shards"), image_size=16, num_workers=0, val_size=0, test_size=1)
    loaded = data.load_shards(config, context(folder))
    for split in loaded.splits:
        for _ in loaded.batches(split):
            pass


def shards_key(folder: Path) -> None:
    data.load_shards.fingerprint(data.ShardsConfig(path=str(folder / "shards")))


def mnist(folder: Path) -> None:
    data.load_mnist(data.MnistConfig(path=str(folder)), context(folder))


def mnist_key(folder: Path) -> None:
    data.load_mnist.fingerprint(data.MnistConfig(path=str(folder)))


def own_mnist(folder: Path) -> None:
    data.load_mnist(data.MnistConfig(path=str(folder), verify=False), context(folder))


def cifar(folder: Path) -> None:
    data.load_cifar10(data.CatalogConfig(path=str(folder)), context(folder))


def own_cifar(folder: Path) -> None:
    data.load_cifar10(data.CatalogConfig(path=str(folder), verify=False), context(folder))


def stored_shards(folder: Path) -> None:
    stored_data(folder / "stored")


def stored_data(folder: Path) -> None:
    loaded = Data.load(folder)
    for split in loaded.splits:
        for _ in loaded.batches(split):
            pass


def stored_assets(folder: Path) -> None:
    Data.deliverables(folder)


def model(folder: Path) -> None:
    with Model.load(folder).predictor() as predict:
        predict({"images": np.zeros((1, 1, 8, 8), np.float32)})


def model_of_a_file(folder: Path) -> None:
    """As a stage does whose manifest names one function of one file."""
    Model.load(folder).with_source_functions([f"{folder}/named.py:make_net"]).build()


def onnx(folder: Path) -> None:
    """Not by `load`, which refuses some of these before a session is made."""
    with OnnxFile(folder / "model.onnx", Signature.from_json(SIGNATURE)).predictor(1) as predict:
        predict({"images": np.zeros((2, 3, 2, 2), np.float32)})


def foreign_onnx(folder: Path) -> None:
    """As `model.onnx` reads a file, with the tensors that it keeps in others."""
    model, _ = onnx_external_data.read(folder / "model.onnx")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    OnnxFile(folder / "model.onnx", Signature.from_json(SIGNATURE)).save(folder / "copy")


def foreign_onnx_key(folder: Path) -> None:
    onnx_model.fingerprint(OnnxModelConfig(file=str(folder / "model.onnx")))


def stored_onnx(folder: Path) -> None:
    OnnxFile.load(folder)


def saved_onnx(folder: Path) -> None:
    OnnxFile(folder / "model.onnx", Signature.from_json(SIGNATURE)).save(folder / "copy")


def predictions(folder: Path) -> None:
    Predictions.load(folder)


def manifest(folder: Path) -> None:
    load_plan(folder / "m.yaml")


ERRORS = (StageError, IntegrityError, ManifestError)

altered_idx, altered_cifar, altered_data = (partial(altered, load) for load in (own_mnist, own_cifar, stored_data))
altered_model, altered_onnx = (partial(altered, load) for load in (model, onnx))
