"""Micro-batches that end in padding: a piece of the network gets their samples alone."""

from __future__ import annotations

import torch
from torch import fx, nn

from ptpipe_train.device import DeviceSettings
from ptpipe_train.parallel.pp import StageModule, _have_samples_first


def make_stage(piece: nn.Module) -> tuple[StageModule, list[bool]]:
    takes_part: list[bool] = []
    settings = DeviceSettings(torch.device("cpu"))
    return StageModule(
        fx.symbolic_trace(nn.Sequential(piece)), settings, takes_part.append, is_first=True, is_last=True
    ), takes_part


def test_a_piece_gets_the_samples_before_the_padding() -> None:
    images_MCHW = torch.randn(5, 3, 4, 4)
    norm, same = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    stage, takes_part = make_stage(norm)
    with stage.microbatches([5, 2, 0], ()):
        whole, partial, empty = (stage(images_MCHW) for _ in range(3))
    assert whole.shape == partial.shape == empty.shape
    assert torch.equal(whole, same(images_MCHW))
    assert torch.equal(partial[:2], same(images_MCHW[:2]))
    assert not partial[2:].any()
    for name, tensor in norm.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
    assert takes_part == [True, True, False]


def test_padding_has_no_gradient() -> None:
    images_MCHW = torch.randn(5, 3, 4, 4, requires_grad=True)
    stage, _ = make_stage(nn.Conv2d(3, 2, 3))
    with stage.microbatches([2], ()):
        stage(images_MCHW).sum().backward()
    assert images_MCHW.grad is not None
    assert images_MCHW.grad[:2].all()
    assert not images_MCHW.grad[2:].any()


def test_values_with_and_without_a_row_for_each_sample() -> None:
    def values(num: int, *, transposed: bool) -> list[torch.Tensor]:
        between = torch.empty(num, 7)
        return [torch.empty(num, 1, 4, 4), between.t() if transposed else between, torch.empty(num, 10)]

    assert _have_samples_first(values(5, transposed=False), values(4, transposed=False))
    assert not _have_samples_first(values(5, transposed=True), values(4, transposed=True))
