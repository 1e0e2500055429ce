"""Shape legend: N images, C channels, H height, W width, K classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, Data, DatasetInfo, FunctionRef, ImageInfo, Model, Regression, Split
from ptpipe_torch.torchvision_compat import torchvision as torchvision_library
from ptpipe_train import train
from ptpipe_train.config import TrainConfig
from ptpipe_zoo import (
    MlpConfig,
    SmallCnnConfig,
    SmallUNetConfig,
    TimmConfig,
    TorchvisionConfig,
    extras,
    mlp,
    nets,
    small_cnn,
    small_unet,
    timm,
    torchvision,
)


def state_of(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.tensors)


def assert_bit_equal(one: Model, other: Model) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_small_cnn_is_the_network_it_says(make_data, ctx):
    model = small_cnn(SmallCnnConfig(), ctx, make_data((1, 28, 28), num_classes=10))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors.items() if tensor.ndim > 1}
    assert shapes == {
        "0.weight": (32, 1, 3, 3),
        "4.weight": (64, 32, 3, 3),
        "9.weight": (128, 3136),
        "11.weight": (10, 128),
    }
    assert (
        sum(parameter.numel() for parameter in model.build().parameters()) == 421_738
    )  # 32*9 + 2*32 + 64*32*9 + 2*64 + 3137*128 + 129*10


def test_small_cnn_computes_what_it_says(make_data, ctx):
    model = small_cnn(SmallCnnConfig(width=4), ctx, make_data((3, 10, 14), num_classes=3))
    t = state_of(model)
    images_NCHW = torch.randn(2, 3, 10, 14, generator=torch.Generator().manual_seed(0))
    x = images_NCHW
    for conv, norm in (("0", "1"), ("4", "5")):
        x = F.conv2d(x, t[f"{conv}.weight"], padding=1)  # fresh batch norm: mean 0, variance 1, scale 1, shift 0
        x = F.max_pool2d(F.relu(x / (t[f"{norm}.running_var"] + 1e-5).sqrt()[:, None, None]), 2)
    x = F.relu(F.linear(x.flatten(1), t["9.weight"], t["9.bias"]))
    expected_NK = F.linear(x, t["11.weight"], t["11.bias"])
    torch.testing.assert_close(model.build()(images_NCHW), expected_NK)


@pytest.mark.parametrize("size", [4, 8, 28, 29, 64])
def test_small_cnn_takes_small_images_of_any_size(make_data, ctx, size):
    model = small_cnn(SmallCnnConfig(width=2), ctx, make_data((2, size, size + 3)))
    assert model.build()(torch.zeros(3, 2, size, size + 3)).shape == (3, 5)


def test_small_cnn_refuses_images_that_pooling_would_reduce_to_nothing(make_data, ctx):
    with pytest.raises(StageError, match="at least 4x4 pixels, not 8x3"):
        small_cnn(SmallCnnConfig(), ctx, make_data((1, 8, 3)))


@pytest.mark.parametrize("name", ["small_unet", "torchvision"])
def test_networks_of_maps_return_the_units_of_their_targets(name, ctx):
    images = ImageInfo(shape_CHW=(3, 32, 48), mean=(0.5,) * 3, std=(0.2,) * 3)
    task = Regression(target_names=("a", "b"), mean=(5.0, -40.0), std=(0.1, 3.0), positions=(32, 48))
    nothing = Split(
        np.array([], str),
        {"images": ArrayColumn(np.zeros((0, 32, 48, 3), np.uint8))},
        {"targets": ArrayColumn(np.zeros((0, 2, 32, 48), np.float32))},
    )
    stage, config = {
        "small_unet": (small_unet, SmallUNetConfig(width=4)),
        "torchvision": (torchvision, TorchvisionConfig(name="lraspp_mobilenet_v3_large")),
    }[name]
    model = stage(config, ctx, Data(DatasetInfo("maps", {"images": images}, task), {"train": nothing}))
    network, images_NCHW = model.build().eval(), torch.randn(2, 3, 32, 48)
    expected = (
        network[0](images_NCHW) * torch.tensor([0.1, 3.0])[:, None, None] + torch.tensor([5.0, -40.0])[:, None, None]
    )
    torch.testing.assert_close(network(images_NCHW), expected)


def data_of_prices(shape_CHW, targets_NT):
    """Pictures of noise, whose brightness is what they cost."""
    images = ImageInfo(shape_CHW=shape_CHW, mean=(0.5,) * shape_CHW[0], std=(0.2,) * shape_CHW[0])
    mean, std = targets_NT.mean(axis=0), targets_NT.std(axis=0)
    names = tuple(f"price {number}" for number in range(targets_NT.shape[1]))
    task = Regression(target_names=names, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    random = np.random.default_rng(1)
    levels_N = (targets_NT[:, 0] - mean[0]) / std[0]
    channels, height, width = shape_CHW
    pixels_NHWC = (
        120 + 30 * levels_N[:, None, None, None] + random.normal(0, 20, (len(targets_NT), height, width, channels))
    )
    ids = np.array([f"{number:04}" for number in range(len(targets_NT))])
    pixels_NHWC = pixels_NHWC.clip(0, 255).astype(np.uint8)
    splits = {
        name: Split(
            ids[part],
            {"images": ArrayColumn(pixels_NHWC[part])},
            {"targets": ArrayColumn(targets_NT[part].astype(np.float32))},
        )
        for name, part in {"train": slice(0, None, 2), "val": slice(1, None, 2)}.items()
    }
    return Data(DatasetInfo("prices", {"images": images}, task), splits)


PRICES_NT = np.random.default_rng(0).normal([380_000, -2], [150_000, 0.1], (64, 2))


@pytest.mark.parametrize("name", ["small_cnn", "torchvision", "timm", "mlp"])
def test_numbers_of_pictures_have_the_units_of_their_targets(name, ctx):
    if name == "timm" and extras.missing_extra("timm") is not None:
        pytest.skip("needs ptpipe[timm]")
    stages = {
        "small_cnn": (small_cnn, SmallCnnConfig(width=4)),
        "torchvision": (torchvision, TorchvisionConfig(name="mobilenet_v3_small")),
        "timm": (timm, TimmConfig(name="mobilenetv3_small_050")),
        "mlp": (mlp, MlpConfig()),
    }
    stage, config = stages[name]
    model = stage(config, ctx, data_of_prices((3, 32, 32), PRICES_NT))
    network, images_NCHW = model.build().eval(), torch.randn(2, 3, 32, 32)
    rescale = list(network.children())[-1]
    assert isinstance(rescale, nets.Rescale)
    inner = torch.nn.Sequential(*list(network.children())[:-1])
    scale, shift = (torch.tensor(of(PRICES_NT, axis=0), dtype=torch.float32) for of in (np.std, np.mean))
    torch.testing.assert_close(network(images_NCHW), inner(images_NCHW) * scale + shift)


def test_published_weights_are_those_of_the_network_before_its_units(ctx, tmp_path):
    published = torchvision_library().models.resnet18(num_classes=7)
    torch.save(published.state_dict(), tmp_path / "resnet18.pt")
    config = TorchvisionConfig(name="resnet18", weights_file=str(tmp_path / "resnet18.pt"))
    network = torchvision(config, ctx, data_of_prices((3, 32, 32), PRICES_NT)).build()
    assert network.get_submodule("network.layer4.1.conv2").weight.equal(published.layer4[1].conv2.weight)
    assert network.get_submodule("network.fc").weight.shape == (2, 512)


@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_weights_that_have_a_layer_for_the_targets_return_their_units_as_they_are(name, ctx, tmp_path):
    """A network that was trained elsewhere on the same targets, to be quantized as it is."""
    if name == "timm":
        if extras.missing_extra("timm") is not None:
            pytest.skip("needs ptpipe[timm]")
        import timm as timm_library

        own = timm_library.create_model("mobilenetv3_small_050", num_classes=2)
        stage, config = timm, TimmConfig(name="mobilenetv3_small_050", weights_file=str(tmp_path / "own.pt"))
    else:
        own = torchvision_library().models.squeezenet1_1(num_classes=2)
        stage, config = torchvision, TorchvisionConfig(name="squeezenet1_1", weights_file=str(tmp_path / "own.pt"))
    torch.save(own.state_dict(), tmp_path / "own.pt")
    network, images_NCHW = (
        stage(config, ctx, data_of_prices((3, 32, 32), PRICES_NT)).build().eval(),
        torch.randn(2, 3, 32, 32),
    )
    torch.testing.assert_close(network(images_NCHW), own.eval()(images_NCHW))


@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_weights_that_ptpipe_saved_keep_their_units(name, ctx, tmp_path):
    """Also for other samples of the same targets, which have another mean."""
    if name == "timm" and extras.missing_extra("timm") is not None:
        pytest.skip("needs ptpipe[timm]")
    stage, config = {
        "torchvision": (torchvision, TorchvisionConfig(name="resnet18")),
        "timm": (timm, TimmConfig(name="mobilenetv3_small_050")),
    }[name]
    saved = stage(config, ctx, data_of_prices((3, 32, 32), PRICES_NT)).build().eval()
    torch.save(saved.state_dict(), tmp_path / "saved.pt")
    config = config.model_copy(update={"weights_file": str(tmp_path / "saved.pt")})
    again = stage(config, ctx, data_of_prices((3, 32, 32), 2 * PRICES_NT)).build().eval()
    images_NCHW = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(again(images_NCHW), saved(images_NCHW))


def test_squeezenet_predicts_below_the_mean_of_its_targets(ctx):
    """Its last layer is a ReLU."""
    network = torchvision(TorchvisionConfig(name="squeezenet1_1"), ctx, data_of_prices((3, 32, 32), PRICES_NT)).build()
    outputs_NT = network.eval()(torch.randn(8, 3, 32, 32)).detach().numpy()
    levels_NT = (outputs_NT - PRICES_NT.mean(0)) / PRICES_NT.std(0)
    assert levels_NT.min() < -1e-3


def test_a_network_of_pictures_learns_prices(ctx):
    data = data_of_prices((1, 8, 8), np.random.default_rng(2).normal(380_000, 150_000, (512, 1)))
    trained = train(TrainConfig(epochs=30, lr=0.02), ctx, small_cnn(SmallCnnConfig(width=4), ctx, data), data)
    images_NCHW, targets_NT = next(data.batches("val", batch_size=256)).args[0], data.splits["val"].targets["targets"]
    with torch.no_grad():
        predicted_NT = trained.build().eval()(images_NCHW).numpy()
    errors_NT = predicted_NT - targets_NT.values()
    assert np.sqrt((errors_NT**2).mean()) < 0.4 * 150_000


def test_mlp_is_the_network_it_says(make_data, ctx):
    model = mlp(MlpConfig(hidden=(7, 6), dropout=0.25), ctx, make_data((2, 3, 4)))
    layers = list(model.build())
    assert [type(layer) for layer in layers] == [
        nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear,
    ]  # fmt: skip
    assert [(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)] == [
        (24, 7),
        (7, 6),
        (6, 5),
    ]
    assert {layer.p for layer in layers if isinstance(layer, nn.Dropout)} == {0.25}


def test_mlp_computes_what_it_says(make_data, ctx):
    model = mlp(MlpConfig(hidden=(7,)), ctx, make_data((2, 3, 4)))
    t = state_of(model)
    images_NCHW = torch.randn(4, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    hidden = (images_NCHW.reshape(4, 24) @ t["1.weight"].T + t["1.bias"]).clamp(min=0)
    torch.testing.assert_close(model.build()(images_NCHW), hidden @ t["3.weight"].T + t["3.bias"])


def test_mlp_without_hidden_layers_is_linear(make_data, ctx):
    model = mlp(MlpConfig(hidden=()), ctx, make_data((1, 4, 4)))
    assert [type(layer) for layer in model.build()] == [nn.Flatten, nn.Linear]


@pytest.fixture(params=["mlp", "small_cnn"])
def make_model(request, make_data):
    stage, config = {"mlp": (mlp, MlpConfig()), "small_cnn": (small_cnn, SmallCnnConfig())}[request.param]
    return lambda ctx: stage(config, ctx, make_data())


def test_the_seed_alone_decides_the_weights(make_model, ctx):
    torch.manual_seed(1)
    one = make_model(ctx)
    torch.manual_seed(2)
    assert_bit_equal(one, make_model(ctx))
    other = make_model(ctx.__class__("net", "model.test", 8, ctx.scratch))
    assert not torch.equal(next(iter(one.tensors.values())), next(iter(other.tensors.values())))


def test_making_and_building_leave_torchs_random_stream_alone(make_model, ctx):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    make_model(ctx).build()
    assert torch.equal(torch.rand(4), expected)


def test_a_model_survives_the_store_and_is_built_bit_equal(make_model, ctx, tmp_path):
    model = make_model(ctx)
    folder = tmp_path / "model"
    folder.mkdir()
    model.save(folder)
    loaded = Model.load(folder)
    assert loaded.recipe == model.recipe
    assert_bit_equal(loaded, model)
    images_NCHW = torch.rand(2, *model.signature.inputs[0].sample_shape)
    assert torch.equal(loaded.build()(images_NCHW), model.build()(images_NCHW))


def test_every_operation_but_flattening_is_a_module_that_fx_can_fuse(make_model, ctx):
    graph = fx.symbolic_trace(make_model(ctx).build()).graph
    assert {node.op for node in graph.nodes} == {"placeholder", "call_module", "output"}


def test_records_how_many_parameters_it_has(make_data, ctx, events):
    mlp(MlpConfig(hidden=(4,)), ctx, make_data((1, 2, 2)))
    assert [(metric.name, metric.value) for metric in events] == [("num_parameters", (4 + 1) * 4 + (4 + 1) * 5)]


def test_build_seeded_accepts_any_builder():
    builder_ref = FunctionRef.to(nets.mlp, shape_CHW=(1, 2, 2), num_classes=2, hidden=[3], dropout=0)
    one, other = nets.build_seeded(builder_ref, -1), nets.build_seeded(builder_ref, -1)
    assert torch.equal(one[1].weight, other[1].weight)
