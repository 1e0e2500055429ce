"""Layers whose weights are computed, and batch norms that can't be folded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_quant.repairs import equalize
from ptpipe_quant.repairs.config import EqualizeConfig
from ptpipe_quant.trace import trace_network
from ptpipe_quant.transforms import prepare_qat as insert_fake_quant
from ptpipe_quant.transforms import prepare_static, to_int8
from ptpipe_torch import TensorSpec, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import fold_batch_norms

from ...signatures import pictures, stored_pictures
from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model

FIRST = BACKENDS[0]


def weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch prefers the parametrization
        return nn.utils.weight_norm(layer)


@builder
def with_weight_norm() -> nn.Module:
    """A convolution whose weights are a direction and a length."""
    return nn.Sequential(weight_norm(nn.Conv2d(1, 4, 8)), nn.ReLU(), nn.Flatten(), nn.Linear(4, NUM_CLASSES))


@builder
def with_token_norm() -> nn.Module:
    """Linear layers on the rows of an image, and a batch norm with a mean and a variance for each row."""
    norm = nn.BatchNorm1d(8, momentum=None)
    rows = (nn.Flatten(1, 2), nn.Linear(8, 8), norm, nn.ReLU(), nn.Linear(8, 4), nn.Flatten())
    return nn.Sequential(*rows, nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))


@pytest.mark.parametrize("method", ["static", "fold", "train"])
def test_a_batch_norm_of_tokens_is_not_fused(method) -> None:
    torch.manual_seed(0)
    network = with_token_norm().train()
    x_NCHW = torch.rand(64, 1, 8, 8) * torch.arange(1.0, 9).reshape(8, 1)
    network(x_NCHW)
    scheme = {"inputs": stored_pictures((1, 8, 8)), "backend": FIRST, "weights": "per_channel", "skip": ()}
    with torch.no_grad(), quantized_engine(FIRST):
        expected = network.eval()(x_NCHW)
        graph, standard = (
            prepare_static(copy.deepcopy(network), observer="min_max", calibrating=calibrating, **scheme)
            if method == "static"
            else insert_fake_quant(copy.deepcopy(network), batch_norm=method, freeze_at=freeze_at, **scheme)
            for calibrating, freeze_at in ((True, 1.0), (False, None))
        )
        graph.train(method != "static")(x_NCHW)
        standard.load_state_dict(graph.state_dict())
        found = to_int8(standard.eval(), backend=FIRST)(x_NCHW)
    assert (found - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_equalization_leaves_the_layer_in_front_of_it(ctx, digits) -> None:
    model = make_model(with_token_norm)
    equalized = equalize(EqualizeConfig(), ctx, model)
    assert np.allclose(logits_of(equalized, digits, 32), logits_of(model, digits, 32), atol=1e-5)


def test_qat_reports_that_it_trains_the_weights_themselves(ctx, events) -> None:
    prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(with_weight_norm))
    assert any("the weights of 0 are computed from other parameters" in str(event) for event in events)


@pytest.mark.parametrize(
    ("layer", "norm"), [(nn.Linear, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d)]
)
def test_a_synchronized_batch_norm_is_folded(layer: Any, norm: Any) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(layer(4, 4, *([1] if layer is not nn.Linear else [])), norm(4), nn.ReLU())
    shape = (4, *([6] * (int(norm.__name__[-2]) if layer is not nn.Linear else 0)))
    network(torch.randn(16, *shape))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(network)).eval()
    assert type(synchronized[1]) is nn.SyncBatchNorm
    graph = trace_network(synchronized, pictures(shape)).graph
    assert type(graph.get_submodule("1")) is norm
    assert graph.get_submodule("1").weight is synchronized[1].weight
    folded = fold_batch_norms(graph)
    assert not any(isinstance(part, nn.SyncBatchNorm | norm) for part in folded.modules())
    x = torch.randn(2, *shape)
    torch.testing.assert_close(folded(x), network.eval()(x))


class Decoder(nn.Module):
    """Transposed convolutions, one of them for two sizes, that are told the size to return."""

    def __init__(self, num_dims: int) -> None:
        super().__init__()
        self.down = getattr(nn, f"Conv{num_dims}d")(1, 1, 3, stride=2, padding=1)
        self.up = getattr(nn, f"ConvTranspose{num_dims}d")(1, 1, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.down(x)
        quarter = self.down(half)
        out: torch.Tensor = self.up(self.up(quarter, output_size=half.shape[2:]), x.size())
        return out


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_an_output_size_becomes_padding(num_dims: int) -> None:
    shape = (1, *range(9, 9 + num_dims))
    network = Decoder(num_dims).eval()
    x = torch.randn(3, *shape)
    expected = network(x)
    graph = trace_network(network, pictures(shape)).graph
    ups = [layer for layer in graph.modules() if hasattr(layer, "output_padding") and layer.transposed]
    assert [layer.output_padding for layer in ups] == [(0, 0, 1)[:num_dims], (0, 1, 0)[:num_dims]]
    assert ups[0].weight is ups[1].weight
    assert len(list(graph.graph.nodes)) == 6
    assert torch.equal(graph(x), expected)


def test_an_output_size_that_is_open_stays_one() -> None:
    network = Decoder(1).eval()
    traced = trace_network(network, [TensorSpec("x", "float32", ("batch", 1, "length"))])
    reason = "its output_size depends on an axis of an input that is of any size"
    assert traced.kept_float == {"up": reason, "up_call2": reason}
    assert {"up", "up_call2"} <= set(traced.float_names)
    x = torch.randn(3, 1, 10)
    assert torch.equal(traced.graph(x), network(x))
