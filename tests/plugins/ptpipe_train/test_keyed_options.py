"""Options that stay out of the key change no bit of the result; device and threads enter it as they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptpipe_data.config
import ptpipe_train.config
import ptpipe_train.config_parallel
from ptpipe import StageError
from ptpipe_eval.config import PredictConfig
from ptpipe_quant.config import CalibrateConfig
from ptpipe_torch import Data
from ptpipe_torch.data.data import LOADING_OPTIONS
from ptpipe_train import device
from ptpipe_train.config import TrainConfig
from ptpipe_train.config_parallel import Parallel

from ...datasets import labels_of
from .conftest import Lab, Trained, assert_same_bits

LOADED = {
    "num_workers": {"num_workers": 2},
    "prefetch_factor": {"num_workers": 1, "prefetch_factor": 1},
    "persistent_workers": {"num_workers": 1, "persistent_workers": True},
    "pin_memory": {"pin_memory": False},
}
TRAINED: dict[str, dict[str, Any]] = {
    "checkpoint_every_s": {"checkpoint_every_s": 1e-9},
    "profile": {"profile": {"steps": 2}},
    "cuda_graphs": {"cuda_graphs": False},
}
NOT_HERE = {"timeout_s"}
"""How long workers wait for each other: it can only end a training."""


def train(lab: Lab, loading: dict[str, Any] | None = None, **options: Any) -> Trained:
    data = lab.make_data(num_train=64, num_val=16, augment=["shift", "flip"]).with_options(loading or {})
    return lab.train_afresh(lab.make_model(norm=True, dropout=0.5), data, epochs=2, **options)


def test_every_option_outside_the_key_is_tried() -> None:
    modules = (ptpipe_train.config, ptpipe_train.config_parallel, ptpipe_data.config)
    configs = [config for module in modules for config in vars(module).values()]
    found = {name for config in configs for name in getattr(config, "unkeyed_options", ())}
    assert found == {*LOADED, *TRAINED, *NOT_HERE}
    assert set(LOADED) == set(LOADING_OPTIONS)


@pytest.mark.parametrize("name", [*LOADED, *TRAINED])
def test_it_changes_no_bit(lab: Lab, name: str) -> None:
    other = train(lab, LOADED[name]) if name in LOADED else train(lab, **TRAINED[name])
    assert_same_bits(other.model, train(lab).model)


def test_a_checkpoint_is_resumed_with_other_such_options(lab: Lab) -> None:
    lab.train(lab.make_model(), lab.make_data(), epochs=2, checkpoint_every_s=1e-9)
    again = lab.train(lab.make_model(), lab.make_data(), epochs=2, profile={"steps": 2})
    assert any("resum" in line for line in again.log), again.log


def test_data_are_stored_without_them(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("data") for _ in range(2)]
    data = lab.make_data()
    data.save(folders[0])
    data.with_options(LOADED["persistent_workers"]).save(folders[1])
    assert (folders[0] / "data.json").read_bytes() == (folders[1] / "data.json").read_bytes()
    loaded = Data.load(folders[1]).with_options({"num_workers": 3})
    assert loaded.loader.num_workers == 3
    assert np.array_equal(labels_of(loaded.splits["train"]), labels_of(data.splits["train"]))


def keyed(**options: Any) -> dict[str, Any]:
    return TrainConfig(**options).keyed_options()


def test_the_device_enters_the_key_as_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptpipe_train.config.finds_cuda_device", lambda: False)
    assert keyed(device="auto") == keyed(device="cpu") != keyed(device="cuda")
    monkeypatch.setattr("ptpipe_train.config.finds_cuda_device", lambda: True)
    assert keyed(device="auto") == keyed(device="cuda") != keyed(device="cpu")
    assert keyed(device="cuda", num_threads=2) == keyed(device="cuda", num_threads=3), "the CPU computes nothing"


@pytest.mark.parametrize("is_found", [True, False])
def test_another_device_than_that_in_the_key_is_refused(monkeypatch: pytest.MonkeyPatch, is_found: bool) -> None:
    monkeypatch.setattr("ptpipe_train.device.finds_cuda_device", lambda: is_found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: not is_found)
    (line,) = device.find_missing("auto", "fp32")
    assert line.startswith(f"device auto: torch finds {'no' if is_found else 'a'} CUDA device, ")
    with pytest.raises(StageError, match="set device to cpu or cuda"):
        device.resolve_device("auto")


def test_threads_enter_the_key_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts() -> list[Any]:
        return [keyed(device="cpu"), PredictConfig().keyed_options(), CalibrateConfig().keyed_options()]

    monkeypatch.setattr("ptpipe.host.num_threads", lambda: 4)
    four = parts()
    assert keyed(device="cpu", num_threads=4) == four[0]
    monkeypatch.setattr("ptpipe.host.num_threads", lambda: 8)
    assert all(one != other for one, other in zip(four, parts(), strict=True))


def test_what_decides_nothing_is_not_in_the_key() -> None:
    assert keyed(checkpoint_every_s=3) == keyed(profile={"steps": 3}) == keyed()
    assert (
        Parallel(mode="ddp", workers=2, timeout_s=5).keyed_options() == Parallel(mode="ddp", workers=2).keyed_options()
    )
