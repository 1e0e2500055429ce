"""Published data sets: what is found where, what is refused, what the key sees."""

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
from ptpipe_data import published
from ptpipe_data.published import Published, fingerprint
from ptpipe_torch import Data, epoch_order

OWN = front.MnistConfig(verify=False, calibration_size=10)


def as_published(contents: dict[str, bytes], like: Published) -> Published:
    """A published data set made of these files, as its authors would have described it."""
    parts = []
    for part in like.parts:
        packed = gzip.compress(contents[part.unpacked], mtime=0)
        unpacked_sha256 = part.unpacked_sha256 and hashlib.sha256(contents[part.unpacked]).hexdigest()
        parts.append(
            replace(part, size_bytes=len(packed), md5=hashlib.md5(packed).hexdigest(), unpacked_sha256=unpacked_sha256)
        )
    return replace(like, parts=tuple(parts), num_per_class=like.num_per_class and (6, 2))


@pytest.fixture
def tiny_mnist(write_idx_set: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny files in the place of MNIST's, described as the published ones, in $PTPIPE_DATA/mnist."""
    monkeypatch.setenv("PTPIPE_DATA", str(tmp_path / "data"))
    folder = tmp_path / "data" / "mnist"
    contents = write_idx_set(folder)
    monkeypatch.setattr(published, "MNIST", as_published(contents, published.MNIST))
    return folder


def pixels(data: Data, split: str) -> np.ndarray:
    part = data.splits[split]
    return part.images.take(np.arange(len(part)))


@pytest.mark.mnist
def test_real_mnist(real_data: Path, ctx: Context, told, tmp_path: Path) -> None:
    config = front.MnistConfig()
    assert list(front.mnist.preflight(config)) == []
    data = front.mnist(config, ctx)
    assert data.info.name == "mnist" and data.info.shape_CHW == (1, 28, 28) and not told.notices
    assert data.summary() == {
        "name": "mnist",
        "shape": [1, 28, 28],
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
        np.testing.assert_array_equal(data.splits[split].labels_N, np.frombuffer(labels, np.uint8, offset=8)[positions])
        expected = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28, 1)[positions]
        np.testing.assert_array_equal(pixels(data, split), expected)
    assert set(data.splits["calibration"].ids) <= set(data.splits["train"].ids)
    everything = np.frombuffer(raw, np.uint8, offset=16) / 255.0
    assert data.info.mean == pytest.approx((everything.mean(),), abs=5e-5)
    assert data.info.std == pytest.approx((everything.std(),), abs=5e-5)

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
    assert shortest_s(lambda: front.mnist.fingerprint(config)) < 0.06
    data = front.mnist(config, ctx)
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
    for ours, theirs in ((published.MNIST, datasets.MNIST), (published.FASHION_MNIST, datasets.FashionMNIST)):
        assert list(ours.mirrors) == theirs.mirrors
        assert [(part.file, part.md5) for part in ours.parts] == theirs.resources
    assert published.MNIST.class_names == tuple(name[0] for name in datasets.MNIST.classes)
    assert published.FASHION_MNIST.class_names == tuple(datasets.FashionMNIST.classes)
    python_version = published.CIFAR10.mirrors[0] + "cifar-10-python.tar.gz"
    assert python_version == datasets.CIFAR10.url


@pytest.mark.parametrize("place", ["mnist", "mnist/MNIST/raw", "MNIST/raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_places(
    place: str, packed: bool, ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_idx_set: Callable
) -> None:
    monkeypatch.setenv("PTPIPE_DATA", str(tmp_path / "data"))
    contents = write_idx_set(tmp_path / "data" / place, packed=packed)
    monkeypatch.setattr(published, "MNIST", as_published(contents, published.MNIST))
    data = front.mnist(front.MnistConfig(calibration_size=5, val_size=10), ctx)
    assert data.summary() | {"num_train": 50, "num_val": 10, "num_test": 20, "num_calibration": 5} == data.summary()
    expected = np.frombuffer(contents["t10k-images-idx3-ubyte"], np.uint8, offset=16).reshape(20, 6, 6, 1)
    np.testing.assert_array_equal(pixels(data, "test"), expected)


def test_first_place_with_all_files_counts(
    tiny_mnist: Path, write_idx_set: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny_mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    cached = tmp_path / "cache" / "ptpipe" / "mnist"
    write_idx_set(cached)
    found = published.find(published.MNIST, None)
    assert found is not None and {path.parent for path in found.values()} == {cached}


def test_missing_says_where_it_looked_and_what_was_there(tiny_mnist: Path, ctx: Context) -> None:
    (tiny_mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(StageError) as caught:
        front.mnist(front.MnistConfig(), ctx)
    text = str(caught.value)
    assert text.startswith("MNIST is not there: looked in ") and "\n" not in text
    assert str(tiny_mnist) in text and "cache" in text
    assert text.endswith(
        f"{tiny_mnist} has only t10k-images-idx3-ubyte.gz, train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz"
    )


def test_unset_variable_is_said(ctx: Context) -> None:
    with pytest.raises(StageError, match=r"\(\$PTPIPE_DATA is not set\)"):
        front.fashion_mnist(front.PublishedConfig(), ctx)


class TestKey:
    def test_published_local_and_not_yet_loaded_are_the_same(
        self, tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = fingerprint(published.MNIST, None, None)
        monkeypatch.delenv("PTPIPE_DATA")
        assert published.find(published.MNIST, None) is None
        assert fingerprint(published.MNIST, None, None) == here
        assert here == {part.file: part.md5 for part in published.MNIST.parts}

    def test_unpacked_is_the_same_where_its_digest_is_known(self, tiny_mnist: Path) -> None:
        before = fingerprint(published.MNIST, None, None)
        for packed in list(tiny_mnist.glob("*.gz")):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()
        assert fingerprint(published.MNIST, None, None) == before

    def test_any_change_is_seen(self, tiny_mnist: Path) -> None:
        before = fingerprint(published.MNIST, None, None)
        path = tiny_mnist / "t10k-labels-idx1-ubyte.gz"
        content = bytearray(path.read_bytes())
        content[15] ^= 1
        path.write_bytes(content)
        after = fingerprint(published.MNIST, None, None)
        assert [name for name in before if before[name] != after[name]] == ["t10k-labels-idx1-ubyte.gz"]

    def test_stand_in(self, tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = front.MnistConfig(offline="digits")
        assert front.mnist.fingerprint(config) == front.mnist.fingerprint(front.MnistConfig())
        monkeypatch.delenv("PTPIPE_DATA")
        assert list(front.mnist.fingerprint(config)) == ["digits"]

    def test_own_path_that_lacks_files_is_a_mistake(self, tmp_path: Path) -> None:
        with pytest.raises(StageError, match="MNIST is not there: looked in"):
            front.mnist.fingerprint(front.MnistConfig(path=str(tmp_path), offline="digits"))
        (line,) = front.mnist.preflight(front.MnistConfig(path=str(tmp_path)))
        assert line.startswith("MNIST is not there")


class TestAltered:
    def alter(self, path: Path, change: Callable[[bytes], bytes]) -> str:
        path.write_bytes(change(path.read_bytes()))
        return str(path)

    def refused(self, ctx: Context, config: front.MnistConfig = front.MnistConfig()) -> str:  # noqa: B008
        with pytest.raises(StageError) as caught:
            front.mnist(config, ctx)
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
        assert self.refused(ctx).startswith(f"{name} is altered: it is not the published MNIST")
        assert front.mnist(OWN, ctx).info.name == "own files in the format of mnist"

    def test_packed_anew_is_the_published_content(self, tiny_mnist: Path, ctx: Context) -> None:
        self.alter(
            tiny_mnist / "train-images-idx3-ubyte.gz", lambda content: gzip.compress(gzip.decompress(content), 1)
        )
        assert front.mnist(front.MnistConfig(calibration_size=1), ctx).info.name == "mnist"

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
    data = front.mnist(config, ctx)
    values = np.frombuffer(contents["train-images-idx3-ubyte"], np.uint8, offset=16) / 255
    assert data.info.class_names == ("0", "1", "2", "3") and data.info.shape_CHW == (1, 5, 5)
    assert data.info.mean == pytest.approx((values.mean(),), abs=5e-5)
    assert data.info.std == pytest.approx((values.std(),), abs=5e-5)
    with pytest.raises(StageError, match="is altered"):
        front.mnist(config.model_copy(update={"verify": True}), ctx)


class TestWithoutKnownDigests:
    """Fashion-MNIST: only digests of the packed files are published."""

    @pytest.fixture
    def fashion(self, write_idx_set: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("PTPIPE_DATA", str(tmp_path))
        contents = write_idx_set(tmp_path / "fashion_mnist", packed=False)
        monkeypatch.setattr(published, "FASHION_MNIST", as_published(contents, published.FASHION_MNIST))
        return tmp_path / "fashion_mnist"

    def test_unpacked_is_taken_and_said(self, fashion: Path, ctx: Context, told) -> None:
        data = front.fashion_mnist(front.PublishedConfig(), ctx)
        assert data.info.class_names[9] == "Ankle boot"
        (notice,) = told.notices
        assert str(fashion / "train-images-idx3-ubyte") in notice and "no digest" in notice

    def test_wrong_counts_are_refused(self, fashion: Path, ctx: Context) -> None:
        path = fashion / "t10k-labels-idx1-ubyte"
        content = bytearray(path.read_bytes())
        content[8] = 5
        path.write_bytes(content)
        with pytest.raises(
            StageError, match=r"altered: Fashion-MNIST has 2 images of each class, not \[1, 2, 2, 2, 2, 3,"
        ):
            front.fashion_mnist(front.PublishedConfig(), ctx)

    def test_packed_with_another_digest_is_refused(self, fashion: Path, ctx: Context) -> None:
        path = fashion / "t10k-labels-idx1-ubyte"
        (fashion / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(path.read_bytes()))
        with pytest.raises(StageError, match=r"t10k-labels-idx1-ubyte\.gz is altered"):
            front.fashion_mnist(front.PublishedConfig(), ctx)


def test_stand_in_is_said_loudly(ctx: Context, told) -> None:
    data = front.mnist(front.MnistConfig(offline="digits"), ctx)
    assert data.info.name == "digits (in place of mnist)" == data.summary()["name"]
    (notice,) = told.notices
    assert "digits in its place" in notice and "--fresh data" in notice and "$PTPIPE_DATA/mnist" in notice
