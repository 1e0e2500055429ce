from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from ptpipe import IntegrityError, StageError
from ptpipe_torch import FunctionRef
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_zoo import TorchvisionConfig, nets, torchvision_models
from ptpipe_zoo import torchvision as torchvision_stage

# One or two of each family, and the smallest images (in steps of 32) that it takes.
FAMILIES = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "googlenet": 32,
    "inception_v3": 96,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_x_400mf": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "resnet50": 32,
    "resnext50_32x4d": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vit_b_32": 32,
}
CHEAP = (
    "googlenet",
    "mnasnet0_5",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
)
HUGE = ("regnet_x_", "regnet_y_", "maxvit")  # RegNet can't be built without memory for its weights


def small_model(name, make_data, ctx, channels=1, num_classes=5):
    size = FAMILIES[name]
    return torchvision_stage(TorchvisionConfig(name=name), ctx, make_data((channels, size, size), num_classes))


@pytest.mark.parametrize("name", CHEAP)
def test_a_network_is_made_for_the_data_and_comes_back_bit_equal(name, make_data, ctx):
    one, other = (small_model(name, make_data, ctx, channels=2) for _ in range(2))
    assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
    images_NCHW = torch.rand(2, *one.signature.inputs[0].sample_shape)
    logits_NK = one.build()(images_NCHW)
    assert logits_NK.shape == (2, 5)
    assert logits_NK.isfinite().all()
    assert torch.equal(logits_NK, other.build()(images_NCHW))


@pytest.mark.parametrize("name", CHEAP)
def test_fx_traces_it(name, make_data, ctx):
    network = small_model(name, make_data, ctx).build()
    images_NCHW = torch.rand(2, 1, FAMILIES[name], FAMILIES[name])
    assert torch.equal(fx.symbolic_trace(network)(images_NCHW), network(images_NCHW))


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - set(CHEAP)))
def test_the_other_families_too(name, make_data, ctx):
    model = small_model(name, make_data, ctx, channels=2)
    images_NCHW = torch.rand(2, *model.signature.inputs[0].sample_shape)
    network = model.build()
    assert torch.equal(fx.symbolic_trace(network)(images_NCHW), network(images_NCHW))


@pytest.mark.thorough
@pytest.mark.slow
def test_every_name_is_fitted_and_differs_from_the_published_network_in_first_and_last_layer_only():
    names = [name for name in torchvision_models.list_classifiers() if not name.startswith(HUGE)]
    assert len(names) >= 64
    for name in names:
        with torch.device("meta"):  # shapes alone: no memory, no time
            published = torchvision().models.get_model(name, num_classes=1000, **_quiet(name)).state_dict()
            ours = torchvision_models.classifier(name=name, shape_CHW=(2, 224, 224), num_classes=5)
        own = ours.state_dict()
        assert own.keys() == {key for key in published if not key.startswith(("aux", "AuxLogits"))}, name
        changed = {key for key in own if own[key].shape != published[key].shape}
        head = torchvision_models.head(ours, 5)
        assert changed <= {f"{torchvision_models.stem(ours)[0]}.weight", f"{head}.weight", f"{head}.bias"}, name
        assert len(changed) >= 2, name
        fx.symbolic_trace(ours)


def _quiet(name: str) -> dict[str, bool]:
    return {"init_weights": True} if name in ("googlenet", "inception_v3") else {}


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_outputs_return_plain_logits_in_training_too(name, make_data, ctx):
    network = small_model(name, make_data, ctx).build()
    images_NCHW = torch.rand(2, 1, FAMILIES[name], FAMILIES[name])
    for mode in (network.eval(), network.train()):
        logits_NK = mode(images_NCHW)
        assert isinstance(logits_NK, torch.Tensor)
        assert logits_NK.shape == (2, 5)


