"""A thin part of the table of networks that `benchmarks/networks.py` makes: none ends in an exception.

The others are thorough, torchvision's aside: `benchmarks/networks.py` runs those.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ptpipe_torch.int8.engine import supported_engines

from ...processor import ONNX_RUNTIME

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def networks() -> Iterator[Any]:
    """The script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("networks")
        for name in ("networks", "network_list"):
            sys.modules.pop(name, None)


SMALL = ("small_cnn", "small_unet", "mlp", "text_transformer", "text_lstm")
SPELLINGS = (
    *("functional linear", "functional matmul", "functional convolution", "functional, packed"),
    *("functional, normalized", "keywords", "view", "branches on shapes", "padding reflect", "padding replicate"),
    *("padding circular", "padding same", "shared layer", "weight norm", "outputs in a tuple", "outputs in a dict"),
    *("MultiheadAttention", "TransformerEncoderLayer", "LSTM", "GRU"),
)
THIN = [
    ("small_cnn", "static", "fbgemm"),
    ("small_unet", "qat", "fbgemm"),
    ("text_transformer", "qat", "qnnpack"),
    ("text_lstm", "dynamic", "fbgemm"),
    ("functional, packed", "static", "fbgemm"),
    ("MultiheadAttention", "static", "qnnpack"),
    ("TransformerEncoderLayer", "dynamic", "qnnpack"),
    ("GRU", "dynamic", "qnnpack"),
    ("shared layer", "qat", "qnnpack"),
    ("squeezenet1_1", "static", "qnnpack"),
]
OTHERS = [
    (name, variant, backend)
    for variant in ("static", "qat", "dynamic")
    for backend in ("fbgemm", "qnnpack")
    for name in (*SMALL, *SPELLINGS)
    if (name, variant, backend) not in THIN
]


def test_the_list_is_the_scripts(networks) -> None:
    assert {*SMALL, *SPELLINGS} == {
        name for name, network in networks.NETWORKS.items() if network.family in ("spellings", "ptpipe's own")
    }


@pytest.mark.parametrize(
    ("name", "variant", "backend"), [*THIN, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)]
)
def test_a_network_goes_the_whole_way(name, variant, backend, networks) -> None:
    if backend not in supported_engines():
        pytest.skip(f"no {backend} here")
    if name == "MultiheadAttention" and variant != "dynamic" and Version("1.32") > ONNX_RUNTIME:
        pytest.skip("this ONNX Runtime averages the attention weights otherwise: docs/networks.md")
    row = networks.run_here(networks.Row(name, variant, backend), measures_latency=False)
    if variant == "dynamic" and row.result == "refused":
        assert "no layer of this network can be quantized" in row.message
    else:
        assert (row.result, row.message) == ("works", "")
        # Without a linear or recurrent layer, weights are stored as int8, and nothing more.
        assert row.int8_layers > 0 or (variant == "dynamic" and row.size_ratio < 0.3)
