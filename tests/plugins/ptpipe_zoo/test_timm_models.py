"""`model.timm`. Shape legend: N images, C channels, H height, W width, K classes."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import fx, nn

from ptpipe import Context, StageError
from ptpipe.events import Event, Notice
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import stages
from ptpipe_quant.config import PrepareQatConfig
from ptpipe_torch import ArrayColumn, Data, FunctionRef, LoaderOptions, Model
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_zoo import TimmConfig, extras, timm_models
from ptpipe_zoo import timm as timm_stage

from ...datasets import image_info, image_split
from ...texts import quantized, trained
from .conftest import MakeData

pytestmark = pytest.mark.skipif(extras.missing_extra("timm") is not None, reason="needs ptpipe[timm]")
SMALL = [
    "convnext_atto",
    "efficientnet_b0",
    "mobilenetv3_small_050",
    "mobilevit_xxs",
    "regnety_002",
    "repvgg_a0",
    "resnet18",
    "vit_tiny_patch16_224",
]
NAME = "mobilenetv3_small_050"


def notices(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize("name", SMALL)
def test_a_network_is_made_for_the_data_and_comes_back_bit_equal(name: str, make_data: MakeData, ctx: Context) -> None:
    model = timm_stage(TimmConfig(name=name), ctx, make_data((2, 32, 32)))
    folder = ctx.scratch / "model"
    folder.mkdir()
    model.save(folder)
    network, images_NCHW = Model.load(folder).build(), torch.rand(2, 2, 32, 32)
    logits_NK = network(images_NCHW)
    assert logits_NK.shape == (2, 5)
    assert torch.equal(logits_NK, timm_stage(TimmConfig(name=name), ctx, make_data((2, 32, 32))).build()(images_NCHW))


@pytest.mark.parametrize("name", [NAME, "resnet18", "regnety_002"])
def test_it_computes_what_timms_network_does(name: str, tmp_path: Path, make_data: MakeData, ctx: Context) -> None:
    """Also in training, where batch norm with an activation is two layers."""
    theirs = timm_models.timm().create_model(name, num_classes=5, in_chans=3)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    config = TimmConfig(name=name, weights_file=str(tmp_path / "w.safetensors"))
    ours = timm_stage(config, ctx, make_data((3, 32, 32))).build()
    images_NCHW = torch.rand(4, 3, 32, 32)
    for is_training in (True, False):  # the first changes the statistics of both
        assert torch.equal(ours.train(is_training)(images_NCHW), theirs.train(is_training)(images_NCHW))


def test_each_batch_norm_is_a_layer_of_torchs(make_data: MakeData, ctx: Context) -> None:
    network = timm_stage(TimmConfig(name=NAME), ctx, make_data((3, 32, 32))).build()
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 34
    assert all(type(layer) is nn.BatchNorm2d for layer in norms)
    assert isinstance(network.bn1.act, nn.Hardswish)
    fx.symbolic_trace(network)


def pictures() -> Data:
    """Brighter ones are of a higher class."""
    rng, splits = np.random.default_rng(0), {}
    for name, size in (("train", 32), ("test", 8), ("calibration", 16)):
        labels_N = rng.integers(0, 3, size)
        pixels_NHWC = (labels_N[:, None, None, None] * 80 + rng.integers(0, 60, (size, 32, 32, 3))).astype(np.uint8)
        splits[name] = image_split(
            np.array([f"{name}/{row}" for row in range(size)]), labels_N, ArrayColumn(pixels_NHWC)
        )
    info = image_info("pictures", ("dark", "medium", "bright"), (3, 32, 32), (0.5,) * 3, (0.3,) * 3)
    return Data(info, splits, LoaderOptions(batch_size=8))


def test_a_network_whose_batch_norms_have_activations_is_prepared_for_qat(ctx: Context) -> None:
    model = timm_stage(TimmConfig(name=NAME), ctx, pictures())
    prepared = stages.prepare_qat(PrepareQatConfig(backend="fbgemm"), ctx, model)
    assert prepared.recipe.prepare


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("path", "backend"), [("static", "fbgemm"), ("static", "qnnpack"), ("qat", "fbgemm")])
def test_the_whole_way_to_an_int8_file(name: str, path: str, backend: str, ctx: Context) -> None:
    if backend not in supported_engines():
        pytest.skip(f"no {backend} here")
    data = pictures()
    model = trained(timm_stage(TimmConfig(name=name), ctx, data), data, epochs=2, lr=1e-3)
    int8 = quantized(model, data, ctx, backend, path)
    file = export_onnx(ExportConfig(num_samples=8), ctx, int8, data)  # which compares the file with the model
    assert file.size_bytes < 0.5 * sum(tensor.nbytes for tensor in model.tensors.values())


def test_weights_for_other_classes_and_channels(
    tmp_path: Path, make_data: MakeData, ctx: Context, events: list[Event]
) -> None:
    theirs = timm_models.timm().create_model(NAME, num_classes=1000)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    config = TimmConfig(name=NAME, weights_file=str(tmp_path / "w.safetensors"))
    fresh = timm_stage(TimmConfig(name=NAME), ctx, make_data())
    model = timm_stage(config, ctx, make_data((1, 32, 32)))
    assert torch.equal(model.tensors["conv_stem.weight"], theirs.conv_stem.weight.sum(1, keepdim=True))
    assert torch.equal(model.tensors["classifier.weight"], fresh.tensors["classifier.weight"])
    assert torch.equal(model.tensors["bn1.norm.weight"], theirs.bn1.weight)
    assert notices(events) == [
        "the weights' first layer has 3 input channels: adapted to 1",
        "the weights' last layer (classifier) has 1000 classes: reinitialized for 5",
    ]


def test_arguments_are_the_networks(make_data: MakeData, ctx: Context) -> None:
    config = TimmConfig(name=NAME, arguments={"drop_rate": 0.4, "act_layer": "relu"})
    network = timm_stage(config, ctx, make_data((3, 32, 32))).build()
    assert network.drop_rate == 0.4
    assert isinstance(network.bn1.act, nn.ReLU)


@pytest.mark.parametrize(
    ("name", "arguments", "shape_CHW", "message"),
    [
        ("resnet18", {"bogus": 1}, (3, 32, 32), r"unexpected keyword argument 'bogus'"),
        ("resnet18", {"drop_rate": "high"}, (3, 32, 32), r"resnet18 can't be built .* 32x32 pixels"),
        ("vit_tiny_patch16_224", {"img_size": 224}, (3, 32, 32), r"32x32 pixels: Input height"),
        ("resnet18", {"global_pool": ""}, (3, 64, 64), r"64x64 pixels: (addmm: )?mat1 and mat2 shapes"),
        (
            "vit_tiny_patch16_224",
            {"global_pool": ""},
            (3, 32, 32),
            r"returns \(1, 5, 5\); it must return logits \(batch, 5\)",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    name: str,
    arguments: dict[str, object],
    shape_CHW: tuple[int, int, int],
    message: str,
    make_data: MakeData,
    ctx: Context,
) -> None:
    with pytest.raises(StageError, match=message) as caught:
        timm_stage(TimmConfig(name=name, arguments=arguments), ctx, make_data(shape_CHW))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18.a1_in1k", "local-dir:/etc", "resnet18.a1_in1k", "nonsense"])
def test_a_recipe_can_name_networks_only(name: str) -> None:
    with pytest.raises(StageError, match="has no network"):
        timm_models.timm_network(name=name, shape_CHW=(3, 32, 32), num_classes=5, arguments={})


@pytest.mark.parametrize("argument", ["pretrained", "checkpoint_path", "pretrained_cfg"])
def test_a_recipe_cannot_ask_for_other_files(argument: str) -> None:
    reference = FunctionRef.to(
        timm_models.timm_network, name=NAME, shape_CHW=(3, 32, 32), num_classes=5, arguments={argument: "x"}
    )
    with pytest.raises(StageError, match=f"can't be given {argument}"):
        reference.resolve("builder")(**reference.arguments)


class TestPublished:
    CONFIG = TimmConfig(name=NAME, weights="lamb_in1k")
    REPOSITORY = "models--timm--mobilenetv3_small_050.lamb_in1k"

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The Hub's cache in a folder of its own, without a network."""
        constants = importlib.import_module("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return tmp_path / "hub"

    def publish(self, cache: Path) -> nn.Module:
        """Put weights into the cache as the Hub's client does."""
        network: nn.Module = timm_models.timm().create_model(NAME)
        folder = cache / self.REPOSITORY
        for name in ("blobs", "refs", "snapshots/abc"):
            (folder / name).mkdir(parents=True)
        save_file(network.state_dict(), folder / "weights")
        digest = hashlib.sha256((folder / "weights").read_bytes()).hexdigest()
        (folder / "weights").rename(folder / "blobs" / digest)
        (folder / "refs" / "main").write_text("abc")
        (folder / "snapshots/abc/model.safetensors").symlink_to(f"../../blobs/{digest}")
        return network

    def test_they_are_taken_from_the_cache(self, cache: Path, make_data: MakeData, ctx: Context) -> None:
        with pytest.raises(StageError, match="were not found: a run downloads them first"):
            timm_stage(self.CONFIG, ctx, make_data((3, 32, 32)))
        assert timm_stage.fingerprint(self.CONFIG) == {"timm/mobilenetv3_small_050.lamb_in1k": None}
        network = self.publish(cache)
        model = timm_stage(self.CONFIG, ctx, make_data((3, 32, 32)))
        assert torch.equal(model.tensors["conv_stem.weight"], network.conv_stem.weight)
        assert list(timm_stage.preflight(self.CONFIG)) == []
        (blob,) = (cache / self.REPOSITORY / "blobs").iterdir()
        assert timm_stage.fingerprint(self.CONFIG) == {"timm/mobilenetv3_small_050.lamb_in1k": blob.name}

    def test_another_file_in_the_cache_is_refused(self, cache: Path, make_data: MakeData, ctx: Context) -> None:
        self.publish(cache)
        (blob,) = (cache / self.REPOSITORY / "blobs").iterdir()
        blob.write_bytes(blob.read_bytes()[:-1] + b"x")
        with pytest.raises(StageError, match="is not the file that was published"):
            timm_stage(self.CONFIG, ctx, make_data((3, 32, 32)))
        (line,) = timm_stage.preflight(self.CONFIG)
        assert line.endswith("delete it")

    def test_what_cannot_be_downloaded_is_reported(self) -> None:
        (line,) = timm_stage.preflight(self.CONFIG)
        assert line.startswith("can't download model.safetensors of timm/mobilenetv3_small_050.lamb_in1k (")
        assert line.endswith("): specify a local file with weights_file")

    def test_names_that_are_not_published(self) -> None:
        (line,) = timm_stage.preflight(TimmConfig(name=NAME, weights="lamb"))
        assert line == f"{NAME} has no published weights 'lamb'; available: lamb_in1k"

    def test_weights_that_timm_does_not_publish_itself(self) -> None:
        ids = {
            name: timm_models.timm().get_pretrained_cfg(name).hf_hub_id for name in timm_models.timm().list_pretrained()
        }
        full_name = next(name for name, hub_id in ids.items() if hub_id not in ("timm/", f"timm/{name}"))
        name, _, weights = full_name.partition(".")
        (line,) = timm_stage.preflight(TimmConfig(name=name, weights=weights))
        assert line == f"{full_name} is not published by timm but as {ids[full_name]}: download it, use weights_file"


def test_the_names_read_from_the_source_are_those_that_timm_lists() -> None:
    assert list(extras.timm_names()) == sorted(timm_models.timm().list_models())


def test_the_preflight_reports_missing_files_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "timm_names", lambda: ())  # as if its source were laid out differently
    lines = list(timm_stage.preflight(TimmConfig(name="resnet81", weights_file=str(tmp_path / "w.pth"))))
    assert lines[0] == f"weights file {tmp_path / 'w.pth'} does not exist"
    assert lines[1].endswith("has no network 'resnet81' (did you mean 'resnet18'?)")
