"""`model.torchvision` for segmentation. Shape legend: B images, C channels, H height, W width, K classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import fx

from ptpipe import Context, StageError
from ptpipe.events import Event, Notice
from ptpipe_torch import FunctionRef, Model
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_zoo import TorchvisionConfig, torchvision_segmentation
from ptpipe_zoo import torchvision as torchvision_stage

from ...streets import street_data
from .conftest import MakeData

LIGHT = "lraspp_mobilenet_v3_large"
HEADS = {
    LIGHT: ["classifier.low_classifier", "classifier.high_classifier"],
    "deeplabv3_mobilenet_v3_large": ["classifier.4"],
    "fcn_resnet50": ["classifier.4"],
}


def model_of(
    name: str, ctx: Context, shape_CHW: tuple[int, int, int] = (3, 32, 48), weights_file: Path | None = None
) -> Model:
    config = TorchvisionConfig(name=name, weights_file=str(weights_file) if weights_file else None)
    return torchvision_stage(config, ctx, street_data(shape_CHW))


@pytest.mark.parametrize("name", HEADS)
def test_a_network_is_made_for_the_data_and_comes_back_bit_equal(name: str, ctx: Context) -> None:
    model = model_of(name, ctx, (2, 33, 47))
    folder = ctx.scratch / "model"
    folder.mkdir()
    model.save(folder)
    network, images_BCHW = Model.load(folder).build(), torch.rand(2, 2, 33, 47)
    logits_BKHW = network(images_BCHW)
    assert logits_BKHW.shape == (2, 3, 33, 47)
    assert torch.equal(logits_BKHW, model_of(name, ctx, (2, 33, 47)).build()(images_BCHW))
    assert torch.equal(fx.symbolic_trace(network)(images_BCHW), logits_BKHW)
    assert network.train()(images_BCHW).shape == (2, 3, 33, 47)


@pytest.mark.parametrize("name", HEADS)
def test_it_is_torchvisions_network(name: str) -> None:
    ours = torchvision_segmentation.segmenter(name=name, shape_CHW=(3, 32, 48), num_classes=5).eval()
    theirs = torchvision().models.get_model(name, weights=None, weights_backbone=None, num_classes=5).eval()
    theirs.load_state_dict(ours.state_dict())
    images_BCHW = torch.rand(1, 3, 32, 48)
    assert torch.equal(ours(images_BCHW), theirs(images_BCHW)["out"])
    assert torchvision_segmentation.heads(ours) == HEADS[name]


def test_every_name_differs_from_the_published_network_in_first_and_last_layers_only() -> None:
    for name in torchvision_segmentation.list_segmenters():
        with torch.device("meta"):
            published = torchvision().models.get_model(name, weights=None, weights_backbone=None).state_dict()
            network = torchvision_segmentation.segmenter(name=name, shape_CHW=(2, 32, 48), num_classes=5)
        own = network.state_dict()
        layers = ["backbone.conv1" if "resnet" in name else "backbone.0.0", *torchvision_segmentation.heads(network)]
        changed = {key for key in own if own[key].shape != published[key].shape}
        assert changed == {
            f"{layer}.{part}" for layer in layers for part in ("weight", "bias") if f"{layer}.{part}" in own
        }


@pytest.mark.parametrize("name", [LIGHT, "deeplabv3_mobilenet_v3_large"])
def test_weights_of_other_classes_with_an_auxiliary_classifier(
    name: str, ctx: Context, events: list[Event], tmp_path: Path
) -> None:
    options = {} if name == LIGHT else {"aux_loss": True}
    published = torchvision().models.get_model(name, weights=None, weights_backbone=None, num_classes=21, **options)
    file = tmp_path / "published.safetensors"
    save_file(published.state_dict(), file)
    fresh, model = model_of(name, ctx), model_of(name, ctx, weights_file=str(file))
    for key, tensor in model.tensors.items():
        is_head = key.startswith(tuple(HEADS[name]))
        assert torch.equal(tensor, fresh.tensors[key] if is_head else published.state_dict()[key]), key
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == [f"the weights' last layer ({head}) has 21 classes: reinitialized for 3" for head in HEADS[name]]


def test_data_of_another_task_is_refused(ctx: Context, make_data: MakeData) -> None:
    refused = rf"^model.torchvision \({LIGHT}\) takes images and returns classes or numbers for each pixel"
    with pytest.raises(StageError, match=refused):
        torchvision_stage(TorchvisionConfig(name=LIGHT), ctx, make_data((3, 32, 32)))
    refused = r"^model.torchvision \(resnet18\) takes images and returns a number for each class"
    with pytest.raises(StageError, match=refused):
        model_of("resnet18", ctx)


@pytest.mark.parametrize("name", ["resnet18", "maskrcnn_resnet50_fpn", "nonsense"])
def test_a_recipe_can_name_segmentation_networks_only(name: str) -> None:
    with pytest.raises(StageError, match="has no segmentation network"):
        torchvision_segmentation.segmenter(name=name, shape_CHW=(3, 32, 32), num_classes=5)


def test_a_recipe_cannot_ask_for_a_download() -> None:
    reference = FunctionRef.to(torchvision_segmentation.segmenter, name=LIGHT, shape_CHW=(3, 32, 32), num_classes=5)
    with pytest.raises(TypeError, match="unexpected keyword"):
        reference.resolve("builder")(**reference.arguments, weights_backbone="DEFAULT")
