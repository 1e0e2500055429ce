from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

import ptpipe_data as front
from ptpipe import hookimpl
from ptpipe.plan.options import config_problems
from ptpipe_data.config import Augmentation, ImageConfig
from ptpipe_torch import Data, LoaderOptions
from ptpipe_torch.data.augment import AUGMENTATIONS

STAGES = list(front.ptpipe_stages())


def test_importing_and_keys_need_neither_torch_nor_numpy(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(b"")
    (tmp_path / "photos.csv").write_text("image,age\n")
    code = (
        "import sys, ptpipe_data as front; "
        "front.load_mnist.fingerprint(front.MnistConfig()); front.load_cifar10.fingerprint(front.CatalogConfig()); "
        "front.load_image_folder.fingerprint(front.ImageFolderConfig(path='.')); "
        "photos = {'path': sys.argv[1] + '/photos.csv', 'task': 'regression', 'targets': ['age']}; "
        "front.load_image_table.fingerprint(front.ImageTableConfig(**photos)); "
        "front.load_shards.fingerprint(front.ShardsConfig(path=sys.argv[1])); "
        "names = ('torch', 'numpy', 'PIL', 'pyarrow', 'sklearn', 'torchvision'); "
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_kinds() -> None:
    assert {stage.kind for stage in STAGES} == {
        "data.arrays",
        "data.cifar10",
        "data.digits",
        "data.fashion_mnist",
        "data.image_folder",
        "data.image_table",
        "data.mnist",
        "data.python",
        "data.segmentation_folder",
        "data.shards",
        "data.synthetic",
        "data.table",
        "data.teacher_outputs",
        "data.text",
    }
    for stage in STAGES:
        assert [port.type for port in stage.outputs] == [Data]
        assert bool(stage.inputs) == (stage.kind == "data.teacher_outputs")
        assert stage.help
    assert hasattr(front, "hookimpl") and hookimpl is front.hookimpl


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.kind)
def test_every_option_has_a_description(stage) -> None:
    for name, field in stage.config_type.model_fields.items():
        assert field.description, name


def test_augmentations_match_the_implemented_ones() -> None:
    assert set(get_args(Augmentation)) == set(AUGMENTATIONS)


def test_loader_options_get_through() -> None:
    config = front.MnistConfig.model_validate_json(
        '{"batch_size": 32, "num_workers": 3, "pin_memory": false, "prefetch_factor": 4, "persistent_workers": true,'
        ' "augment": ["shift", "flip"]}',
        strict=True,
    )
    assert config.loader_options() == LoaderOptions(32, 3, False, 4, True, ("shift", "flip"))
    assert front.DigitsConfig().loader_options() == LoaderOptions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"val_size": 1.5}', "must be a fraction below 1 or a whole number"),
        ('{"val_size": -1}', "greater than or equal to 0"),
        ('{"val_size": "many"}', "valid number"),
        ('{"augment": ["shfit"]}', "'crop', 'erase', 'flip'"),
        ('{"persistent_workers": true}', "persistent_workers needs num_workers"),
        ('{"batch_size": 0}', "greater than or equal to 1"),
        ('{"shuffle": true}', "Extra inputs are not permitted"),
    ],
)
def test_wrong_options(options: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImageConfig.model_validate_json(options, strict=True)


def test_the_former_name_of_fallback_is_reported() -> None:
    (problem,) = config_problems(front.load_mnist, {"offline": "digits"})[1]
    assert problem.message == "offline: renamed to fallback"


def test_resize_smaller_than_the_square() -> None:
    with pytest.raises(ValidationError, match="resize: 100 is smaller than image_size: 224"):
        front.ImageFolderConfig(path="x", resize=100)


@pytest.mark.parametrize("size", [0, 0.25, 5000])
def test_sizes_are_fractions_or_numbers(size: float) -> None:
    assert ImageConfig.model_validate_json(f'{{"val_size": {size}}}', strict=True).val_size == size
