from __future__ import annotations

import numpy as np
import pytest

from ptpipe_eval.latency import inputs
from ptpipe_eval.latency.inputs import spread_inputs
from ptpipe_eval.predict import select_split


@pytest.mark.parametrize("batch_size", [1, 32, 150, 1000])
def test_inputs_are_whole_batches_of_real_samples_from_all_over_the_split(digits, batch_size) -> None:
    batches = [batch["images"] for batch in spread_inputs(select_split(digits, "test"), batch_size)]
    (all_NCHW,) = (batch.inputs["images"].numpy() for batch in digits.batches("test", batch_size=1000))
    assert {images.shape for images in batches} == {(batch_size, 1, 8, 8)}
    assert len(batches) == {1: 8, 32: 8, 150: 2, 1000: 1}[batch_size]
    assert all(images.flags.c_contiguous and images.dtype == np.float32 for images in batches)
    position = {image.tobytes(): i for i, image in enumerate(all_NCHW)}
    taken = [position[image.tobytes()] for images in batches for image in images]
    assert taken == sorted(taken)
    assert taken[0] == 0 and taken[-1] >= 400 - 400 // len(batches) - 1


def test_large_images_give_few_inputs(digits, monkeypatch) -> None:
    monkeypatch.setattr(inputs, "_MAX_INPUT_BYTES", 3 * 32 * 64 * 4)
    assert len(spread_inputs(select_split(digits, "test"), 32)) == 3
    assert len(spread_inputs(select_split(digits, "test"), 128)) == 1