def test_a_transformer_is_built_for_the_size_of_the_images(make_data, ctx):
    model = torchvision_stage(TorchvisionConfig(name="vit_b_32"), ctx, make_data((3, 64, 64)))
    assert model.tensors["encoder.pos_embedding"].shape[1] == (64 // 32) ** 2 + 1
    assert model.build()(torch.rand(1, 3, 64, 64)).shape == (1, 5)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_a_new_first_layer_keeps_the_spread_of_its_outputs(make_data, ctx, channels):
    ours = small_model("resnet18", make_data, ctx, channels=channels).build().conv1
    theirs = small_model("resnet18", make_data, ctx, channels=3).build().conv1
    assert (ours.in_channels, tuple(ours.weight.shape)) == (channels, (64, channels, 7, 7))
    images_NCHW = torch.randn(8, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    spread = [layer(images_NCHW[:, : layer.in_channels]).std().item() for layer in (ours, theirs)]
    assert spread[0] == pytest.approx(spread[1], rel=0.1)


@pytest.mark.parametrize(
    ("name", "shape_CHW", "message"),
    [
        ("alexnet", (1, 28, 28), "alexnet doesn't support images of 28x28 pixels: Given input size.* too small"),
        (
            "vit_b_16",
            (3, 28, 28),
            "vit_b_16 doesn't support images of 28x28 pixels: Input shape indivisible by patch size",
        ),
        ("vit_b_16", (3, 32, 64), "vit_b_16 doesn't support images of 32x64 pixels: it accepts square images only"),
        ("maxvit_t", (3, 64, 64), "maxvit_t doesn't support images of 64x64 pixels: Input size .* not divisible"),
        (
            "inception_v3",
            (3, 64, 64),
            "inception_v3 doesn't support images of 64x64 pixels: .* greater than actual input",
        ),
    ],
)
def test_images_of_a_wrong_size_are_refused_in_one_line(make_data, ctx, name, shape_CHW, message):
    with pytest.raises(StageError, match=message) as caught:
        torchvision_stage(TorchvisionConfig(name=name), ctx, make_data(shape_CHW))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fcn_resnet50", "fasterrcnn_resnet50_fpn", "nonsense", "ResNet18"])
def test_a_recipe_can_name_classification_networks_only(name):
    # The constructors of the others download a backbone's weights by default.
    with pytest.raises(StageError, match="has no classification network"):
        torchvision_models.classifier(name=name, shape_CHW=(3, 32, 32), num_classes=5)


@pytest.mark.parametrize("arguments", [{"weights": "DEFAULT"}, {"progress": True}])
def test_a_recipe_cannot_ask_for_a_download(arguments):
    builder_ref = FunctionRef(
        "ptpipe_zoo.torchvision_models:classifier", {"name": "resnet18", "shape_CHW": [3, 32, 32], "num_classes": 5}
    )
    with pytest.raises(TypeError, match="unexpected keyword"):
        builder_ref.resolve("builder")(**builder_ref.arguments, **arguments)


@pytest.mark.parametrize(
    "address", ["os:system", "torch.hub:load", "ptpipe_zoo.weights:download", "ptpipe_zoo.nets:build_seeded"]
)
def test_a_recipe_cannot_name_what_is_no_builder(address):
    with pytest.raises(IntegrityError):
        FunctionRef(address).resolve("builder")


def test_published_inception_weights_get_the_input_they_were_trained_with():
    assert torchvision_models.pretrained_arguments("resnet18") == {}
    arguments = torchvision_models.pretrained_arguments("googlenet")
    builder_ref = FunctionRef.to(
        torchvision_models.classifier, name="googlenet", shape_CHW=(3, 32, 32), num_classes=5, **arguments
    )
    network = nets.build_seeded(builder_ref, 7).eval()
    plain = nets.build_seeded(
        FunctionRef(builder_ref.address, {**builder_ref.arguments, "transform_input": False}), 7
    ).eval()
    images_NCHW = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(network(images_NCHW), plain((images_NCHW * std + mean - 0.5) / 0.5))


def test_the_head_of_squeezenet_is_a_convolution():
    network = torchvision_models.classifier(name="squeezenet1_1", shape_CHW=(3, 32, 32), num_classes=5)
    assert isinstance(network.get_submodule(torchvision_models.head(network, 5)), nn.Conv2d)
