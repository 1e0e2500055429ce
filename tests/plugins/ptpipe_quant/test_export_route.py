"""`route: export`: networks that torch.export traces, in static quantization and QAT.

Shape legend: N images, T tokens, K classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_quant.trace import trace_network
from ptpipe_torch import BATCH, Data, Model, TensorSpec, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.tracer import SOURCE_LINE
from ptpipe_torch.torchvision_compat import torchvision

from ... import networks
from ...processor import reduced
from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model, mixed_net, small_net, train

TARGETS = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]
IMAGES = [TensorSpec("images", "float32", (BATCH, 1, 8, 8))]


class Checked(nn.Module):
    """Counts elements of whole batches, which FX's proxies can't, and sizes with Python."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8 * 16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 10**6:
            raise ValueError("too many images")
        x = self.stem(x).relu_()
        for block in self.blocks:
            x = x + torch.relu(block(x))
        x = torch.nn.functional.max_pool2d(x, 2)[:, :, :, 0:4]
        assert np.prod(tuple(x.shape[1:])) == 8 * 16
        return self.head(self.dropout(x.flatten(1)))


@builder
def checked_net() -> nn.Module:
    """What its name says."""
    return Checked()


def with_statistics(model: Model, data: Data) -> Model:
    """The model with batch norms that know the images."""
    module = model.build().train()
    with torch.no_grad():
        for batch in data.batches("train", batch_size=200):
            module(batch.inputs["images"])
    return model.with_state_dict_of(module)


def static(model: Model, data: Data, ctx: Any, backend: str, route: str) -> Model:
    config = PrepareConfig.model_validate({"backend": backend, "route": route, "reduce_range": reduced(backend)})
    calibrated = calibrate(CalibrateConfig(split="train", num_samples=400), ctx, prepare(config, ctx, model), data)
    return convert(ConvertConfig(), ctx, calibrated.model)


def num_int8(model: Model) -> int:
    with quantized_engine(model.recipe.backend):
        return sum(has_int8_weights(layer) for layer in model.build().modules())


@pytest.mark.parametrize("build", [small_net, mixed_net, checked_net])
def test_the_graph_is_the_same_function(build: Callable[[], nn.Module]) -> None:
    module = build().eval()
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(x)
        network = trace_network(module, IMAGES, route="export")
        torch.testing.assert_close(network.graph(x), expected, rtol=1e-5, atol=1e-5)


def test_layers_keep_their_names_and_lines() -> None:
    network = trace_network(checked_net().eval(), IMAGES, route="export")
    layers = dict(network.graph.named_modules())
    names = {"stem.0": nn.Conv2d, "stem.1": nn.BatchNorm2d, "blocks.1": nn.Conv2d, "head": nn.Linear}
    assert {name: type(layers[name]) for name in names} == names
    (head,) = (node for node in network.graph.graph.nodes if node.target == "head")
    assert network.scopes[head.name] == ("head", nn.Linear)
    assert head.meta[SOURCE_LINE].endswith("`return self.head(self.dropout(x.flatten(1)))`")
    assert "test_export_route.py" in head.meta[SOURCE_LINE]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", TARGETS)
def test_static_int8_is_that_of_the_other_route(digits, ctx, backend) -> None:
    model = with_statistics(make_model(mixed_net), digits)
    by_fx, exported = (static(model, digits, ctx, backend, route) for route in ("fx", "export"))
    assert num_int8(by_fx) == num_int8(exported) > 5
    one_NK, other_NK = logits_of(by_fx, digits, 200), logits_of(exported, digits, 200)
    assert np.abs(one_NK - other_NK).max() <= 0.05 * np.ptp(one_NK)
    assert np.mean(one_NK.argmax(1) == other_NK.argmax(1)) >= 0.97


@pytest.mark.parametrize("backend", TARGETS)
def test_a_network_that_fx_cannot_trace(digits, ctx, backend) -> None:
    model = with_statistics(make_model(checked_net), digits)
    with pytest.raises(StageError, match=r"x\.numel\(\) > 10.*\(route: export\)"):
        prepare(PrepareConfig.model_validate({"backend": backend}), ctx, model)
    int8 = static(model, digits, ctx, backend, "export")
    assert num_int8(int8) == 4
    float_NK, int8_NK = logits_of(model, digits, 200), logits_of(int8, digits, 200)
    assert np.sqrt(np.square(float_NK - int8_NK).mean()) < 0.1 * float_NK.std()


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linspace": lambda x: torch.linspace(-1, 1, 8).view(1, 1, 8, 1).expand(x.shape[0], 1, 8, 8),
    "ones": lambda x: torch.ones(8).expand(x.shape[0], 1, 8, 8),
    "coordinates": lambda x: (
        torch.stack(torch.meshgrid(torch.linspace(-1, 1, x.shape[2]), torch.zeros(8)), 2)
        .sum(2)[None, None]
        .repeat(x.shape[0], 1, 1, 1)
    ),
    "zeros": lambda x: torch.cat([torch.zeros(x.shape[0], 1, 8, 4), x[:, :1, :, :4]], 3),
    "full": lambda x: torch.full((x.shape[0], 1, 8, 8), 0.5),
}


