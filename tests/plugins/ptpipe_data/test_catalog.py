"""Catalog data sets: search folders, verification, fingerprints."""

from __future__ import annotations

import gzip
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_data import catalog
from ptpipe_data.catalog import CatalogEntry, fingerprint
from ptpipe_torch import Data, epoch_order

from ...datasets import labels_of

OWN = front.MnistConfig(verify=False, calibration_size=10)


def as_published(contents: dict[str, bytes], like: CatalogEntry) -> CatalogEntry:
    """A published data set made of these files, as its authors would have described it."""
    files = []
    for file in like.files:
        packed = gzip.compress(contents[file.unpacked_name], mtime=0)
        unpacked_sha256 = file.unpacked_sha256 and hashlib.sha256(contents[file.unpacked_name]).hexdigest()
        files.append(
            replace(file, size_bytes=len(packed), md5=hashlib.md5(packed).hexdigest(), unpacked_sha256=unpacked_sha256)
        )
    return replace(like, files=tuple(files), num_per_class=like.num_per_class and (6, 2))


@pytest.fixture
def tiny_mnist(write_idx_set: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny files in the place of MNIST's, described as the published ones, in $PTPIPE_DATA/mnist."""
    monkeypatch.setenv("PTPIPE_DATA", str(tmp_path / "data"))
    folder = tmp_path / "data" / "mnist"
    contents = write_idx_set(folder)
    monkeypatch.setattr(catalog, "MNIST", as_published(contents, catalog.MNIST))
    return folder


def pixels(data: Data, split: str) -> np.ndarray:
    samples = data.splits[split]
    return samples.inputs["images"].take(np.arange(len(samples)))


@pytest.mark.mnist
def test_real_mnist(real_data: Path, ctx: Context, events, tmp_path: Path) -> None:
    config = front.MnistConfig()
    assert list(front.load_mnist.preflight(config)) == []
    data = front.load_mnist(config, ctx)
    assert data.info.name == "mnist" and data.info.inputs["images"].shape_CHW == (1, 28, 28) and not events.notices
    assert data.summary() == {
        "name": "mnist",
        "inputs": ["images (batch, 1, 28, 28) float32"],
        "task": "Classification",
        "metrics": ["accuracy", "top5_accuracy", "loss"],
        "num_classes": 10,
        "num_train": 57_000,
        "num_val": 3_000,
        "num_test": 10_000,
        "num_calibration": 2_000,
    }
    raw = gzip.decompress((real_data / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((real_data / "mnist" / "train-labels-idx1-ubyte.gz").read_bytes())
    for split in ("train", "val", "calibration"):
        positions = np.array([int(id_.partition("/")[2]) for id_ in data.splits[split].ids])
        np.testing.assert_array_equal(
            labels_of(data.splits[split]), np.frombuffer(labels, np.uint8, offset=8)[positions]
        )
        expected = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28, 1)[positions]
        np.testing.assert_array_equal(pixels(data, split), expected)
    assert set(data.splits["calibration"].ids) <= set(data.splits["train"].ids)
    everything = np.frombuffer(raw, np.uint8, offset=16) / 255.0
    assert data.info.inputs["images"].mean == pytest.approx((everything.mean(),), abs=5e-5)
    assert data.info.inputs["images"].std == pytest.approx((everything.std(),), abs=5e-5)

    folder = tmp_path / "stored"
    folder.mkdir()
    data.save(folder)
    assert shortest_s(lambda: Data.load(folder)) < 0.05
    again = Data.load(folder)
    for split in data.splits:
        np.testing.assert_array_equal(again.splits[split].ids, data.splits[split].ids)
        np.testing.assert_array_equal(pixels(again, split), pixels(data, split))
    num_id_bytes = sum(path.stat().st_size for path in folder.glob("*.ids.npy"))
    assert num_id_bytes < 12 * 72_000


@pytest.mark.mnist
def test_real_mnist_key_and_speed(real_data: Path, ctx: Context) -> None:
    config = front.MnistConfig()
    assert shortest_s(lambda: front.load_mnist.fingerprint(config)) < 0.06
    data = front.load_mnist(config, ctx)
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        order_N = epoch_order(57_000, 7, 0)
        seconds = shortest_s(lambda: [None for _ in data.batches("train", order_N=order_N, channels_last=True)])
    finally:
        torch.set_num_threads(threads)
    assert 57_000 / seconds > 150_000


def shortest_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def test_tables_are_torchvisions() -> None:
    from ptpipe_torch.torchvision_compat import torchvision

    datasets = torchvision().datasets
    for ours, theirs in ((catalog.MNIST, datasets.MNIST), (catalog.FASHION_MNIST, datasets.FashionMNIST)):
        assert list(ours.mirrors) == theirs.mirrors
        assert [(file.name, file.md5) for file in ours.files] == theirs.resources
    assert catalog.MNIST.class_names == tuple(name[0] for name in datasets.MNIST.classes)
    assert catalog.FASHION_MNIST.class_names == tuple(datasets.FashionMNIST.classes)
    python_version = catalog.CIFAR10.mirrors[0] + "cifar-10-python.tar.gz"
    assert python_version == datasets.CIFAR10.url


@pytest.mark.parametrize("place", ["mnist", "mnist/MNIST/raw", "MNIST/raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_places(
    place: str, packed: bool, ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_idx_set: Callable
) -> None:
    monkeypatch.setenv("PTPIPE_DATA", str(tmp_path / "data"))
    contents = write_idx_set(tmp_path / "data" / place, packed=packed)
    monkeypatch.setattr(catalog, "MNIST", as_published(contents, catalog.MNIST))
    data = front.load_mnist(front.MnistConfig(calibration_size=5, val_size=10), ctx)
    assert data.summary() | {"num_train": 50, "num_val": 10, "num_test": 20, "num_calibration": 5} == data.summary()
    expected = np.frombuffer(contents["t10k-images-idx3-ubyte"], np.uint8, offset=16).reshape(20, 6, 6, 1)
    np.testing.assert_array_equal(pixels(data, "test"), expected)


def test_first_place_with_all_files_counts(
    tiny_mnist: Path, write_idx_set: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny_mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    cached = tmp_path / "cache" / "ptpipe" / "mnist"
    write_idx_set(cached)
    found = catalog.find_files(catalog.MNIST, None)
    assert found is not None and {path.parent for path in found.values()} == {cached}


def test_missing_files_report_folders_and_what_they_contain(tiny_mnist: Path, ctx: Context) -> None:
    (tiny_mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(StageError) as caught:
        front.load_mnist(front.MnistConfig(), ctx)
    text = str(caught.value)
    assert text.startswith("MNIST not found: searched ") and "\n" not in text
    assert str(tiny_mnist) in text and "cache" in text
    assert text.endswith(
        f"{tiny_mnist} has only t10k-images-idx3-ubyte.gz, train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz"
    )


def test_unset_variable_is_reported(ctx: Context) -> None:
    with pytest.raises(StageError, match=r"\(\$PTPIPE_DATA is not set\)"):
        front.load_fashion_mnist(front.CatalogConfig(), ctx)


class TestKey:
    def test_published_local_and_not_yet_loaded_are_the_same(
        self, tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = fingerprint(catalog.MNIST, None, None)
        monkeypatch.delenv("PTPIPE_DATA")
        assert catalog.find_files(catalog.MNIST, None) is None
        assert fingerprint(catalog.MNIST, None, None) == here
        assert here == {file.name: file.md5 for file in catalog.MNIST.files}

    def test_unpacked_is_the_same_where_its_digest_is_known(self, tiny_mnist: Path) -> None:
        before = fingerprint(catalog.MNIST, None, None)
        for packed in list(tiny_mnist.glob("*.gz")):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()
        assert fingerprint(catalog.MNIST, None, None) == before

    def test_any_change_is_seen(self, tiny_mnist: Path) -> None:
        before = fingerprint(catalog.MNIST, None, None)
        path = tiny_mnist / "t10k-labels-idx1-ubyte.gz"
        content = bytearray(path.read_bytes())
        content[15] ^= 1
        path.write_bytes(content)
        after = fingerprint(catalog.MNIST, None, None)
        assert [name for name in before if before[name] != after[name]] == ["t10k-labels-idx1-ubyte.gz"]

    def test_fallback(self, tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = front.MnistConfig(fallback="digits")
        assert front.load_mnist.fingerprint(config) == front.load_mnist.fingerprint(front.MnistConfig())
        monkeypatch.delenv("PTPIPE_DATA")
        assert list(front.load_mnist.fingerprint(config)) == ["digits"]

    def test_own_path_without_files_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(StageError, match="MNIST not found: searched"):
            front.load_mnist.fingerprint(front.MnistConfig(path=str(tmp_path), fallback="digits"))
        (line,) = front.load_mnist.preflight(front.MnistConfig(path=str(tmp_path)))
        assert line.startswith("MNIST not found")


class TestAltered:
    def alter(self, path: Path, change: Callable[[bytes], bytes]) -> str:
        path.write_bytes(change(path.read_bytes()))
        return str(path)

    def refused(self, ctx: Context, config: front.MnistConfig = front.MnistConfig()) -> str:  # noqa: B008
        with pytest.raises(StageError) as caught:
            front.load_mnist(config, ctx)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_truncated(self, tiny_mnist: Path, ctx: Context) -> None:
        name = self.alter(tiny_mnist / "train-images-idx3-ubyte.gz", lambda content: content[:-100])
        assert self.refused(ctx) == f"{name} is truncated: the compressed data has no end"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_unreadable(self, tiny_mnist: Path, ctx: Context) -> None:
        path = tiny_mnist / "train-images-idx3-ubyte.gz"
        path.chmod(0)
        assert self.refused(ctx) == f"{path} can't be read: Permission denied"

    def test_a_folder_in_its_place(self, tiny_mnist: Path, ctx: Context) -> None:
        path = tiny_mnist / "train-images-idx3-ubyte.gz"
        path.unlink()
        path.mkdir()
        assert self.refused(ctx) == f"{path} can't be read: Is a directory"

    def test_empty(self, tiny_mnist: Path, ctx: Context) -> None:
        name = self.alter(tiny_mnist / "train-images-idx3-ubyte.gz", lambda content: b"")
        assert self.refused(ctx).startswith(f"{name} is truncated")

    def test_altered_bytes_inside_a_good_gzip(self, tiny_mnist: Path, ctx: Context) -> None:
        def change(content: bytes) -> bytes:
            unpacked = bytearray(gzip.decompress(content))
            unpacked[100] ^= 1
            return gzip.compress(bytes(unpacked))

        name = self.alter(tiny_mnist / "train-images-idx3-ubyte.gz", change)
        assert self.refused(ctx).startswith(f"{name} was altered: it is not the published MNIST")
        assert front.load_mnist(OWN, ctx).info.name == "own files in the format of mnist"

    def test_recompressed_is_the_published_content(self, tiny_mnist: Path, ctx: Context) -> None:
        self.alter(
            tiny_mnist / "train-images-idx3-ubyte.gz", lambda content: gzip.compress(gzip.decompress(content), 1)
        )
        assert front.load_mnist(front.MnistConfig(calibration_size=1), ctx).info.name == "mnist"

    def test_labels_that_do_not_fit(self, tiny_mnist: Path, ctx: Context, write_idx_set: Callable) -> None:
        write_idx_set(tiny_mnist.parent / "other", num_train=59)
        (tiny_mnist.parent / "other" / "train-labels-idx1-ubyte.gz").replace(tiny_mnist / "train-labels-idx1-ubyte.gz")
        assert "train-labels-idx1-ubyte.gz holds labels of shape (59,) for the 60 images in" in self.refused(ctx, OWN)

    def test_labels_in_the_place_of_images(self, tiny_mnist: Path, ctx: Context) -> None:
        labels = (tiny_mnist / "t10k-labels-idx1-ubyte.gz").read_bytes()
        self.alter(tiny_mnist / "t10k-images-idx3-ubyte.gz", lambda content: labels)
        assert "t10k-images-idx3-ubyte.gz holds an array of shape (20,), not images (N x H x W)" in self.refused(
            ctx, OWN
        )

    def test_other_image_size(self, tiny_mnist: Path, ctx: Context, write_idx_set: Callable) -> None:
        write_idx_set(tiny_mnist.parent / "other", side=7)
        (tiny_mnist.parent / "other" / "t10k-images-idx3-ubyte.gz").replace(tiny_mnist / "t10k-images-idx3-ubyte.gz")
        assert "has images of (6, 6)" in self.refused(ctx, OWN)


def test_own_files(ctx: Context, tmp_path: Path, write_idx_set: Callable) -> None:
    contents = write_idx_set(tmp_path / "mine", num_train=33, num_test=9, side=5, num_classes=4)
    config = front.MnistConfig(path=str(tmp_path / "mine"), verify=False, val_size=3, calibration_size=4)
    data = front.load_mnist(config, ctx)
    values = np.frombuffer(contents["train-images-idx3-ubyte"], np.uint8, offset=16) / 255
    assert data.info.task.class_names == ("0", "1", "2", "3") and data.info.inputs["images"].shape_CHW == (1, 5, 5)
    assert data.info.inputs["images"].mean == pytest.approx((values.mean(),), abs=5e-5)
    assert data.info.inputs["images"].std == pytest.approx((values.std(),), abs=5e-5)
    with pytest.raises(StageError, match="was altered"):
        front.load_mnist(config.model_copy(update={"verify": True}), ctx)


class TestWithoutKnownDigests:
    """Fashion-MNIST: only digests of the packed files are published."""

    @pytest.fixture
    def fashion(self, write_idx_set: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("PTPIPE_DATA", str(tmp_path))
        contents = write_idx_set(tmp_path / "fashion_mnist", packed=False)
        monkeypatch.setattr(catalog, "FASHION_MNIST", as_published(contents, catalog.FASHION_MNIST))
        return tmp_path / "fashion_mnist"

    def test_unpacked_is_accepted_with_a_notice(self, fashion: Path, ctx: Context, events) -> None:
        data = front.load_fashion_mnist(front.CatalogConfig(), ctx)
        assert data.info.task.class_names[9] == "Ankle boot"
        (notice,) = events.notices
        assert str(fashion / "train-images-idx3-ubyte") in notice and "no digest" in notice

    def test_wrong_counts_are_refused(self, fashion: Path, ctx: Context) -> None:
        path = fashion / "t10k-labels-idx1-ubyte"
        content = bytearray(path.read_bytes())
        content[8] = 5
        path.write_bytes(content)
        with pytest.raises(
            StageError, match=r"altered: Fashion-MNIST has 2 images of each class, not \[1, 2, 2, 2, 2, 3,"
        ):
            front.load_fashion_mnist(front.CatalogConfig(), ctx)

    def test_packed_with_another_digest_is_refused(self, fashion: Path, ctx: Context) -> None:
        path = fashion / "t10k-labels-idx1-ubyte"
        (fashion / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=1))
        with pytest.raises(StageError, match=r"t10k-labels-idx1-ubyte\.gz was altered"):
            front.load_fashion_mnist(front.CatalogConfig(), ctx)


def test_fallback_raises_a_notice(ctx: Context, events) -> None:
    data = front.load_mnist(front.MnistConfig(fallback="digits"), ctx)
    assert data.info.name == "digits (in place of mnist)" == data.summary()["name"]
    (notice,) = events.notices
    assert "bundled digits instead" in notice and "--fresh data" in notice and "$PTPIPE_DATA/mnist" in notice
