"""Files of torchvision's networks, trained and not: right ones are accepted, small faults are found. Takes an hour.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.layerwise import compare_file
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, PrepareConfig, PrepareQatConfig
from ptpipe_torch import ArrayColumn, Data, FunctionRef, Model, OnnxFile, Recipe, Split
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.runtime import seeded
from ptpipe_zoo import nets, torchvision_models

from ...datasets import image_info, image_split
from ...signatures import classifier
from .planted_faults import broken_files

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

SHAPE_CHW = (1, 32, 32)
FAMILIES = ["resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1"]
FAMILIES += ["efficientnet_b0", "regnet_y_400mf", "densenet121", "googlenet", "convnext_tiny"]
FORMS = [(is_qat, backend) for is_qat in (False, True) for backend in ("fbgemm", "qnnpack")]


@pytest.fixture(scope="session")
def large_digits(digits: Data) -> Data:
    """Each pixel of the digits twice as wide and high once more: torchvision's networks need 32x32."""

    def enlarged(name: str) -> Split:
        (batch,) = digits.batches(name, batch_size=len(digits.splits[name]))
        values_NCHW = batch.inputs["images"].numpy() * 0.38 + 0.31
        pixels_NHWC = np.kron(values_NCHW[:, 0] * 255, np.ones((2, 2))).round().clip(0, 255).astype(np.uint8)[..., None]
        ids = np.array([f"{name}/{i:05d}" for i in range(len(pixels_NHWC))])
        return image_split(ids, batch.targets["labels"].numpy(), ArrayColumn(np.ascontiguousarray(pixels_NHWC)))

    info = image_info("digits", tuple("0123456789"), SHAPE_CHW, (0.31,), (0.38,))
    return Data(info, {name: enlarged(name) for name, split in digits.splits.items() if len(split)})


def train(module: nn.Module, data: Data, num_epochs: int, lr: float) -> None:
    total = num_epochs * (-(-len(data.splits["train"]) // 32))
    optimizer = torch.optim.SGD(module.train().parameters(), lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total)
    for batch in (batch for _ in range(num_epochs) for batch in data.batches("train", batch_size=32)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(batch.inputs["images"]), batch.targets["labels"]).backward()
        optimizer.step()
        schedule.step()


@pytest.fixture(scope="session")
def float_network(large_digits: Data) -> Callable[..., Model]:
    """Give a network by name, with batch norm statistics of the digits or trained on them."""
    known: dict[tuple[str, int], Model] = {}

    def make(name: str, num_epochs: int) -> Model:
        if (name, num_epochs) not in known:
            options = {"shape_CHW": list(SHAPE_CHW), "num_classes": 10}
            make_small = FunctionRef.to(nets.small_cnn, width=16, **options) if name == "small_cnn" else None
            builder = make_small or FunctionRef.to(torchvision_models.classifier, name=name, **options)
            with seeded(0):
                module = builder.resolve("builder")(**builder.arguments)
                with torch.no_grad():
                    for parameter_name, parameter in module.named_parameters():
                        if parameter_name.endswith("layer_scale"):
                            parameter.fill_(0.1)  # from 1e-6: qnnpack adds no tensors whose steps are that different
                if num_epochs:
                    train(module, large_digits, num_epochs, 0.05)
                else:
                    with torch.no_grad():
                        module.train()(next(iter(large_digits.batches("train", batch_size=64))).inputs["images"])
            known[name, num_epochs] = Model.from_module(Recipe(builder, classifier(SHAPE_CHW, 10)), module)
        return known[name, num_epochs]

    return make


def int8(model: Model, data: Data, folder: Path, *, is_qat: bool, backend: str) -> Model:
    ctx = Context("int8", "quant", 7, folder)
    if is_qat:
        prepared = stages.prepare_qat(PrepareQatConfig(backend=backend), ctx, model)
        module = prepared.build_prepared()
        train(module, data, 1, 1e-3)
        return stages.convert(ctx, prepared.with_state_dict_of(module.eval()))
    prepared = stages.prepare(PrepareConfig(backend=backend), ctx, model)
    return stages.convert(ctx, stages.calibrate(CalibrateConfig(num_samples=128), ctx, prepared, data)[0])


def exported(model: Model, data: Data, folder: Path) -> OnnxFile:
    return export_onnx(ExportConfig(num_samples=200), Context("onnx", "export.onnx", 7, folder), model, data)


@pytest.mark.parametrize(("is_qat", "backend"), FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_right_files_are_accepted(
    name: str, is_qat: bool, backend: str, float_network: Callable[..., Model], large_digits: Data, tmp_path: Path
) -> None:
    model = int8(float_network(name, 0), large_digits, tmp_path, is_qat=is_qat, backend=backend)
    assert exported(model, large_digits, tmp_path).precision == "int8"


@pytest.mark.parametrize(
    ("name", "num_epochs", "num_faults"), [("small_cnn", 4, 44), ("mobilenet_v2", 6, 78), ("resnet50", 6, 78)]
)
def test_small_faults_in_trained_networks_are_found(
    name: str,
    num_epochs: int,
    num_faults: int,
    float_network: Callable[..., Model],
    large_digits: Data,
    tmp_path: Path,
) -> None:
    model = int8(float_network(name, num_epochs), large_digits, tmp_path, is_qat=False, backend="fbgemm")
    file = exported(model, large_digits, tmp_path)
    with quantized_engine("fbgemm"):
        reference, int8_network = reference_network(model.build_prepared())[0], model.build()
    images_NCHW = next(iter(large_digits.batches("test", batch_size=32))).inputs["images"].numpy()
    checks: dict[str, Callable[[Path], object]] = {
        "exactly": lambda path: compare_exactly(path, reference, int8_network),
        "by layers": lambda path: compare_file(path, reference, {"images": images_NCHW}, ["logits"], tmp_path).check(),
    }
    missed: dict[str, list[str]] = {check: [] for check in checks}
    for fault, path in broken_files(file.path, tmp_path, num_faults):
        for name_of_check, check in checks.items():
            try:
                check(path)
            except StageError:
                continue
            missed[name_of_check].append(fault)
    assert missed["exactly"] == []
    # By layers, a bias off by one is invisible, and a channel without effect on these images too.
    assert len(missed["by layers"]) <= 0.25 * num_faults, missed
