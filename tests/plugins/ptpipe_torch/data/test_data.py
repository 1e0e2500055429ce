"""Data: what it refuses, what its batches hold, and how it is stored."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import StageError
from ptpipe_torch import ArrayImages, Data, DatasetInfo, LoaderOptions, Split, epoch_order
from ptpipe_torch.data.images import FileImages, SubsetImages

NUM, SIDE = 23, 4


def make_split(prefix: str = "train", num: int = NUM, channels: int = 3, seed: int = 0) -> Split:
    pixels = np.random.default_rng(seed).integers(0, 256, (num, SIDE, SIDE + 1, channels), dtype=np.uint8)
    return Split(
        np.array([f"{prefix}/{i:05d}" for i in range(num)], dtype=np.str_), np.arange(num) % 3, ArrayImages(pixels)
    )


def info(channels: int = 3) -> DatasetInfo:
    mean, std = (0.1, 0.4, 0.7)[:channels], (0.2, 0.3, 0.5)[:channels]
    return DatasetInfo("tiny", ("a", "b", "c"), (channels, SIDE, SIDE + 1), mean, std)


def make_data(channels: int = 3, **options: object) -> Data:
    splits = {"train": make_split(channels=channels), "test": make_split("test", 7, channels, seed=1)}
    return Data(info(channels), splits, LoaderOptions(**{"batch_size": 5, **options}))


class TestConstruction:
    @pytest.mark.parametrize(
        ("one", "other"), [("test", "train"), ("test", "val"), ("test", "calibration"), ("val", "train")]
    )
    def test_overlap_is_refused(self, one: str, other: str) -> None:
        shared = make_split()
        splits = {one: shared.subset(np.arange(3, 9)), other: shared.subset(np.arange(8, 20))}
        with pytest.raises(StageError, match=f"^1 samples are in both {one} and {other}, among them train/00008$"):
            Data(info(), splits)

    def test_calibration_may_come_from_train_or_val(self) -> None:
        shared = make_split()
        for other in ("train", "val"):
            Data(info(), {other: shared, "calibration": shared.subset(np.arange(4))})

    @settings(deadline=None)
    @given(st.data())
    def test_disjoint_or_refused(self, data: st.DataObject) -> None:
        shared = make_split()
        subsets = st.lists(st.integers(0, NUM - 1), unique=True)
        chosen = {name: data.draw(subsets) for name in ("train", "val", "test", "calibration")}
        splits = {name: shared.subset(np.array(positions, dtype=np.int64)) for name, positions in chosen.items()}
        train, val, test, calibration = map(set, chosen.values())
        if test & (train | val | calibration) or train & val:
            with pytest.raises(StageError):
                Data(info(), splits)
        else:
            Data(info(), splits)

    def test_an_id_twice_is_refused(self) -> None:
        with pytest.raises(StageError, match="split train has 3 samples but only 2 different ids"):
            Data(info(), {"train": make_split().subset(np.array([1, 2, 1]))})

    @pytest.mark.parametrize("label", [-1, 3])
    def test_label_without_a_class_is_refused(self, label: int) -> None:
        split = make_split()
        split.labels_N[4] = label
        with pytest.raises(StageError, match=f"split train has the label {label}; classes are numbered 0 to 2"):
            Data(info(), {"train": split})

    def test_unknown_augmentation(self) -> None:
        with pytest.raises(StageError, match=re.escape("augment: 'filp' is not known (did you mean 'flip'?)")):
            make_data(augment=("shift", "filp"))

    def test_missing_splits_are_empty(self) -> None:
        data = make_data()
        assert [len(split) for split in data.splits.values()] == [NUM, 0, 7, 0]
        assert list(data.batches("val")) == []

    def test_seventy_thousand_ids_are_checked_in_no_time(self) -> None:
        pixels = ArrayImages(np.zeros((60_000, 1, 1, 1), dtype=np.uint8))
        pool = Split(np.array([f"train/{i:05d}" for i in range(60_000)]), np.zeros(60_000, dtype=np.int64), pixels)
        test = Split(
            np.array([f"test/{i:05d}" for i in range(10_000)]),
            np.zeros(10_000, dtype=np.int64),
            pool.subset(np.arange(10_000)).images,
        )
        splits = {"train": pool.subset(np.arange(55_000)), "val": pool.subset(np.arange(55_000, 60_000)), "test": test}
        times = []
        for _ in range(5):
            start = time.perf_counter()
            Data(DatasetInfo("x", ("a",), (1, 1, 1), (0.5,), (0.5,)), splits)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.05


class TestBatches:
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_are_the_normalized_images_in_order(self, channels: int, channels_last: bool) -> None:
        data = make_data(channels)
        order_N = epoch_order(NUM, 7, 3)
        batches = list(data.batches("train", order_N=order_N, channels_last=channels_last))
        assert [len(batch.targets["labels"]) for batch in batches] == [5, 5, 5, 5, 3]
        split = data.splits["train"]
        for batch, start in zip(batches, range(0, NUM, 5), strict=True):
            indices = order_N[start : start + 5]
            mean, std = (np.array(values)[:, None, None] for values in (data.info.mean, data.info.std))
            expected = (split.images.pixels_NHWC[indices].transpose(0, 3, 1, 2) / 255 - mean) / std
            np.testing.assert_allclose(batch.inputs["images"].numpy(), expected, rtol=1e-5, atol=1e-6)
            assert batch.inputs["images"].dtype == torch.float32 and batch.targets["labels"].dtype == torch.int64
            np.testing.assert_array_equal(batch.targets["labels"].numpy(), split.labels_N[indices])
            np.testing.assert_array_equal(batch.indices_N.numpy(), indices)

    @pytest.mark.parametrize("channels", [1, 3])
    def test_memory_format_is_what_torch_means_by_it(self, channels: int) -> None:
        """Also with one channel, where both formats are the same bytes and only strides tell a convolution which."""
        data = make_data(channels)
        for channels_last in (False, True):
            wanted = torch.channels_last if channels_last else torch.contiguous_format
            (batch, *_) = data.batches("train", channels_last=channels_last)
            assert (
                batch.inputs["images"].stride()
                == torch.empty(batch.inputs["images"].shape, memory_format=wanted).stride()
            )

    @pytest.mark.parametrize("channels", [1, 3])
    def test_memory_format_does_not_change_bits(self, channels: int) -> None:
        data = make_data(channels)
        for one, other in zip(data.batches("train"), data.batches("train", channels_last=True), strict=True):
            assert one.inputs["images"].equal(other.inputs["images"])

    @settings(deadline=None)
    @given(st.integers(1, NUM + 5), st.integers(1, NUM + 5))
    def test_batch_size_does_not_change_bits(self, one: int, other: int) -> None:
        data = make_data(augment=("shift", "flip", "rotate"))
        images = [
            torch.cat([batch.inputs["images"] for batch in data.batches("train", batch_size=size, augment_seed=(1, 2))])
            for size in (one, other)
        ]
        assert images[0].equal(images[1])

    def test_a_slice_of_an_order_is_the_same_batches(self) -> None:
        data = make_data(augment=("crop",))
        order_N = epoch_order(NUM, 7, 0)
        whole = list(data.batches("train", order_N=order_N, augment_seed=(7, 0)))
        rest = list(data.batches("train", order_N=order_N[10:], augment_seed=(7, 0)))
        for one, other in zip(whole[2:], rest, strict=True):
            assert one.inputs["images"].equal(other.inputs["images"]) and one.indices_N.equal(other.indices_N)

    def test_augmentation_happens_when_asked_for_alone(self) -> None:
        plain, augmented = make_data(), make_data(augment=("flip",))
        for one, other in zip(plain.batches("train"), augmented.batches("train"), strict=True):
            assert one.inputs["images"].equal(other.inputs["images"])
        seeds = [
            torch.cat([b.inputs["images"] for b in augmented.batches("train", augment_seed=(1, e))]) for e in (0, 0, 1)
        ]
        assert seeds[0].equal(seeds[1]) and not seeds[0].equal(seeds[2])

    def test_no_global_randomness(self) -> None:
        data = make_data(augment=("shift", "zoom"))
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
        list(data.batches("train", order_N=epoch_order(NUM, 1, 1), augment_seed=(1, 1)))
        assert torch.get_rng_state().equal(torch_state)
        np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)

    def test_caller_may_write_to_everything(self, tmp_path: Path) -> None:
        make_data().save(tmp_path)
        data = Data.load(tmp_path)
        order_N = np.arange(NUM)
        order_N.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for batch in data.batches("train", order_N=order_N):
                batch.inputs["images"].zero_(), batch.targets["labels"].zero_(), batch.indices_N.zero_()
        assert data.splits["train"].labels_N.any() and next(data.batches("train")).inputs["images"].any()

    def test_under_inference_mode_first_and_training_later(self) -> None:
        data = make_data()
        with torch.inference_mode():
            list(data.batches("train"))
        (batch, *_) = data.batches("train")
        weight = torch.ones(1, requires_grad=True)
        (batch.inputs["images"] * weight).sum().backward()
        assert weight.grad is not None

    def test_device(self) -> None:
        (batch, *_) = make_data().batches("train", device="cpu")
        assert batch.inputs["images"].device.type == "cpu"
        (meta, *_) = make_data().batches("train", device="meta")
        assert (meta.inputs["images"].device.type, meta.targets["labels"].device.type, meta.indices_N.device.type) == (
            "meta",
            "meta",
            "cpu",
        )

    @settings(deadline=None)
    @given(st.integers(0, 500), st.integers(0, 2**31), st.integers(0, 1000))
    def test_epoch_order_is_a_permutation(self, num: int, seed: int, epoch: int) -> None:
        order_N = epoch_order(num, seed, epoch)
        assert sorted(order_N.tolist()) == list(range(num))
        np.testing.assert_array_equal(order_N, epoch_order(num, seed, epoch))
        if num > 20:
            assert (order_N != epoch_order(num, seed, epoch + 1)).any()


class TestFolder:
    def test_round_trip(self, tmp_path: Path) -> None:
        pool = make_split()
        splits = {
            "train": pool.subset(np.arange(2, 20)),
            "val": pool.subset(np.array([21, 0])),
            "test": make_split("test", 7, seed=1),
            "calibration": pool.subset(np.arange(2, 20)).subset(np.array([5, 1])),
        }
        data = Data(info(), splits, LoaderOptions(batch_size=5, augment=("flip", "shift"), num_workers=1))
        data.save(tmp_path)
        again = Data.load(tmp_path)
        assert again.loader == LoaderOptions(batch_size=5, augment=("flip", "shift"))
        again = again.with_options({"num_workers": 1, "batch_size": 7, "strange": 2})
        assert again.info == data.info and again.loader == data.loader and again.summary() == data.summary()
        for name, split in data.splits.items():
            other = again.splits[name]
            assert other.ids.dtype.kind == "U" and other.labels_N.dtype == np.int64
            np.testing.assert_array_equal(other.ids, split.ids)
            np.testing.assert_array_equal(other.labels_N, split.labels_N)
            every = np.arange(len(split))
            np.testing.assert_array_equal(other.images.take(every), split.images.take(every))

    def test_pixels_are_stored_once_and_only_those_in_use(self, tmp_path: Path) -> None:
        pool = make_split(num=1000)
        Data(info(), {"train": pool.subset(np.arange(100)), "calibration": pool.subset(np.arange(50, 80))}).save(
            tmp_path
        )
        pixels = sorted(path.stat().st_size - 128 for path in tmp_path.glob("images_*.npy"))
        assert pixels[-1] == 100 * SIDE * (SIDE + 1) * 3 and sum(pixels) == pixels[-1]

    def test_pixels_are_mapped_not_read(self, tmp_path: Path) -> None:
        make_data().save(tmp_path)
        images = Data.load(tmp_path).splits["train"].images
        assert isinstance(images, SubsetImages) and isinstance(images.source, ArrayImages)
        assert isinstance(images.source.pixels_NHWC, np.memmap)

    def test_a_read_only_folder_will_do_and_stays_as_it_is(self, tmp_path: Path) -> None:
        make_data().save(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        for path in tmp_path.iterdir():
            path.chmod(0o444)
        tmp_path.chmod(0o555)
        data = Data.load(tmp_path)
        for batch in data.batches("train"):
            batch.inputs["images"].zero_()
        tmp_path.chmod(0o755)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_plugins_own_images_are_stored_as_pixels(self, tmp_path: Path) -> None:
        class Ramp:
            def __len__(self) -> int:
                return 10

            def take(self, indices_B: np.ndarray) -> np.ndarray:
                return np.broadcast_to(indices_B[:, None, None, None], (len(indices_B), 2, 2, 1)).astype(np.uint8)

        split = Split(np.array([f"ramp/{i}" for i in range(10)]), np.zeros(10, dtype=np.int64), Ramp())
        Data(DatasetInfo("ramp", ("a",), (1, 2, 2), (0.5,), (0.5,)), {"test": split}).save(tmp_path)
        pixels = Data.load(tmp_path).splits["test"].images.take(np.array([9, 3]))
        assert pixels[:, 0, 0, 0].tolist() == [9, 3]

    def test_ids_that_are_not_ascii(self, tmp_path: Path) -> None:
        split = make_split(num=2)
        data = Data(info(), {"train": Split(np.array(["größe", "日本"]), split.labels_N, split.images)})
        data.save(tmp_path)
        assert Data.load(tmp_path).splits["train"].ids.tolist() == ["größe", "日本"]

    def test_no_pickle(self, tmp_path: Path) -> None:
        make_data().save(tmp_path)
        for path in tmp_path.glob("*.npy"):
            np.load(path, allow_pickle=False)
        assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json"}

    def test_files_are_stored_by_reference(self, tmp_path: Path) -> None:
        images = FileImages(tmp_path, np.array([b"a.png", "ö.png".encode()]), 8, 10, 3)
        split = Split(np.array(["a.png", "ö.png"]), np.array([0, 1]), images)
        (tmp_path / "stored").mkdir()
        Data(info(), {"train": split}).save(tmp_path / "stored")
        again = Data.load(tmp_path / "stored").splits["train"].images.source
        assert isinstance(again, FileImages) and (again.root, again.size, again.resize, again.channels) == (
            tmp_path,
            8,
            10,
            3,
        )
        assert again.paths_N.tolist() == images.paths_N.tolist()
