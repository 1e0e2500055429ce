"""Data: what it refuses, what its batches hold, and how it is stored."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import IntegrityError, StageError
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Classification,
    Column,
    Data,
    DatasetInfo,
    ImageFileColumn,
    ImageInfo,
    LoaderOptions,
    MultiLabel,
    RaggedColumn,
    Regression,
    Signature,
    Split,
    Task,
    TokenClassification,
    TokensInfo,
    Unlabeled,
    epoch_order,
)
from ptpipe_torch.data.column import SubsetColumn

from ....datasets import image_info, image_split, labels_of

NUM, SIDE = 23, 4


def make_split(prefix: str = "train", num: int = NUM, channels: int = 3, seed: int = 0) -> Split:
    pixels = np.random.default_rng(seed).integers(0, 256, (num, SIDE, SIDE + 1, channels), dtype=np.uint8)
    return image_split(
        np.array([f"{prefix}/{i:05d}" for i in range(num)], dtype=np.str_), np.arange(num) % 3, ArrayColumn(pixels)
    )


def info(channels: int = 3) -> DatasetInfo:
    mean, std = (0.1, 0.4, 0.7)[:channels], (0.2, 0.3, 0.5)[:channels]
    return image_info("tiny", ("a", "b", "c"), (channels, SIDE, SIDE + 1), mean, std)


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
        labels_N = labels_of(split)
        labels_N[4] = label
        message = rf"^sample {split.ids[4]}: split train has the label {label}; classes are numbered 0 to 2$"
        with pytest.raises(StageError, match=message):
            Data(info(), {"train": image_split(split.ids, labels_N, split.inputs["images"])})

    @pytest.mark.parametrize(
        ("task", "message"),
        [
            (MultiLabel(label_names=("wide", "dark")), "has a dark other than 0 and 1"),
            (Regression(target_names=("size", "age"), mean=(0, 0), std=(1, 1)), "has a age that is not finite"),
        ],
    )
    def test_targets_that_can_not_be(self, task: Task, message: str) -> None:
        split, targets_NT = make_split(), np.zeros((NUM, 2), np.float32)
        targets_NT[7:9, 1] = np.nan
        (name,) = task.targets
        wrong = Split(split.ids, split.inputs, {name: ArrayColumn(targets_NT)})
        with pytest.raises(StageError, match=rf"^sample train/00007: split train {message}$"):
            Data(replace(info(), task=task), {"train": wrong})

    def test_unknown_augmentation(self) -> None:
        with pytest.raises(StageError, match=re.escape("augment: 'filp' is not known (did you mean 'flip'?)")):
            make_data(augment=("shift", "filp"))

    def test_columns_are_those_of_the_info(self) -> None:
        split = make_split()
        for wrong, message in (
            (Split(split.ids, {"pixels": split.inputs["images"]}, split.targets), "split train has the inputs"),
            (Split(split.ids, split.inputs, {}), "split train has the targets"),
            (Split(split.ids[1:], split.inputs, split.targets), "split train has columns of different lengths"),
        ):
            with pytest.raises(AssertionError, match=message):
                Data(info(), {"train": wrong})

    def test_ids_are_texts_and_columns_are_columns(self) -> None:
        split = make_split()
        pixels = split.inputs["images"].values()
        for wrong, message in (
            (Split(split.ids.tolist(), split.inputs, split.targets), "split train: ids must be a NumPy array of texts"),
            (Split(np.arange(NUM), split.inputs, split.targets), "split train: ids must be a NumPy array of texts"),
            (
                Split(split.ids, {"images": pixels}, split.targets),
                r"split train: images is a ndarray and no Column: put",
            ),
        ):
            with pytest.raises(StageError, match=f"^{message}"):
                Data(info(), {"train": wrong})

    @pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="of NumPy 2")
    def test_ids_may_be_texts_of_any_length(self, tmp_path: Path) -> None:
        split = make_split()
        ids = split.ids.astype(np.dtypes.StringDType())
        Data(info(), {"train": Split(ids, split.inputs, split.targets)}).save(tmp_path)
        assert Data.load(tmp_path).splits["train"].ids.tolist() == split.ids.tolist()

    @pytest.mark.parametrize("fact", ["class_scores", "probability_functions", "meanings"])
    def test_a_task_names_its_own_outputs(self, fact: str) -> None:
        task = type("Odd", (Classification,), {fact: property(lambda self: {"logit": ("a",)})})
        odd = replace(info(), task=task(class_names=("a", "b", "c")))
        with pytest.raises(StageError, match=rf"^Odd\.{fact} names 'logit', and its outputs are logits$"):
            Data(odd, {"train": make_split()})

    def test_meanings_in_a_list_are_those_in_a_tuple(self) -> None:
        meanings = property(lambda self: {"logits": ["a", "b", "c"]})
        task = type("Listing", (Classification,), {"meanings": meanings})(class_names=("a", "b", "c"))
        listing = replace(info(), task=task)
        listing.check_fit("net", Signature.from_json(listing.signature.to_json()))

    def test_a_column_is_an_input_or_a_target(self) -> None:
        split = make_split()
        both = DatasetInfo("x", {"labels": ArrayInfo(dtype="int64")}, Classification(class_names=("a", "b", "c")))
        with pytest.raises(AssertionError, match="inputs and targets"):
            Data(both, {"train": Split(split.ids, split.targets, split.targets)})

    def test_rows_of_ones_own_column_have_one_shape(self, tmp_path: Path) -> None:
        class Sounds(Column):
            def __len__(self) -> int:
                return NUM

            def take(self, indices_B: np.ndarray) -> np.ndarray:
                return np.zeros((len(indices_B), 2, 1 + int(indices_B.max())), np.float32)

        split = make_split()
        sounds = DatasetInfo("s", {"sounds": ArrayInfo(dtype="float32", shape=(2, "length"))}, info().task)
        data = Data(sounds, {"train": Split(split.ids, {"sounds": Sounds()}, split.targets)})
        message = (
            rf"Sounds.take() returned rows of shape (2, 1), and then of (2, {NUM}): a stored column has rows of one"
        )
        with pytest.raises(StageError, match=f"^{re.escape(message)}"):
            data.save(tmp_path)

    def test_every_split_may_be_empty(self, tmp_path: Path) -> None:
        data = Data(info(), {"train": make_split().subset(np.empty(0, dtype=np.int64))})
        data.save(tmp_path)
        assert [len(split) for split in Data.load(tmp_path).splits.values()] == [0, 0, 0, 0]

    def test_missing_splits_are_empty(self) -> None:
        data = make_data()
        assert [len(split) for split in data.splits.values()] == [NUM, 0, 7, 0]
        assert list(data.batches("val")) == []

    def test_seventy_thousand_ids_are_checked_in_no_time(self) -> None:
        pixels = ArrayColumn(np.zeros((60_000, 1, 1, 1), dtype=np.uint8))
        pool = image_split(
            np.array([f"train/{i:05d}" for i in range(60_000)]), np.zeros(60_000, dtype=np.int64), pixels
        )
        test = image_split(
            np.array([f"test/{i:05d}" for i in range(10_000)]),
            np.zeros(10_000, dtype=np.int64),
            pool.subset(np.arange(10_000)).inputs["images"],
        )
        splits = {"train": pool.subset(np.arange(55_000)), "val": pool.subset(np.arange(55_000, 60_000)), "test": test}
        times = []
        for _ in range(5):
            start = time.process_time()
            Data(image_info("x", ("a",), (1, 1, 1), (0.5,), (0.5,)), splits)
            times.append(time.process_time() - start)
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
            images = data.info.inputs["images"]
            mean, std = (np.array(values)[:, None, None] for values in (images.mean, images.std))
            expected = (split.inputs["images"].array_N[indices].transpose(0, 3, 1, 2) / 255 - mean) / std
            np.testing.assert_allclose(batch.inputs["images"].numpy(), expected, rtol=1e-5, atol=1e-6)
            assert batch.inputs["images"].dtype == torch.float32 and batch.targets["labels"].dtype == torch.int64
            np.testing.assert_array_equal(batch.targets["labels"].numpy(), labels_of(split)[indices])
            np.testing.assert_array_equal(batch.indices_N.numpy(), indices)

    @pytest.mark.parametrize("channels", [1, 3])
    def test_memory_format_is_what_torch_means_by_it(self, channels: int) -> None:
        """Also with one channel, where both formats are the same bytes and only strides tell a convolution which."""
        data = make_data(channels)
        for channels_last in (False, True):
            wanted = torch.channels_last if channels_last else torch.contiguous_format
            (batch, *_) = data.batches("train", channels_last=channels_last)
            images = batch.inputs["images"]
            assert images.stride() == torch.empty(images.shape, memory_format=wanted).stride()

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
        assert labels_of(data.splits["train"]).any() and next(data.batches("train")).inputs["images"].any()

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
        assert {tensor.device.type for tensor in (*meta.args, *meta.targets.values())} == {"meta"}
        assert meta.indices_N.device.type == "cpu"

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_targets_alone_read_no_image(self, num_workers: int) -> None:
        class Unread(ArrayColumn):
            def take(self, indices_B: np.ndarray) -> np.ndarray:
                raise RuntimeError("an image was read")

        split = make_split()
        images = Unread(split.inputs["images"].array_N)
        data = Data(
            info(),
            {"train": image_split(split.ids, labels_of(split), images)},
            LoaderOptions(batch_size=5, num_workers=num_workers, augment=("flip",)),
        )
        order_N = epoch_order(NUM, 7, 0)
        batches = list(data.batches("train", order_N=order_N, augment_seed=(7, 0), with_inputs=False))
        assert [batch.inputs for batch in batches] == [{}] * 5
        assert torch.cat([batch.targets["labels"] for batch in batches]).tolist() == labels_of(split)[order_N].tolist()
        assert torch.cat([batch.indices_N for batch in batches]).tolist() == order_N.tolist()

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
            assert other.ids.dtype.kind == "U" and labels_of(other).dtype == np.int64
            np.testing.assert_array_equal(other.ids, split.ids)
            for column in ("images", "labels"):
                np.testing.assert_array_equal(other.columns[column].values(), split.columns[column].values())

    def test_pixels_are_stored_once_and_only_those_in_use(self, tmp_path: Path) -> None:
        pool = make_split(num=1000)
        splits = {"train": pool.subset(np.arange(100)), "calibration": pool.subset(np.arange(50, 80))}
        Data(info(), splits).save(tmp_path)
        columns = sorted(path.stat().st_size - 128 for path in tmp_path.glob("column_*.npy"))
        assert columns == [100 * 8, 100 * SIDE * (SIDE + 1) * 3]
        # Of train, calibration, and the empty ones: images and labels share a file.
        assert len(list(tmp_path.glob("positions_*.npy"))) == 3

    def test_pixels_are_mapped_not_read(self, tmp_path: Path) -> None:
        make_data().save(tmp_path)
        images = Data.load(tmp_path).splits["train"].inputs["images"]
        assert isinstance(images, SubsetColumn) and isinstance(images.source, ArrayColumn)
        assert isinstance(images.source.array_N, np.memmap)

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

    def test_a_plugins_own_column_is_stored_as_an_array(self, tmp_path: Path) -> None:
        class Ramp(Column):
            def __len__(self) -> int:
                return 10

            def take(self, indices_B: np.ndarray) -> np.ndarray:
                return np.broadcast_to(indices_B[:, None, None, None], (len(indices_B), 2, 2, 1)).astype(np.uint8)

        split = image_split(np.array([f"ramp/{i}" for i in range(10)]), np.zeros(10, dtype=np.int64), Ramp())
        Data(image_info("ramp", ("a",), (1, 2, 2), (0.5,), (0.5,)), {"test": split}).save(tmp_path)
        pixels = Data.load(tmp_path).splits["test"].inputs["images"].take(np.array([9, 3]))
        assert pixels[:, 0, 0, 0].tolist() == [9, 3]

    def test_ids_that_are_not_ascii(self, tmp_path: Path) -> None:
        split = make_split(num=2)
        named = image_split(np.array(["größe", "日本"]), labels_of(split), split.inputs["images"])
        Data(info(), {"train": named}).save(tmp_path)
        assert Data.load(tmp_path).splits["train"].ids.tolist() == ["größe", "日本"]

    def test_no_pickle(self, tmp_path: Path) -> None:
        make_data().save(tmp_path)
        for path in tmp_path.glob("*.npy"):
            np.load(path, allow_pickle=False)
        assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json"}

    def test_files_are_stored_by_reference(self, tmp_path: Path) -> None:
        images = ImageFileColumn(tmp_path, np.array([b"a.png", "ö.png".encode()]), 8, 10, 3)
        split = image_split(np.array(["a.png", "ö.png"]), np.array([0, 1]), images)
        (tmp_path / "stored").mkdir()
        Data(info(), {"train": split}).save(tmp_path / "stored")
        again = Data.load(tmp_path / "stored").splits["train"].inputs["images"].source
        assert isinstance(again, ImageFileColumn)
        assert (again.root, again.size, again.resize, again.channels) == (tmp_path, 8, 10, 3)
        assert again.paths_N.tolist() == images.paths_N.tolist()


class TestSeveralColumns:
    """Two inputs of different kinds, and numbers that are given as they are."""

    @staticmethod
    def make(num_workers: int = 0) -> Data:
        rng = np.random.default_rng(0)
        image = ImageInfo(shape_CHW=(3, SIDE, SIDE + 1), mean=(0.1, 0.4, 0.7), std=(0.2, 0.3, 0.5))
        inputs = {
            "clinical": ArrayInfo(dtype="float32", shape=(5,)),
            "images": image,
            "tokens": ArrayInfo(dtype="int64", shape=(2, 3)),
        }
        columns = {
            "clinical": ArrayColumn(rng.normal(size=(NUM, 5)).astype(np.float32)),
            "images": make_split().inputs["images"],
            "tokens": ArrayColumn(rng.integers(-(2**40), 2**40, (NUM, 2, 3))),
        }
        pool = Split(make_split().ids, columns, {"labels": ArrayColumn(np.arange(NUM) % 3)})
        splits = {"train": pool.subset(np.arange(4, NUM)), "val": pool.subset(np.array([3, 0]))}
        splits["calibration"] = splits["train"].subset(np.array([5, 1]))
        task = Classification(class_names=("a", "b", "c"))
        loader = LoaderOptions(batch_size=5, num_workers=num_workers, augment=("flip", "shift"))
        return Data(DatasetInfo("several", inputs, task), splits, loader)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_stored_read_back_and_batched(self, tmp_path: Path, num_workers: int) -> None:
        data = self.make(num_workers)
        data.save(tmp_path)
        again = Data.load(tmp_path).with_options({"num_workers": num_workers})
        assert again.info == data.info and list(again.info.inputs) == ["clinical", "images", "tokens"]
        assert again.summary() == data.summary()
        order_N = epoch_order(NUM - 4, 7, 0)
        batches = list(again.batches("train", order_N=order_N, augment_seed=(7, 0)))
        assert [len(batch) for batch in batches] == [5, 5, 5, 4]
        for one, other in zip(batches, self.make().batches("train", order_N=order_N, augment_seed=(7, 0)), strict=True):
            assert list(one.inputs) == list(other.inputs) == ["clinical", "images", "tokens"]
            assert all(tensor.equal(expected) for tensor, expected in zip(one.args, other.args, strict=True))
            assert one.targets["labels"].equal(other.targets["labels"]) and one.indices_N.equal(other.indices_N)
            rows = one.indices_N.numpy() + 4
            for name, dtype in (("clinical", torch.float32), ("tokens", torch.int64)):
                source = data.splits["train"].inputs[name].source
                assert one.inputs[name].dtype == dtype
                np.testing.assert_array_equal(one.inputs[name].numpy(), source.array_N[rows])
            assert one.inputs["images"].dtype == torch.float32

    def test_the_signature_is_in_the_order_of_the_inputs(self) -> None:
        assert str(self.make().info.signature) == (
            "clinical (batch, 5) float32, images (batch, 3, 4, 5) float32, tokens (batch, 2, 3) int64 "
            "-> logits (batch, 3) float32"
        )
        assert self.make().summary() == {
            "name": "several",
            "inputs": [
                "clinical (batch, 5) float32",
                "images (batch, 3, 4, 5) float32",
                "tokens (batch, 2, 3) int64",
            ],
            "num_classes": 3,
            "class_names": ["a", "b", "c"],
            "num_train": NUM - 4,
            "num_val": 2,
            "num_test": 0,
            "num_calibration": 2,
            "task": "Classification",
            "metrics": ["accuracy", "loss"],
        }

    def test_channels_last_is_for_images(self) -> None:
        (batch, *_) = self.make().batches("train", channels_last=True)
        assert batch.inputs["images"].is_contiguous(memory_format=torch.channels_last)
        assert batch.inputs["clinical"].is_contiguous() and batch.inputs["tokens"].is_contiguous()

    def test_values_of_another_dtype_or_shape_are_refused(self) -> None:
        data = self.make()
        for wrong in (np.zeros((NUM, 5)), np.zeros((NUM, 4), dtype=np.float32)):
            splits = {
                name: Split(split.ids, split.inputs | {"clinical": ArrayColumn(wrong[: len(split)])}, split.targets)
                for name, split in data.splits.items()
            }
            with pytest.raises(StageError, match=r"^column clinical: a batch of shape .* which is not clinical \("):
                next(Data(data.info, splits, data.loader).batches("train"))


class TestTexts:
    """Rows of different lengths, and files that belong to them."""

    ROWS = ([1, 2, 3], [4], [5, 6], [], [7, 8, 9, 10], [11])
    ASSETS = {"tokenizer.json": b'{"a": 1}\n', "notes_2.txt": b"\xff\x00"}  # noqa: RUF012

    @classmethod
    def pool(cls, length: int | None = None) -> Split:
        """A split of six texts, whose tags are the tokens, less 1."""
        values_V = np.array([value for row in cls.ROWS for value in row], dtype=np.int64)
        offsets_N = np.cumsum([0, *map(len, cls.ROWS)])
        inputs = {"tokens": RaggedColumn(values_V, offsets_N, 0, length)}
        targets = {"tags": RaggedColumn(values_V - 1, offsets_N, -1, length)}
        return Split(np.array([f"text/{number}" for number in range(6)]), inputs, targets)

    @classmethod
    def make(cls, length: int | None = None, assets: Mapping[str, bytes] = MappingProxyType({})) -> Data:
        pool = cls.pool(length)
        splits = {"train": pool.subset(np.array([4, 2, 3])), "val": pool.subset(np.array([1]))}
        splits["calibration"] = splits["train"].subset(np.array([2, 0]))
        padding = "longest" if length is None else "max_length"
        tokens = TokensInfo(vocabulary_size=12, max_length=length or 4, padding=padding)
        task = TokenClassification(class_names=tuple("abcdefghijk"), length=tokens.length)
        return Data(DatasetInfo("texts", {"tokens": tokens}, task), splits, LoaderOptions(batch_size=2), assets)

    @pytest.mark.parametrize("length", [None, 5])
    def test_stored_and_read_back(self, tmp_path: Path, length: int | None) -> None:
        data = self.make(length, self.ASSETS)
        data.save(tmp_path)
        again = Data.load(tmp_path)
        assert again.info == data.info and again.summary() == data.summary() and again.assets == data.assets
        for name, split in data.splits.items():
            assert again.splits[name].ids.tolist() == split.ids.tolist()
            for column in ("tokens", "tags"):
                one, other = again.splits[name].columns[column].values(), split.columns[column].values()
                assert one.dtype == other.dtype == np.int64 and one.tolist() == other.tolist()
        assert again.splits["train"].inputs["tokens"].values()[1].tolist() == [5, 6] + [0] * ((length or 4) - 2)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_batches_are_padded_on_their_own(self, tmp_path: Path, num_workers: int) -> None:
        self.make().save(tmp_path)
        data = Data.load(tmp_path).with_options({"num_workers": num_workers})
        first, second = data.batches("train")
        assert first.inputs["tokens"].tolist() == [[7, 8, 9, 10], [5, 6, 0, 0]]
        assert first.targets["tags"].tolist() == [[6, 7, 8, 9], [4, 5, -1, -1]]
        assert second.inputs["tokens"].shape == second.targets["tags"].shape == (1, 0)

    def test_rows_are_stored_once_and_only_those_in_use(self, tmp_path: Path) -> None:
        self.make().save(tmp_path)
        values = [np.load(tmp_path / f"column_{number}.npy").tolist() for number in range(2)]
        assert values == [[4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 6, 7, 8, 9]], "texts 1, 2, 3 and 4"
        offsets = [np.load(tmp_path / f"column_{number}.offsets.npy").tolist() for number in range(2)]
        assert offsets == [[0, 1, 3, 3, 7]] * 2
        assert len(list(tmp_path.glob("column_*"))) == 4

    def test_values_are_mapped_not_read(self, tmp_path: Path) -> None:
        self.make().save(tmp_path)
        tokens = Data.load(tmp_path).splits["train"].inputs["tokens"]
        assert isinstance(tokens, SubsetColumn) and isinstance(tokens.source, RaggedColumn)
        assert isinstance(tokens.source.values_V, np.memmap)

    def test_what_is_stored_again_is_the_same(self, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir(), (tmp_path / "other").mkdir()
        self.make(assets=self.ASSETS).save(tmp_path / "one")
        Data.load(tmp_path / "one").save(tmp_path / "other")
        one, other = ({path.name: path.read_bytes() for path in (tmp_path / of).iterdir()} for of in ("one", "other"))
        assert one == other

    @settings(deadline=None, max_examples=30)
    @given(st.data())
    def test_any_rows_are_read_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.integers(0, 5), unique=True))
        of_train = data.draw(st.integers(0, len(chosen)))
        pool, made = self.pool(), self.make()
        parts = {"train": chosen[:of_train], "test": chosen[of_train:]}
        splits = {name: pool.subset(np.array(rows, dtype=np.int64)) for name, rows in parts.items()}
        with tempfile.TemporaryDirectory() as folder:
            Data(made.info, splits).save(Path(folder))
            again = Data.load(Path(folder))
            for name, rows in parts.items():
                expected = pool.inputs["tokens"].take(np.array(rows, dtype=np.int64)).tolist()
                assert again.splits[name].inputs["tokens"].values().tolist() == expected
                assert again.splits[name].ids.tolist() == [f"text/{row}" for row in rows]

    def test_assets_are_files_and_deliverables(self, tmp_path: Path) -> None:
        self.make(assets=self.ASSETS).save(tmp_path)
        assert Data.deliverables(tmp_path) == ("tokenizer.json", "notes_2.txt")
        for name, content in self.ASSETS.items():
            assert (tmp_path / name).read_bytes() == content
        (tmp_path / "plain").mkdir()
        self.make().save(tmp_path / "plain")
        assert Data.deliverables(tmp_path / "plain") == () and Data.load(tmp_path / "plain").assets == {}

    def test_options_leave_assets_as_they_are(self) -> None:
        assert self.make(assets=self.ASSETS).with_options({"num_workers": 1}).assets == self.ASSETS

    @pytest.mark.parametrize("content", [None, "", "{}", "[", '{"assets": []}'])
    def test_deliverables_of_what_is_no_data_set(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "data.json").write_text(content)
        with pytest.raises(IntegrityError, match=r"^not a stored data set: "):
            Data.deliverables(tmp_path)

    @pytest.mark.parametrize(("token", "tag", "message"), [
        (12, 0, "split train: tokens has the token id 12; the vocabulary has 12"),
        (0, 11, "split train has the target 11; classes are numbered 0 to 10"),
        (0, -2, "split train has the target -2; classes are numbered 0 to 10"),
    ])  # fmt: skip
    def test_values_that_can_not_be(self, token: int, tag: int, message: str) -> None:
        tokens, tags = (RaggedColumn(np.array([0, value]), np.array([0, 2]), 0) for value in (token, tag))
        with pytest.raises(StageError, match=rf"^sample a: {message}$"):
            Data(self.make().info, {"train": Split(np.array(["a"]), {"tokens": tokens}, {"tags": tags})})

    def test_the_first_sample_of_a_value_that_can_not_be_is_named(self) -> None:
        ids, offsets_N = np.array([f"t/{row}" for row in range(3000)]), np.arange(3001)
        columns = {name: RaggedColumn(np.zeros(3000, dtype=np.int64), offsets_N, 0) for name in ("tokens", "tags")}
        columns["tags"].values_V[[2900, 2999]] = 11
        split = Split(ids, {"tokens": columns["tokens"]}, {"tags": columns["tags"]})
        with pytest.raises(StageError, match=r"^sample t/2900: split train has the target 11; "):
            Data(self.make().info, {"train": split})
        # Of texts that are stored together all values are looked at, also those of other splits.
        with pytest.raises(StageError, match=r"^split train has the target 11; "):
            Data(self.make().info, {"train": split.subset(np.arange(9))})


def of_texts(tokenizer: str, size: int = 90, names: tuple[str, ...] = ("ham", "spam")) -> DatasetInfo:
    tokens = TokensInfo(vocabulary_size=size, max_length=9, tokenizer_sha256=tokenizer)
    return DatasetInfo("texts", {"tokens": tokens}, Classification(class_names=names))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            of_texts("b" * 64),
            r"net takes tokens of \[tokenizer a{12}, 90 tokens\]; texts has \[tokenizer b{12}, 90 tokens\]: .* Use the "
            r"same tokenizer",
        ),
        (of_texts("a" * 64, size=80), r"texts has \[tokenizer aaaaaaaaaaaa, 80 tokens\]"),
        (of_texts("a" * 64, names=("spam", "ham")), r"net returns logits of \[ham, spam\]; texts has \[spam, ham\]"),
        (of_texts("a" * 64, names=("bad", "good")), r"net returns logits of \[ham, spam\]; texts has \[bad, good\]"),
    ],
)
def test_numbers_that_stand_for_something_else_do_not_fit(other: DatasetInfo, message: str) -> None:
    signature = of_texts("a" * 64).signature
    of_texts("a" * 64).check_fit("net", signature)
    with pytest.raises(StageError, match=message):
        other.check_fit("net", signature)


def test_what_is_not_known_fits() -> None:
    known, unknown = of_texts("a" * 64), of_texts("", names=("0", "1"))
    unnamed = Signature(known.signature.inputs, known.signature.outputs)
    known.check_fit("net", unnamed)
    known.check_inputs("net", unnamed)
    of_texts("a" * 64, names=("0", "1")).check_fit("net", known.signature)
    assert unknown.signature.meanings == {"tokens": ("90 tokens", "at most 9 in a text")}


def test_a_training_may_change_the_classes_but_not_their_order() -> None:
    signature = of_texts("a" * 64).signature
    of_texts("a" * 64, names=("bad", "good")).check_fit("net", signature, retrained=True)
    for other in (of_texts("a" * 64, names=("spam", "ham")), of_texts("b" * 64)):
        with pytest.raises(StageError, match="the same numbers stand for something else there"):
            other.check_fit("net", signature, retrained=True)


def test_images_of_another_normalization_do_not_fit_unless_trained_with() -> None:
    one, other = (
        DatasetInfo(name, {"images": ImageInfo(shape_CHW=(1, 4, 4), mean=(mean,), std=(0.2,))}, Unlabeled())
        for name, mean in (("day", 0.6), ("night", 0.2))
    )
    message = r"net takes images of \[mean 0.6, std 0.2\]; night has \[mean 0.2, std 0.2\]: .* such as `mean` and `std`"
    for check in (other.check_fit, other.check_inputs):
        with pytest.raises(StageError, match=message):
            check("net", one.signature)
        check("net", one.signature, retrained=True)
        check("net", replace(one.signature, meanings={}))
