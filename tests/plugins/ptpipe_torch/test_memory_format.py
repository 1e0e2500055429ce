"""Channels-last where a network convolves images and runs in it: one rule for training, calibration, predictors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe_torch import FunctionRef, Model, Recipe, builder, transform
from ptpipe_torch.int8.layers import swap_dynamic_linears
from ptpipe_torch.memory_format import to_preferred_format, view_failure

from ...signatures import classifier, logits_from

SHAPE_CHW = (2, 8, 8)
IMAGES_NCHW = np.random.default_rng(0).standard_normal((5, *SHAPE_CHW)).astype(np.float32)


class Viewing(nn.Module):
    """Flattens behind a convolution, with `view` or with `reshape`."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.view = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(256, 3), view
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x))
        return self.fc(x.view(x.size(0), -1) if self.view else x.reshape(x.size(0), -1))


@builder
def flattening(*, view: bool) -> nn.Module:
    return Viewing(view=view)


@transform
def dynamic(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        return swap_dynamic_linears(module, ["fc"], per_channel=True, narrow_weights=False)


def make_model(*, view: bool) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = flattening(view=view)
    return Model.from_module(Recipe(FunctionRef.to(flattening, view=view), classifier(SHAPE_CHW, 3)), module)


def in_channels_last(module: nn.Module) -> bool:
    weight = module.get_parameter("conv.weight")
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_a_view_behind_a_convolution_needs_contiguous_memory() -> None:
    lines: list[str] = []
    module, images_NCHW = Viewing(view=True), torch.zeros(2, *SHAPE_CHW)
    before = torch.get_rng_state()
    assert not to_preferred_format(module, [images_NCHW], lines.append)
    assert not in_channels_last(module)
    assert lines[0].startswith("memory_format contiguous: the network's forward pass fails in channels_last (view size")
    assert torch.equal(torch.get_rng_state(), before)
    module(images_NCHW)


def test_convolutions_of_images_run_in_channels_last_and_nothing_else_does() -> None:
    lines: list[str] = []
    module, images_NCHW = Viewing(view=False), torch.zeros(2, *SHAPE_CHW)
    assert to_preferred_format(module, [images_NCHW], lines.append)
    assert in_channels_last(module)
    assert not to_preferred_format(nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), [images_NCHW], lines.append)
    assert lines == []


class Windows(Viewing):
    """Has a mask of five axes, as Swin does."""

    def __init__(self) -> None:
        super().__init__(view=False)
        self.register_buffer("mask", torch.zeros(1, 2, 1, 3, 3))


def test_tensors_of_five_axes_stay_as_they_are() -> None:
    module = Windows()
    assert to_preferred_format(module, [torch.zeros(2, *SHAPE_CHW)])
    assert in_channels_last(module)
    assert module.get_buffer("mask").is_contiguous()


def test_the_line_of_a_refused_view_is_found() -> None:
    with pytest.raises(RuntimeError) as caught:
        Viewing(view=True).to(memory_format=torch.channels_last)(torch.zeros(2, *SHAPE_CHW))
    line = view_failure(caught.value)
    assert line is not None
    assert line.startswith(f"{__file__}:")
    assert line.endswith("return self.fc(x.view(x.size(0), -1) if self.view else x.reshape(x.size(0), -1))")
    assert view_failure(RuntimeError("something else")) is None


@pytest.mark.parametrize("backend", [None, "fbgemm", "qnnpack"])
def test_a_predictor_of_either_spelling_gives_the_same(backend: str | None) -> None:
    """`backend`: of dynamic int8, whose convolutions are float; None: a float model."""
    logits = []
    for view in (True, False):
        model = make_model(view=view)
        if backend:
            model = model.with_recipe(convert=(FunctionRef.to(dynamic),), backend=backend)
        with model.predictor(1) as predict:
            logits.append(logits_from(predict, IMAGES_NCHW))
    assert np.abs(logits[0] - logits[1]).max() < (0.02 if backend else 1e-5) * logits[0].std()


def test_convolutions_of_a_dynamic_int8_model_run_in_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = []
    forward = nn.Conv2d.forward

    def recorded(layer: nn.Conv2d, x_NCHW: torch.Tensor) -> torch.Tensor:
        y_NCHW = forward(layer, x_NCHW)
        formats.append(y_NCHW.is_contiguous(memory_format=torch.channels_last))
        return y_NCHW

    model = make_model(view=False).with_recipe(convert=(FunctionRef.to(dynamic),), backend="fbgemm")
    with model.predictor(1) as predict:
        monkeypatch.setattr(nn.Conv2d, "forward", recorded)
        logits_from(predict, IMAGES_NCHW)
    assert formats == [True]
