from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ptpipe_data as front
from ptpipe import Context
from ptpipe_data import catalog
from ptpipe_data.catalog import DIGITS_FILE
from ptpipe_torch import Data


def bundled() -> tuple[np.ndarray, np.ndarray]:
    with np.load(DIGITS_FILE, allow_pickle=False) as file:
        return file["images_NHW"], file["labels_N"]


def test_bundled_file_equals_scikit_learns() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    images_NHW, labels_N = bundled()
    original = load_digits()
    assert images_NHW.dtype == labels_N.dtype == np.uint8
    np.testing.assert_array_equal(images_NHW, original.images)
    np.testing.assert_array_equal(labels_N, original.target)


def test_bundled_file_is_small_and_has_its_origin_and_license_beside_it() -> None:
    assert DIGITS_FILE.stat().st_size < 100_000
    text = DIGITS_FILE.with_suffix(".txt").read_text(encoding="utf-8")
    assert "Alpaydin" in text and "CC BY 4.0" in text


def test_content_of_the_bundled_file_enters_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprints() -> list[object]:
        mnist = front.MnistConfig(fallback="digits")
        return [front.load_digits.fingerprint(front.DigitsConfig()), front.load_mnist.fingerprint(mnist)]

    before = fingerprints()
    (tmp_path / "digits.npz").write_bytes(b"another version")
    monkeypatch.setattr(catalog, "DIGITS_FILE", tmp_path / "digits.npz")
    assert all(one != other for one, other in zip(before, fingerprints(), strict=True))


def everything(data: Data, split: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    samples = data.splits[split]
    return (
        samples.ids.tolist(),
        samples.targets["labels"].values(),
        samples.inputs["images"].take(np.arange(len(samples))),
    )


def test_splits_partition_the_bundled_digits(ctx: Context) -> None:
    data = front.load_digits(front.DigitsConfig(), ctx)
    images_NHW, original_labels_N = bundled()
    assert data.info.name == "digits" and data.info.inputs["images"].shape_CHW == (1, 8, 8)
    numbers = set()
    for split in ("train", "val", "test"):
        ids, labels_N, pixels_NHWC = everything(data, split)
        positions = [int(id_.removeprefix("digits/")) for id_ in ids]
        numbers |= set(positions)
        np.testing.assert_array_equal(labels_N, original_labels_N[positions])
        np.testing.assert_allclose(pixels_NHWC[..., 0] * (16 / 255), images_NHW[positions], atol=0.035)
    assert numbers == set(range(1797))


def test_test_images_are_the_same_whatever_the_seed(ctx: Context, tmp_path) -> None:
    other = Context("data", "data.digits", seed=8, scratch=tmp_path)
    one, two = front.load_digits(front.DigitsConfig(), ctx), front.load_digits(front.DigitsConfig(), other)
    assert everything(one, "test")[0] == everything(two, "test")[0]
    assert everything(one, "val")[0] != everything(two, "val")[0]
    counts = np.bincount(one.splits["test"].targets["labels"].values(), minlength=10)
    assert counts.min() > 30


def test_fallback_looks_like_mnist(ctx: Context) -> None:
    data = front.load_mnist(front.MnistConfig(fallback="digits"), ctx)
    assert data.info.inputs["images"].shape_CHW == (1, 28, 28) and len(data.info.task.class_names) == 10
    _, labels_N, pixels_NHWC = everything(data, "test")
    assert not pixels_NHWC[:, :4].any() and not pixels_NHWC[:, -4:].any()
    images_NHW, original_labels_N = bundled()
    np.testing.assert_array_equal(labels_N, original_labels_N[3::4])
    # Shrunk again by averaging, an image is close to what it was made of.
    box_NHW = pixels_NHWC[:, 4:24, 4:24, 0].repeat(2, axis=1).repeat(2, axis=2)
    shrunk_NHW = box_NHW.reshape(-1, 8, 5, 8, 5).mean(axis=(2, 4)) * (16 / 255)
    correlation = np.corrcoef(shrunk_NHW.ravel(), images_NHW[3::4].ravel())[0, 1]
    assert correlation > 0.97


def test_fallback_has_shifted_copies_for_training_alone(ctx: Context) -> None:
    data = front.load_mnist(front.MnistConfig(fallback="digits"), ctx)
    ids, labels_N, pixels_NHWC = everything(data, "train")
    num = len(ids) // 9
    originals = [id_[: len("digits/00000")] for id_ in ids]
    assert len(set(originals)) == num and len(set(ids)) == len(ids)
    assert not set(originals) & set(everything(data, "val")[0]) and not set(originals) & set(
        everything(data, "test")[0]
    )
    shifted = ids.index(f"{ids[5]}-2+2")
    np.testing.assert_array_equal(pixels_NHWC[shifted][:-2, 2:], pixels_NHWC[5][2:, :-2])
    assert labels_N[shifted] == labels_N[5]
    assert data.info.inputs["images"].mean[0] == np.round((pixels_NHWC / 255).mean(), 4)