class Joining(nn.Module):
    """Concatenates a tensor that is made of numbers and sizes."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.made, self.stem, self.last = MADE[made], nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(9, 4, 3)
        self.head = nn.Linear(4 * 36, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([torch.relu(self.stem(x)), self.made(x)], 1)
        return self.head(self.last(joined).flatten(1))


@builder
def joining(*, made: str) -> nn.Module:
    """What its name says."""
    return Joining(made)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("route", ["fx", "export"])
def test_tensors_made_of_numbers_can_be_concatenated(digits, ctx, made, route) -> None:
    model = make_model(joining, made=made)
    int8 = static(model, digits, ctx, BACKENDS[0], route)
    assert num_int8(int8) == 3
    expected, found = logits_of(model, digits), logits_of(int8, digits)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("batch_norm", ["fold", "train"])
def test_it_trains(digits, ctx, batch_norm) -> None:
    config = PrepareQatConfig.model_validate({"route": "export", "batch_norm": batch_norm})
    prepared = prepare_qat(config, ctx, make_model(checked_net))
    graph = prepared.build_prepared().train()
    x = torch.randn(4, 1, 8, 8)
    assert not torch.equal(graph(x), graph(x)), "dropout"
    tuned = train(prepared, digits, lr=0.01)
    int8 = convert(ConvertConfig(), ctx, tuned)
    assert num_int8(int8) == 4
    tuned_NK, int8_NK = logits_of(tuned, digits, 200), logits_of(int8, digits, 200)
    assert np.mean(tuned_NK.argmax(1) == int8_NK.argmax(1)) >= 0.97


def test_skipped_layers_stay_float(digits, ctx) -> None:
    options = {"route": "export", "skip": ["blocks.*", "Linear"]}
    prepared = prepare(PrepareConfig.model_validate(options), ctx, with_statistics(make_model(checked_net), digits))
    calibrated = calibrate(CalibrateConfig(split="train", num_samples=200), ctx, prepared, digits).model
    assert num_int8(convert(ConvertConfig(), ctx, calibrated)) == 1


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * int(x.sum() > 0)


class Looping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.sum())):
            x = -x
        return x


class Leaving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1)


VALUES = r"\(it depends on the values of a tensor\)\. No route traces .* torch\.where, .* or take route: fx"


@pytest.mark.parametrize(
    ("layer", "line", "message"),
    [
        (Counting, "return x * int(x.sum() > 0)", VALUES),
        (Looping, "for _ in range(int(x.sum())):", VALUES),
        (Leaving, "return torch.from_numpy(x.numpy() + 1)", r"\(.*numpy.*\)\. Write it otherwise, or take route: fx"),
    ],
)
def test_what_torch_export_cannot_trace_is_named(
    capfd: pytest.CaptureFixture[str], layer: type[nn.Module], line: str, message: str
) -> None:
    place = rf"^torch\.export can't trace \S*test_export_route\.py:\d+: `{re.escape(line)}`"
    for network, where in ((nn.Sequential(nn.Identity(), layer()), " in 1"), (layer(), "")):
        with pytest.raises(StageError, match=rf"{place}{where} {message}") as raised:
            trace_network(network.eval(), IMAGES, route="export")
        assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == "", "torch prints the graph"


@pytest.mark.parametrize("layer", [Counting, Looping])
def test_nobody_is_sent_to_it_in_vain(layer: type[nn.Module]) -> None:
    with pytest.raises(StageError, match=r"torch\.where, .* skip: \[1\]") as raised:
        trace_network(nn.Sequential(nn.Identity(), layer()).eval(), IMAGES)
    assert "route: export" not in str(raised.value)


class Condition(nn.Module):
    def __init__(self, condition: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.condition(x) else -x


@pytest.mark.parametrize(
    "condition",
    [lambda x: x.shape[0] > 1, lambda x: int(x.shape[0]) > 1, lambda x: x.numel() > 64],
    ids=["size", "int of a size", "numel"],
)
def test_it_is_advised_where_a_branch_depends_on_sizes_alone(condition: Callable[[torch.Tensor], Any]) -> None:
    network = nn.Sequential(Condition(condition)).eval()
    with pytest.raises(StageError, match=r"Let torch\.export trace it \(route: export\)"):
        trace_network(network, IMAGES)
    trace_network(network, IMAGES, route="export")


@pytest.mark.parametrize(
    "condition",
    [lambda x: x.sum().item() > 0, lambda x: x[0, 0, 0].tolist()[0] > 0, lambda x: float(x.max()) > 0],
    ids=["item", "list", "float"],
)
def test_a_number_that_was_read_from_a_tensor_is_a_value(condition: Callable[[torch.Tensor], Any]) -> None:
    for route in ("fx", "export"):
        with pytest.raises(StageError, match=r"\(it depends on the values of a tensor\)\. No route traces"):
            trace_network(nn.Sequential(Condition(condition)).eval(), IMAGES, route=route)


def test_a_network_of_transformers() -> None:
    pytest.importorskip("transformers")
    torchvision()  # transformers imports it, beside a torch without CUDA too
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    module = transformers.BertForSequenceClassification(config).eval()
    tokens = TensorSpec("input_ids", "int64", (BATCH, "length"))
    ids_NT = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(ids_NT).logits
        network = trace_network(module, [tokens], route="export")
        torch.testing.assert_close(network.graph(ids_NT)["logits"], expected, rtol=1e-4, atol=1e-5)
    linear = [name for name, layer in network.graph.named_modules() if type(layer) is nn.Linear]
    assert "bert.encoder.layer.1.attention.self.query" in linear and len(linear) == 14


@pytest.mark.parametrize("factor", ["", "4*"])
def test_pictures_of_any_size_are_traced(factor: str) -> None:
    torch.manual_seed(0)
    network = networks.Joining(1).eval()
    spec = TensorSpec("images", "float32", (BATCH, 1, f"{factor}height", f"{factor}width"))
    traced = trace_network(network, [spec], route="export").graph
    for height, width in ((32, 48), (100, 20), (8, 8)) if factor else ((33, 48), (101, 20), (64, 64)):
        images = torch.randn(2, 1, height, width)
        with torch.no_grad():
            torch.testing.assert_close(traced(images), network(images))
