"""Products of activations in all spellings: the same function, and the same int8 network.

Shape legend: N batch, H heads, L queries, S keys, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import einops
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)  # fmt: skip
from ptpipe_quant.float_nodes import products_without_kernel
from ptpipe_quant.trace import trace_network
from ptpipe_torch import BATCH, Data, Model, TensorSpec, builder
from ptpipe_torch.int8.engine import quantized_engine

from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model, train

N, H, L, S, D = 3, 2, 5, 7, 4
TARGETS = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]
INPUTS = (TensorSpec("x", "float32", (BATCH, H, L, D)), TensorSpec("y", "float32", (BATCH, H, S, D)))


class Product(nn.Module):
    """Calls a product of two activations."""

    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._call(x, y)


def heads_last(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def baddbmm(x: torch.Tensor, y: torch.Tensor, **options: float) -> torch.Tensor:
    return torch.baddbmm(merged(x)[..., :1], merged(x), merged(y).mT, **options)


PRODUCTS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "operator": lambda x, y: x @ y.transpose(-2, -1),
    "method": lambda x, y: x.matmul(other=y.mT),
    "linalg": lambda x, y: torch.linalg.matmul(x, y.swapaxes(-2, -1)),
    "bmm": lambda x, y: torch.bmm(merged(x), mat2=merged(y).mT),
    "bmm_method": lambda x, y: merged(x).bmm(merged(y).mT),
    "mm": lambda x, y: torch.mm(merged(x)[0], merged(y)[0].t()),
    "mm_method": lambda x, y: merged(x)[0].mm(merged(y)[0].T),
    "baddbmm": baddbmm,
    "baddbmm_scaled": lambda x, y: baddbmm(x, y, beta=0.5, alpha=0.3),
    "baddbmm_by_names": lambda x, y: merged(x)[..., :1].baddbmm(batch1=merged(x), batch2=merged(y).mT, beta=0.5),
    "baddbmm_of_nothing": lambda x, y: baddbmm(x, y, beta=0),
    "baddbmm_of_nothing_scaled": lambda x, y: merged(x)[..., :1].baddbmm(merged(x), merged(y).mT, beta=0, alpha=2),
    "scores": lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y),
    "scores_of_a_list": lambda x, y: torch.einsum("bhqd, bhkd -> bhqk", [x, y]),
    "scores_of_any_batch": lambda x, y: torch.einsum("...qd,...kd->...qk", x, y),
    "scores_heads_last": lambda x, y: torch.einsum("bqhd,bkhd->bhqk", heads_last(x), heads_last(y)),
    "scores_turned": lambda x, y: torch.einsum("bnqd,bnkd->bkqn", x, y),
    "values_heads_last": lambda x, y: torch.einsum("bhqd,bkhd->bqhk", x, heads_last(y)),
    "keys_by_values": lambda x, y: torch.einsum("bhnd,bhne->bhde", x, y[:, :, :L]),
    "matrices": lambda x, y: torch.einsum("qd,kd->qk", x[0, 0], y[0, 0]),
}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(N, H, L, D, generator=random), torch.randn(N, H, S, D, generator=random)


def products(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=torch.matmul)


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_spelling_is_one_operator(name: str) -> None:
    network = Product(PRODUCTS[name])
    graph = trace_network(network, INPUTS).graph
    assert len(products(graph)) == 1
    assert not products_without_kernel(graph)
    torch.testing.assert_close(graph(*inputs()), network(*inputs()), rtol=1e-6, atol=1e-6)


def test_memory_that_holds_no_numbers_is_not_added() -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(x[:, 0, :, :1] * torch.nan, x[:, 0], y[:, 0].mT, beta=0, alpha=0.5)

    found = trace_network(Product(call), INPUTS).graph(*inputs())
    assert found.isfinite().all()
    torch.testing.assert_close(found, call(*inputs()))


OTHERS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "outer": lambda x, y: torch.einsum("bhqd,bhkd->bhqkd", x, y),
    "diagonal": lambda x, y: torch.einsum("bhqq,bhkd->bhqk", x[:, :, :4], y),
    "summed_in_one": lambda x, y: torch.einsum("bhqd,bhkd->hqk", x, y),
    "vector": lambda x, y: torch.einsum("bhd,bhkd->bhk", x[:, :, 0], y),
    "three": lambda x, y: torch.einsum("bhqd,bhkd,bhkd->bhqd", x, y, y),
    "implicit": lambda x, y: torch.einsum("bhqd,bhkd", x, y),
    "numbered": lambda x, y: torch.einsum(x, [0, 1, 2, 3], y, [0, 1, 4, 3], [0, 1, 2, 4]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay_and_are_named(name: str) -> None:
    network = Product(OTHERS[name])
    traced = trace_network(network, INPUTS)
    graph = traced.graph
    assert not products(graph)
    ((line, reason),) = traced.kept_float.items()
    assert "test_products.py" in line
    assert reason.startswith("torch has int8 products of matrices")
    torch.testing.assert_close(graph(*inputs()), network(*inputs()))


WITHOUT_KERNEL: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "broadcast": lambda x, y: x @ y[:, :1].mT,
    "fewer_axes": lambda x, y: x @ y[0, 0].mT,
    "vector": lambda x, y: x @ y[0, 0, 0],
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_what_has_no_kernel_stays_float_and_is_named(name: str) -> None:
    traced = trace_network(Product(WITHOUT_KERNEL[name]), INPUTS)
    assert products_without_kernel(traced.graph) == products(traced.graph) != []
    ((line, reason),) = traced.kept_float.items()
    assert "test_products.py" in line
    assert reason.startswith("torch has int8 products of matrices")


class Block(nn.Module):
    """A transformer's block over the rows of an image, in a user's own words."""

    def __init__(self, attend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._attend = attend
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 48), nn.Linear(16, 8)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x_NLD = images_NCHW.squeeze(1)
        x_NLD = x_NLD + self.out(self._attend(self.qkv(self.norm(x_NLD))))
        x_NLD = x_NLD + self.outer(F.gelu(self.inner(x_NLD)))
        return self.head(x_NLD[:, 0])


def weights(scores: torch.Tensor) -> torch.Tensor:
    return (scores * 8**-0.5).softmax(-1)


def by_matmul(qkv: torch.Tensor) -> torch.Tensor:
    """As in timm."""
    query, key, value = qkv.reshape(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return (weights(query @ key.transpose(-2, -1)) @ value).transpose(1, 2).reshape(-1, 8, 16)


def by_bmm(qkv: torch.Tensor) -> torch.Tensor:
    """As in fairseq: heads are part of the batch."""
    query, key, value = (part.unflatten(2, (2, 8)).transpose(1, 2).flatten(0, 1) for part in qkv.chunk(3, dim=-1))
    attended = torch.bmm(weights(torch.bmm(query, key.mT)), value)
    return attended.unflatten(0, (-1, 2)).permute(0, 2, 1, 3).flatten(2)


def by_einsum(qkv: torch.Tensor) -> torch.Tensor:
    query, key, value = (part.view(-1, 8, 2, 8) for part in qkv.split(16, -1))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    return torch.einsum("bhqk,bkhd->bqhd", weights(scores), value).flatten(-2)


def by_slices(qkv: torch.Tensor) -> torch.Tensor:
    query, key, value = (torch.movedim(qkv[..., i : i + 16].unflatten(-1, (2, -1)), 2, 1) for i in (0, 16, 32))
    scores = query.matmul(key.swapaxes(2, 3))
    return weights(scores).matmul(value).permute(0, 2, 1, 3).reshape(qkv.size(0), -1, 16)


def by_einops(qkv: torch.Tensor) -> torch.Tensor:
    """As in vit-pytorch."""
    query, key, value = einops.rearrange(qkv, "b n (three h d) -> three b h n d", three=3, h=2)
    scores = einops.einsum(query, key, "b h i d, b h j d -> b h i j")
    return einops.rearrange(weights(scores) @ value, "b h n d -> b n (h d)")


SPELLINGS = {"matmul": by_matmul, "bmm": by_bmm, "einsum": by_einsum, "slices": by_slices, "einops": by_einops}


@builder
def block(*, spelling: str) -> nn.Module:
    return Block(SPELLINGS[spelling])


def int8_of(spelling: str, data: Data, ctx: Context, backend: str, path: str) -> Model:
    model = make_model(block, spelling=spelling)
    if path == "qat":
        return convert(
            ConvertConfig(), ctx, train(prepare_qat(PrepareQatConfig(backend=backend), ctx, model), data, lr=0.05)
        )
    prepared = prepare(PrepareConfig(backend=backend, observer="min_max"), ctx, model)
    return convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, data).model)


def operators(int8: Model, backend: str) -> dict[str, int]:
    with quantized_engine(backend):
        network: Any = int8.build()
    names = [getattr(node.target, "__name__", node.target) for node in network.graph.nodes if node.op != "placeholder"]
    return {name: names.count(name) for name in ("matmul", "quantize_per_tensor", "dequantize")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("backend", "path", "spellings"),
    [
        (TARGETS[0], "static", list(SPELLINGS)),
        (TARGETS[-1], "static", ["matmul", "einops"]),
        (TARGETS[0], "qat", ["matmul", "bmm"]),
    ],
)
def test_all_spellings_of_attention_become_the_same_int8_network(
    backend: str, path: str, spellings: list[str], digits: Data, ctx: Context, metrics: Any
) -> None:
    found: dict[str, Any] = {}
    for spelling in spellings:
        int8 = int8_of(spelling, digits, ctx, backend, path)
        assert metrics()["int8_layers"] == 5
        found[spelling] = operators(int8, backend), logits_of(int8, digits)
    (first, expected), *others = found.values()
    # Integers are made of the images, attention's weights and GELU's outputs alone.
    assert first == {"matmul": 2, "quantize_per_tensor": 3, "dequantize": 3}
    for counts, logits in others:
        assert counts == first
        if path == "static":  # training sums floats in another order
            # The last bit of a range, by sums of floats in another order, may turn the rounding of a bias.
            assert np.mean(logits != expected) < 0.002
            assert np.abs(logits - expected).max() <= np.ptp(expected) / 200  # a step


@pytest.mark.sampled(3)  # what the others spell otherwise is one operator before it is exported
@pytest.mark.parametrize("other", ["slices", "bmm", "einsum", "einops"])
def test_all_spellings_of_attention_become_the_same_file(other: str, digits: Data, ctx: Context, metrics: Any) -> None:
    found = []
    for spelling in ("matmul", other):
        export_onnx(ExportConfig(num_samples=16), ctx, int8_of(spelling, digits, ctx, TARGETS[0], "static"), digits)
        assert metrics()["integer_coverage"] == "5 of 5 linear layers, 2 of 2 matrix products"
        found.append((metrics()["num_int8_nodes"], metrics()["num_float_nodes"]))
    assert found[0] == found[1]
