from __future__ import annotations

import numpy as np
import pytest
import torch

import ptpipe_data as front
from ptpipe import Context
from ptpipe_data.channel_stats import channel_stats
from ptpipe_torch import ArrayColumn, Data, epoch_order


def test_shape_and_balance(ctx: Context) -> None:
    config = front.SyntheticConfig(num_classes=7, num_train=140, num_test=35, image_size=12, channels=3, val_size=0)
    data = front.make_synthetic(config, ctx)
    assert data.info.inputs["images"].shape_CHW == (3, 12, 12) and data.info.task.num_classes == 7
    assert np.bincount(data.splits["train"].targets["labels"].values()).tolist() == [20] * 7
    assert np.bincount(data.splits["test"].targets["labels"].values()).tolist() == [5] * 7


def test_seed_alone_decides(ctx: Context, tmp_path) -> None:
    def pixels(data: Data) -> np.ndarray:
        return data.splits["test"].inputs["images"].take(np.arange(16))

    config = front.SyntheticConfig()
    np.random.seed(1)
    one = pixels(front.make_synthetic(config, ctx))
    np.random.seed(2)
    np.testing.assert_array_equal(one, pixels(front.make_synthetic(config, ctx)))
    other = Context("data", "data.synthetic", seed=8, scratch=tmp_path)
    assert (one != pixels(front.make_synthetic(config, other))).any()


def test_small_network_learns_it_in_an_epoch(ctx: Context) -> None:
    data = front.make_synthetic(front.SyntheticConfig(batch_size=64), ctx)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(4),
            torch.nn.Flatten(), torch.nn.Linear(256, 10),
        )  # fmt: skip
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        for batch in data.batches("train", order_N=epoch_order(len(data.splits["train"]), 7, 0)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(batch.inputs["images"]), batch.targets["labels"]).backward()
            optimizer.step()
    network.eval()
    (batch,) = data.batches("test", batch_size=512)
    assert (network(batch.inputs["images"]).argmax(1) == batch.targets["labels"]).float().mean() > 0.9


@pytest.mark.parametrize("shape_NHWC", [(5, 3, 4, 1), (2000, 30, 30, 3)])
def test_statistics(shape_NHWC: tuple[int, ...]) -> None:
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, shape_NHWC, dtype=np.uint8)
    mean, std = channel_stats(ArrayColumn(pixels_NHWC))
    np.testing.assert_allclose(mean, (pixels_NHWC / 255).mean(axis=(0, 1, 2)), atol=6e-5)
    np.testing.assert_allclose(std, (pixels_NHWC / 255).std(axis=(0, 1, 2)), atol=6e-5)


def test_statistics_of_a_constant() -> None:
    assert channel_stats(ArrayColumn(np.full((3, 2, 2, 1), 51, dtype=np.uint8))) == ((0.2,), (1.0,))
