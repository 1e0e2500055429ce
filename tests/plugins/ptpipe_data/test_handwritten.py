from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

import ptpipe_data as front
from ptpipe import Context
from ptpipe_torch import Data


def everything(data: Data, split: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    part = data.splits[split]
    return part.ids.tolist(), part.labels_N, part.images.take(np.arange(len(part)))


def test_digits_are_scikit_learns(ctx: Context) -> None:
    data = front.digits(front.DigitsConfig(), ctx)
    original = load_digits()
    assert data.info.name == "digits" and data.info.shape_CHW == (1, 8, 8)
    numbers = set()
    for split in ("train", "val", "test"):
        ids, labels_N, pixels_NHWC = everything(data, split)
        positions = [int(id_.removeprefix("digits/")) for id_ in ids]
        numbers |= set(positions)
        np.testing.assert_array_equal(labels_N, original.target[positions])
        np.testing.assert_allclose(pixels_NHWC[..., 0] * (16 / 255), original.images[positions], atol=0.035)
    assert numbers == set(range(1797))


def test_test_images_are_the_same_whatever_the_seed(ctx: Context, tmp_path) -> None:
    other = Context("data", "data.digits", seed=8, scratch=tmp_path)
    one, two = front.digits(front.DigitsConfig(), ctx), front.digits(front.DigitsConfig(), other)
    assert everything(one, "test")[0] == everything(two, "test")[0]
    assert everything(one, "val")[0] != everything(two, "val")[0]
    counts = np.bincount(one.splits["test"].labels_N, minlength=10)
    assert counts.min() > 30


def test_stand_in_looks_like_mnist(ctx: Context) -> None:
    data = front.mnist(front.MnistConfig(offline="digits"), ctx)
    assert data.info.shape_CHW == (1, 28, 28) and len(data.info.class_names) == 10
    _, labels_N, pixels_NHWC = everything(data, "test")
    assert not pixels_NHWC[:, :4].any() and not pixels_NHWC[:, -4:].any()
    original = load_digits()
    np.testing.assert_array_equal(labels_N, original.target[3::4])
    # Shrunk again by averaging, an image is close to what it was made of.
    box_NHW = pixels_NHWC[:, 4:24, 4:24, 0].repeat(2, axis=1).repeat(2, axis=2)
    shrunk_NHW = box_NHW.reshape(-1, 8, 5, 8, 5).mean(axis=(2, 4)) * (16 / 255)
    correlation = np.corrcoef(shrunk_NHW.ravel(), original.images[3::4].ravel())[0, 1]
    assert correlation > 0.97


def test_stand_in_has_shifted_copies_for_training_alone(ctx: Context) -> None:
    data = front.mnist(front.MnistConfig(offline="digits"), ctx)
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
    assert data.info.mean[0] == np.round((pixels_NHWC / 255).mean(), 4)
