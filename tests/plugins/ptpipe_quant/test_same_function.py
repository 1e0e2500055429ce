"""Each ordinary spelling stays the same function: prepared, trained, and up to rounding in int8."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ptpipe_quant.transforms import prepare_qat, prepare_static, to_int8
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import float_network

from ...signatures import stored_pictures
from .conftest import BACKENDS
from .functional import NETWORKS as FUNCTIONAL
from .functional import build as build_functional
from .library_styles import NETWORKS as LIBRARY_STYLES
from .library_styles import build as build_library_style
from .spellings import INPUT_SHAPE_CHW, NETWORKS
from .spellings import build as build_spelling

ENGINES = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]


def build(name: str) -> torch.nn.Module:
    if name in LIBRARY_STYLES:
        return build_library_style(name)
    return (build_functional if name in FUNCTIONAL else build_spelling)(name)


def scheme(backend: str) -> dict[str, Any]:
    options = {"weights": "per_channel", "narrow_weights": backend == "fbgemm", "skip": ()}
    return {"inputs": stored_pictures(INPUT_SHAPE_CHW), "backend": backend, **options}


def images(num: int = 6) -> torch.Tensor:
    return torch.randn(num, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(1))


def rounding(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root of the mean square of the difference, relative to the logits' spread."""
    return float((found - expected).square().mean().sqrt() / expected.std())


def unrounded(graph: Any) -> Any:
    """A copy of a QAT graph without fake quantization."""
    graph = float_network(copy.deepcopy(graph))
    for layer in [layer for layer in graph.modules() if hasattr(layer, "weight_fake_quant")]:
        layer.weight_fake_quant = torch.nn.Identity()
    return graph.eval()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)  # of the old weight norm
        warnings.filterwarnings("ignore", "Using padding='same'", UserWarning)
        yield


def converted(prepared: Any, backend: str, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return to_int8(prepared, backend=backend)(x)


@pytest.mark.sampled(2)  # the other half is trained below
@pytest.mark.parametrize("name", [*NETWORKS, *FUNCTIONAL, *LIBRARY_STYLES])
def test_static(name) -> None:
    network, x = build(name), images()
    expected = network(x.clone())
    for backend in ENGINES:
        with quantized_engine(backend):
            options = {**scheme(backend), "observer": "min_max"}
            observed = prepare_static(copy.deepcopy(network), **options, calibrating=True)
            torch.testing.assert_close(observed(x.clone()), expected, rtol=1e-4, atol=1e-4)
            standard = prepare_static(copy.deepcopy(network), **options, calibrating=False)
            standard.load_state_dict(observed.state_dict())
            assert rounding(converted(standard, backend, x.clone()), expected) < 0.1, backend


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("name", [*NETWORKS, *FUNCTIONAL, *LIBRARY_STYLES])
def test_qat(name) -> None:
    network, x = build(name), images()
    expected = network(x.clone())
    backend = ENGINES[-1]
    for batch_norm in ("fold", "train"):
        options = {**scheme(backend), "batch_norm": batch_norm}
        with quantized_engine(backend):
            graph = prepare_qat(copy.deepcopy(network), **options, freeze_at=1.0)
            torch.testing.assert_close(unrounded(graph)(x.clone()), expected, rtol=1e-4, atol=1e-4)
            with torch.enable_grad():
                F.cross_entropy(graph.train()(x.clone()), torch.arange(len(x)) % 5).backward()
            trained = graph.eval()(x.clone())
            standard = prepare_qat(copy.deepcopy(network), **options, freeze_at=None)
            standard.load_state_dict(graph.state_dict())
            assert rounding(converted(standard, backend, x.clone()), trained) < 0.12, batch_norm


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*NETWORKS, *FUNCTIONAL, *LIBRARY_STYLES])
def test_qat_reads_nothing_back_from_an_accelerator(name, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the device is slow there, and can't be captured as a CUDA graph. Meta tensors have no values."""
    for operator in ("fake_quantize_per_tensor_affine", "fused_moving_avg_obs_fake_quant"):  # without a meta kernel
        monkeypatch.setattr(torch, operator, lambda x, *_, **__: x.clone())
    options = {**scheme(ENGINES[-1]), "batch_norm": "train", "freeze_at": 1.0}
    for learned_step_size in (False, True):
        graph = prepare_qat(build(name), **options, learned_step_size=learned_step_size).to("meta").train()
        with torch.enable_grad():
            graph(images().to("meta")).sum().backward()
