"""A torch model that a run made, from the folder that it was saved or delivered to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, IntegrityError, StageError
from ptpipe_torch import Model
from ptpipe_torch.files import file_digest

if TYPE_CHECKING:
    from ptpipe_zoo.config import TorchModelConfig

_FILES = ("recipe.json", "tensors.safetensors", "int8.safetensors")


def load_folder(config: TorchModelConfig) -> Model:
    """Implement `model.torch`."""
    folder = Path(config.folder).expanduser()
    try:
        model = Model.load(folder).with_source_functions([str(_absolute(name)) for name in config.functions])
        if model.recipe.backend and not model.recipe.convert:
            raise StageError(f"{folder} has a network that was prepared for training in int8, and not converted")
        model.build()
    except IntegrityError as error:  # of files that the user names, and not of the store
        raise StageError(f"{folder} is no torch model that ptpipe wrote: {error}") from error
    return model


def digests(config: TorchModelConfig) -> JSON:
    """Return the SHA-256 of each file of the model. Raises StageError where there is none, or one can't be read."""
    folder, found = Path(config.folder).expanduser(), dict[str, JSON]()
    for name in _FILES:
        try:
            found[name] = file_digest(folder / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StageError(f"can't read {folder / name}: {error.strerror or error}") from error
    if _FILES[0] not in found:
        raise StageError(f"{folder} is no folder with {_FILES[0]}, which every torch model of ptpipe has")
    return found


def _absolute(function: str) -> str:
    """Return `/home/me/mine.py:make_net` for `mine.py:make_net`."""
    file, _, name = function.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{name}"
