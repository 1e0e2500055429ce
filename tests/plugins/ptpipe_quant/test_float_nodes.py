"""Which operators must stay float."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_quant.float_nodes import (
    expectations,
    masked_softmax,
    operators_behind_layers,
    operators_converted_wrongly,
    operators_on_constants,
    operators_on_integers,
    operators_on_other_numbers,
)  # fmt: skip
from ptpipe_quant.trace import trace_network
from ptpipe_quant.transforms import prepare_static, to_int8
from ptpipe_torch import BATCH, Data, TensorSpec, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.observers import is_observer

from ...processor import reduced
from ...signatures import pictures, stored_pictures
from .conftest import BACKENDS, make_model
from .library_styles import build as build_library_style
from .spellings import ARITHMETIC, INPUT_SHAPE_CHW, Net, behind, build, conv, logits, with_layer

ENGINES = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]


def test_integers_are_followed_back_to_the_last_layer() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(n.stem(x).sigmoid() + 1)
        best = (2 * x).argmax(1, keepdim=True)
        return logits(n, n.conv(x * 3).gather(1, best).expand(-1, 8, -1, -1))

    graph = trace_network(Net(body, conv=conv()), pictures(INPUT_SHAPE_CHW)).graph
    names = {node.name for node in operators_on_integers(graph)}
    assert names == {"sigmoid", "add", "relu_1", "mul", "argmax", "gather"}


def test_a_network_without_integers_has_none() -> None:
    network = Net(lambda n, x: logits(n, F.relu(n.stem(x)) + 1))
    assert operators_on_integers(trace_network(network, pictures(INPUT_SHAPE_CHW)).graph) == []


class Experts(nn.Module):
    """Two of four experts compute each position; a router chooses them by its highest scores."""

    def __init__(self, rank: Any) -> None:
        super().__init__()
        self.router, self.rank = nn.Linear(6, 4), rank
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        weights = self.rank(scores)
        y = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head((y * weights.unsqueeze(-2)).sum(-1))


def two_highest(scores: torch.Tensor) -> torch.Tensor:
    _, positions = torch.topk(scores, 2)
    return scores * F.one_hot(positions, 4).sum(-2)


@pytest.mark.parametrize(
    ("rank", "ranked"),
    [
        (two_highest, ["router"]),
        (lambda scores: scores * (scores.argsort(-1) > 1), ["router"]),
        (lambda scores: scores * scores.sort(-1).indices, ["router"]),
        (lambda scores: scores * scores.unflatten(-1, (4, 1)).max(-1)[0].topk(4)[1], ["router"]),  # behind a tuple
        (lambda scores: scores * torch.arange(4.0).type_as(scores).expand(2, 5, 4).argsort(-1), []),
        (lambda scores: scores * scores.new_ones(2, 5, 4).argsort(-1), []),
        (lambda scores: scores.sort(-1)[0], []),
        (lambda scores: scores.topk(4).values, []),
    ],
)
def test_layers_whose_outputs_are_ranked(rank: Any, ranked: list[str]) -> None:
    network = trace_network(Experts(rank), (TensorSpec("x", "float32", (BATCH, 5, 6)),))
    assert [name for name in network.float_names if name in ("router", "head", "experts.0")] == ranked
    assert [name for name in network.kept_float if name == "router"] == ranked


def test_distances_are_not_ranked_layers() -> None:
    """Nearest neighbors of points, as networks of point clouds look them up."""

    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        points = n.stem(x).flatten(2).transpose(1, 2)
        squares = (points**2).sum(-1, keepdim=True)
        distances = squares - 2 * points @ points.transpose(1, 2) + squares.transpose(1, 2)
        nearest = distances.topk(2)[1][..., 1:].expand(-1, -1, 8)
        return logits(n, torch.gather(points, 1, nearest).transpose(1, 2).reshape(x.shape[0], 8, *x.shape[2:]))

    network = trace_network(Net(body), pictures(INPUT_SHAPE_CHW))
    assert "stem" not in network.float_names


class Detector(nn.Module):
    """Boxes in pixels and scores of 0 to 1 in one tensor, also in another order of axes; and a join that is read on."""

    def __init__(self) -> None:
        super().__init__()
        channels = INPUT_SHAPE_CHW[0]
        self.stem, self.boxes, self.scores = nn.Conv2d(channels, 8, 3, 2), nn.Conv2d(16, 4, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.stem(x)
        read = torch.cat([y, F.relu(y)], 1)
        joined = torch.cat([self.boxes(read).flatten(2), self.scores(read).flatten(2).sigmoid()], 1)
        best = joined[:, 4:].max(1)  # reads it, without weights
        return {"detections": joined.transpose(1, 2), "best": best.values, "class": best.indices, "features": read}


def test_what_is_joined_behind_the_last_layers_is_left_float() -> None:
    graph = trace_network(Detector(), pictures(INPUT_SHAPE_CHW)).graph
    found = operators_behind_layers(graph)
    assert [node.target for node in found if node.target in (torch.cat, "transpose")] == [torch.cat, "transpose"]
    assert found[0] is max(graph.graph.find_nodes(op="call_function", target=torch.cat))  # the last one
    assert "sigmoid" not in [node.target for node in found]


@pytest.mark.parametrize("backend", ENGINES)
def test_scores_beside_boxes_keep_their_grid(backend: str) -> None:
    """On one grid with boxes of up to hundreds of pixels all were 0, or 1."""
    torch.manual_seed(0)
    network = Detector().eval()
    with torch.no_grad():
        network.boxes.weight *= 300
        network.scores.weight *= 5
    x = torch.randn(2, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(0))
    with quantized_engine(backend), torch.no_grad():
        expected = network(x)["detections"]
        found = to_int8(prepared_on(network, backend), backend=backend)(x)["detections"]
    scores, expected_scores = found[..., 4:], expected[..., 4:]
    assert expected[..., :4].abs().max() > 100 and expected_scores.std() > 0.1
    assert (scores - expected_scores).abs().max() < 0.05


class BestBoxes(nn.Module):
    """The two boxes of the highest scores, as heads without non-maximum suppression return them: `class` as a float.

    Scores are highest, and equal, where a picture is empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.boxes, self.scores = nn.Conv2d(1, 8, 3, bias=False), nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x).relu()
        boxes = 100 * self.boxes(y).flatten(2)
        scores = self.scores(-4 * y).flatten(2).sigmoid()
        joined = torch.cat([boxes, scores], 1).transpose(1, 2)
        batch_size, _, _ = joined.shape  # noqa: RUF059  # as many unpack all sizes
        boxes, scores = joined.split([3, 4], -1)
        best = scores.max(-1)[0].topk(2)[1][..., None]
        values, classes = scores.gather(1, best.expand(-1, -1, 4)).max(-1)
        found = [boxes.gather(1, best.expand(-1, -1, 3)), values[..., None], classes[..., None].float()]
        return torch.cat(found, -1).flatten(1)


