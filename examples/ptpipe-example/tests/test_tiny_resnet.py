import numpy as np
import torch
from ptpipe_example.tiny_resnet import make_tiny_resnet
from torch import fx

from ptpipe.testing import Bench
from ptpipe_torch import ArrayColumn, Classification, Data, DatasetInfo, ImageInfo, Split

pytest_plugins = ["ptpipe.testing"]


def noise(channels: int = 3, size: int = 12) -> Data:
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (6, size, size, channels), dtype=np.uint8)
    image = ImageInfo(shape_CHW=(channels, size, size), mean=(0.5,) * channels, std=(0.3,) * channels)
    info = DatasetInfo("noise", {"images": image}, Classification(class_names=("cat", "dog")))
    ids = np.array([f"train/{number}" for number in range(6)])
    labels = ArrayColumn(np.array([0, 1] * 3))
    return Data(info, {"train": Split(ids, {"images": ArrayColumn(pixels_NHWC)}, {"labels": labels})})


def test_gives_a_logit_for_every_class(bench: Bench) -> None:
    data = noise()
    model = bench.run(make_tiny_resnet, {"width": 4}, data=data)
    (batch,) = data.batches("train")
    assert model.build()(batch.inputs["images"]).shape == (6, 2)
    assert bench.metrics["num_parameters"] == sum(p.numel() for p in model.build().parameters())


def test_the_seed_decides_the_weights(bench: Bench) -> None:
    one = bench.run(make_tiny_resnet, {"width": 4}, data=noise()).tensors
    same = bench.run(make_tiny_resnet, {"width": 4}, data=noise()).tensors
    bench.seed = 8
    other = bench.run(make_tiny_resnet, {"width": 4}, data=noise()).tensors
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["0.weight"], other["0.weight"])


def test_any_depth_takes_any_small_image(bench: Bench) -> None:
    for num_blocks, channels, size in ((1, 1, 8), (2, 3, 9), (5, 2, 28)):
        model = bench.run(make_tiny_resnet, {"width": 2, "num_blocks": num_blocks}, data=noise(channels, size))
        assert model.build()(torch.zeros(2, channels, size, size)).shape == (2, 2)


def test_fx_can_trace_it_so_it_can_be_quantized(bench: Bench) -> None:
    network = bench.run(make_tiny_resnet, {"width": 4}, data=noise()).build()
    images_NCHW = torch.rand(2, 3, 12, 12)
    assert torch.equal(fx.symbolic_trace(network)(images_NCHW), network(images_NCHW))
