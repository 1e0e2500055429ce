from __future__ import annotations

from pathlib import Path

import numpy as np

from ptpipe_torch import ArrayImages, Data, DataFacts, LoaderOptions, Split


def make_data() -> Data:
    pixels = np.arange(12 * 4 * 4, dtype=np.uint8).reshape(12, 4, 4, 1)
    ids = np.array([f"train/{i:05d}" for i in range(12)])
    split = Split(ids, np.arange(12) % 3, ArrayImages(pixels))
    facts = DataFacts("tiny", ("a", "b", "c"), (1, 4, 4), (0.5,), (0.25,))
    return Data(facts, {"train": split}, LoaderOptions(batch_size=5))


def test_round_trip(tmp_path: Path) -> None:
    data = make_data()
    data.save(tmp_path)
    again = Data.load(tmp_path)
    assert again.facts == data.facts and again.loader == data.loader
    np.testing.assert_array_equal(again.splits["train"].ids, data.splits["train"].ids)
    for one, other in zip(data.batches("train"), again.batches("train"), strict=True):
        assert one.images_NCHW.equal(other.images_NCHW) and one.labels_N.equal(other.labels_N)