@builder
def best_boxes() -> nn.Module:
    network = BestBoxes()
    for layer in (network.stem, network.scores):
        layer.weight.data.abs_()
    return network


@pytest.mark.parametrize("backend", ENGINES)
def test_boxes_and_classes_of_a_ranking_head(backend: str, ctx: Context, digits: Data) -> None:
    """Joined in int8 they were on one grid: scores of 0 to 1 were 0 or 1, and classes no whole numbers.

    Of equal scores, ONNX Runtime and torch may rank others first.
    """
    model = make_model(best_boxes)
    calibrated = calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(backend=backend), ctx, model), digits).model
    file = export_onnx(ExportConfig(), ctx, convert(ConvertConfig(), ctx, calibrated), digits)
    (batch,) = digits.batches("test", batch_size=50, order_N=np.arange(50))
    with file.predictor() as predict:
        found = predict(batch.input_arrays())["logits"].reshape(-1, 2, 5)
    with torch.no_grad():
        expected = model.build()(batch.inputs["images"]).numpy().reshape(-1, 2, 5)
    assert np.abs(expected[..., :3]).max() > 20
    assert np.isin(found[..., 4], (0, 1, 2, 3)).all()
    assert np.abs(found[..., 3] - expected[..., 3]).max() < 0.02


class Distances(nn.Module):
    """Sides of boxes: distances from the places of a grid, each the mean of a distribution over 16 numbers."""

    def __init__(self, mean: Any) -> None:
        super().__init__()
        self.stem, self.sides, self.mean = nn.Conv2d(INPUT_SHAPE_CHW[0], 64, 3), nn.Conv2d(64, 64, 1), mean
        self.register_buffer("grid", torch.arange(100.0) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = self.mean(self.sides(self.stem(x).relu()).reshape(-1, 4, 16, 100).transpose(1, 2))
        near, far = (distances / 4).chunk(2, 1)
        return torch.cat([(self.grid + far + self.grid - near) / 2, far + near], 1)


class ByConvolution(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(16, 1, 1, bias=False)
        self.weight.data[:] = torch.arange(16.0).reshape(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.softmax(1)).squeeze(1)


class ByProduct(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.numbers = make(torch.arange(16.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).softmax(-1) @ self.numbers


MEANS = [ByConvolution, lambda: ByProduct(nn.Buffer), lambda: ByProduct(nn.Parameter)]


@pytest.mark.parametrize("mean", MEANS, ids=["convolution", "buffer", "parameter"])
def test_means_of_distributions_are_left_float(mean: Any) -> None:
    network = trace_network(Distances(mean()), pictures(INPUT_SHAPE_CHW))
    (node,) = expectations(network.graph)
    assert node.op == "call_module" or node.target is torch.matmul
    assert [name for name in network.kept_float if name.startswith("mean")] == ["mean"] * (node.op == "call_module")
    assert not {"stem", "sides"} & set(network.float_names)


def test_probabilities_that_layers_take_in_the_middle_stay_int8() -> None:
    network = Net(lambda n, x: logits(n, n.conv(n.stem(x).softmax(1))), conv=conv())
    assert expectations(trace_network(network, pictures(INPUT_SHAPE_CHW)).graph) == []


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("mean", MEANS, ids=["convolution", "buffer", "parameter"])
def test_boxes_have_more_than_256_places(backend: str, mean: Any) -> None:
    """On a grid of the largest box they were 0.03 off on average."""
    torch.manual_seed(0)
    network = Distances(mean()).eval()
    x = torch.randn(8, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(0))
    with quantized_engine(backend), torch.no_grad():
        found = to_int8(prepared_on(network, backend), backend=backend)(x)
        assert float((found - network(x)).abs().mean()) < 0.002


def test_complex_numbers_and_what_takes_them_are_left_float() -> None:
    graph = trace_network(build_library_style("transformed"), pictures(INPUT_SHAPE_CHW)).graph
    named = operators_on_other_numbers(graph)
    assert {node.name for node in named} >= {"fft_rfft", "reshape", "transpose", "abs_1"}
    assert not [node for node in named if node.op == "call_module"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_layers_of_other_numbers_stay_float_beside_int8_ones(dtype: torch.dtype) -> None:
    """torch's conversion fails: quantize_tensor_per_channel_affine expects a Float Tensor."""
    network = Net(lambda n, x: logits(n, n.conv(n.stem(x).to(dtype)).float().relu()), conv=conv().to(dtype)).eval()
    traced = trace_network(copy.deepcopy(network), pictures(INPUT_SHAPE_CHW))
    assert [(name, "as float32 (.float())" in why) for name, why in traced.kept_float.items()] == [("conv", True)]
    x = torch.randn(8, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(0))
    with quantized_engine(ENGINES[0]), torch.no_grad():
        expected = network(x)
        int8 = to_int8(prepared_on(network, ENGINES[0]), backend=ENGINES[0])
        assert has_int8_weights(int8.stem)
        assert (int8(x) - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_a_tensor_made_on_the_inputs_device_is_a_constant() -> None:
    graph = trace_network(build_library_style("derived"), pictures(INPUT_SHAPE_CHW)).graph
    assert {node.name for node in operators_on_constants(graph)} >= {"tensor", "expand"}


def test_numbers_and_alpha_are_left_float() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        x = F.relu(2 * x.sigmoid()) + x
        x = torch.add(x, n.conv(x), alpha=2) * x.size(1)
        return logits(n, torch.add(x, x, alpha=1) * x)

    graph = trace_network(Net(body, conv=conv()), pictures(INPUT_SHAPE_CHW)).graph
    assert {node.name for node in operators_converted_wrongly(graph)} == {"mul", "relu_1", "add_1", "mul_1"}


def test_a_batch_norm_behind_another_is_left_float() -> None:
    network = trace_network(with_layer(one=nn.BatchNorm2d(8), two=nn.BatchNorm2d(8)), pictures(INPUT_SHAPE_CHW))
    assert network.float_names == ["two"]


class Masked(nn.Module):
    """Attention of pixels to those in front of them, in a user's own words, and a constant."""

    def __init__(self, limit: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores) -> None:
        super().__init__()
        self.limit, self.query, self.key = limit, nn.Linear(12, 12), nn.Linear(12, 12)
        self.sharpness = nn.Parameter(torch.zeros(1))
        self.softmax = nn.Softmax(-1)
        self.register_buffer("mask", torch.full((12, 12), -torch.inf).triu(1))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        rows_NTD = images_NCHW[:, 0]
        scores_NTT = torch.matmul(self.query(rows_NTD), self.key(rows_NTD).transpose(1, 2)) / 12**0.5
        weights_NTT = self.softmax(self.limit(scores_NTT * self.sharpness.exp()) + self.mask)
        return torch.matmul(weights_NTT, rows_NTD)


def test_what_masks_attention_is_left_float() -> None:
    graph = trace_network(Masked(), pictures(INPUT_SHAPE_CHW)).graph
    assert {node.name for node in masked_softmax(graph)} == {"truediv", "mul", "add", "softmax"}
    assert [node.name for node in operators_on_constants(graph)] == ["exp"]


@pytest.mark.parametrize("tanh", [torch.tanh, lambda x: x.tanh()])
def test_scores_may_be_limited_in_front_of_the_mask(tanh: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = trace_network(Masked(lambda scores: 20 * tanh(scores / 20)), pictures(INPUT_SHAPE_CHW)).graph
    found = {node.name for node in masked_softmax(graph)}
    assert {"tanh", "add", "softmax"} < found and len(found) == 7


def test_a_mask_without_a_product_is_left_float() -> None:
    def body(n: Any, images_NCHW: torch.Tensor) -> torch.Tensor:
        scores_NHW = n.conv(n.stem(images_NCHW))[:, 0]
        mask_NHW = torch.zeros_like(scores_NHW).masked_fill(images_NCHW[:, 0] > 1, -torch.inf)
        return logits(n, n.stem(images_NCHW) * F.softmax(scores_NHW + mask_NHW, -1).unsqueeze(1))

    graph = trace_network(Net(body, conv=conv()), pictures(INPUT_SHAPE_CHW)).graph
    assert {node.name for node in masked_softmax(graph)} == {"masked_fill", "add", "softmax"}


def test_no_range_takes_in_what_hides_scores() -> None:
    graph, x = prepared_on(Masked(), ENGINES[0]), torch.randn(4, *INPUT_SHAPE_CHW)
    assert graph(x).isfinite().all()
    limits = [part.max_val - part.min_val for part in graph.modules() if is_observer(part) and hasattr(part, "min_val")]
    assert len(limits) > 4
    assert all(limit.isfinite().all() for limit in limits)


def test_a_softmax_of_sums_alone_may_be_int8() -> None:
    network = Net(lambda n, x: logits(n, F.softmax(n.conv(n.stem(x)) + n.stem(x), 1)), conv=conv())
    assert masked_softmax(trace_network(network, pictures(INPUT_SHAPE_CHW)).graph) == []


def prepared_on(network: nn.Module, backend: str, *skip: str) -> Any:
    options = {"weights": "per_tensor", "narrow_weights": reduced(backend), "skip": skip, "observer": "min_max"}
    options |= {"inputs": stored_pictures(INPUT_SHAPE_CHW), "backend": backend}
    observed = prepare_static(copy.deepcopy(network), **options, calibrating=True)
    with torch.no_grad():
        observed(torch.randn(2, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(0)))
    standard = prepare_static(network, **options, calibrating=False)
    standard.load_state_dict(observed.state_dict())
    return standard


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_between_int8_layers_stay_float(backend) -> None:
    layers = {"norm": nn.InstanceNorm2d(8), "act": nn.LeakyReLU(), "one": nn.BatchNorm2d(8), "two": nn.BatchNorm2d(8)}
    with quantized_engine(backend), warnings.catch_warnings(action="ignore"):
        int8 = to_int8(prepared_on(with_layer(**layers), backend, "act"), backend=backend)
        types = {name: type(getattr(int8, name)) for name in ("norm", "act", "two")}
        function = to_int8(prepared_on(behind(F.instance_norm)(), backend), backend=backend)
    assert types == {"norm": nn.InstanceNorm2d, "act": nn.LeakyReLU, "two": nn.BatchNorm2d}
    assert function.graph.find_nodes(op="call_function", target=F.instance_norm)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_engine_and_reference_compute_the_users_function(name, backend) -> None:
    network, x = build(name), torch.randn(2, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(0))
    with quantized_engine(backend), warnings.catch_warnings(action="ignore"), torch.no_grad():
        expected = network(x.clone())
        prepared = prepared_on(network, backend)
        reference, _ = reference_network(copy.deepcopy(prepared))
        for found in (to_int8(prepared, backend=backend)(x.clone()), reference(x.clone())):
            assert (found - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_float_operators_are_named_by_their_module() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x.sigmoid()

    reference, _ = reference_network(prepared_on(with_layer(block=Block()), BACKENDS[-1]))
    assert reference.meta["scopes"]["mul"] == "block"


class Tokens(nn.Module):
    """The start of a vision transformer: patches, clamped or not, and a class token of other size."""

    def __init__(self, *, token_first: bool = True, clamped: bool = False) -> None:
        super().__init__()
        self.token_first, self.clamped = token_first, clamped
        self.patches, self.fc = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 5)
        self.token = nn.Parameter(torch.linspace(-9, 9, 16).reshape(1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        parts = [self.token.expand(x.shape[0], -1, -1), tokens.clamp(0, 1) if self.clamped else tokens]
        return self.fc(torch.cat(parts if self.token_first else parts[::-1], 1)).mean(1)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("token_first", [False, True])
@pytest.mark.parametrize("backend", ENGINES)
def test_inputs_of_cat_share_their_grid(backend, token_first, clamped) -> None:
    torch.manual_seed(0)
    network = Tokens(token_first=token_first, clamped=clamped).eval()
    x = torch.randn(2, *INPUT_SHAPE_CHW)
    expected = network(x)
    with quantized_engine(backend), torch.no_grad():
        int8 = to_int8(prepared_on(network, backend), backend=backend)
        with patch("torch.cat", wraps=torch.cat) as cat:
            found = int8(x)
    tensors = cat.call_args.args[0]
    assert len({(tensor.q_scale(), tensor.q_zero_point()) for tensor in tensors}) == 1
    assert (found - expected).square().mean().sqrt() < 0.1 * expected.std()


class NestedTokens(nn.Module):
    """As `Tokens`, with a second token, whose values are larger, in front."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.fc = Tokens(), nn.Linear(16, 5)
        self.tokens.fc = nn.Identity()
        self.second = nn.Parameter(torch.linspace(-30, 30, 16).reshape(1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.tokens.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.tokens.token.expand(x.shape[0], -1, -1), patches], 1)
        return self.fc(torch.cat([self.second.expand(x.shape[0], -1, -1), tokens], 1)).mean(1)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_concatenation_in_another_has_the_grid_of_the_outer_one(backend) -> None:
    torch.manual_seed(0)
    network = NestedTokens().eval()
    x = torch.randn(2, *INPUT_SHAPE_CHW)
    expected = network(x)
    with quantized_engine(backend), torch.no_grad():
        prepared = prepared_on(network, backend)
        reference, _ = reference_network(copy.deepcopy(prepared))
        int8 = to_int8(prepared, backend=backend)
        for found in (int8(x), reference(x)):  # torch warns of inputs on two grids
            assert (found - expected).square().mean().sqrt() < 0.1 * expected.std()
