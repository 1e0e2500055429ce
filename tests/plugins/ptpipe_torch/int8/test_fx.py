"""FX graph mode quantization against torch's public functions. A failure here means that torch has changed them.

The fix is then in `ptpipe_torch/int8` alone, or another implementation of the same kinds.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_torch.int8 import fx
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.observers import static_qconfig

from ....processor import reduced
from ....signatures import pictures


def small_net() -> nn.Module:
    """A traceable CNN for images of 1x8x8."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def prepared(qat: bool) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    graph, scopes = fx.trace(small_net().eval(), pictures((1, 8, 8)))
    public = torch.ao.quantization.get_default_qat_qconfig if qat else torch.ao.quantization.get_default_qconfig
    with warnings.catch_warnings(action="ignore"):  # torch's own defaults are deprecated
        qconfig = public("fbgemm")
        mapping = fx.qconfig_mapping("fbgemm", qconfig, qconfig, is_qat=qat)
        return fx.add_observers(graph, scopes, mapping, is_qat=qat)


@pytest.mark.parametrize("qat", [True, False])
def test_the_result_equals_that_of_torchs_public_functions(qat) -> None:
    from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping, quantize_fx

    ours = prepared(qat)
    torch.manual_seed(0)
    graph, _ = fx.trace(small_net().eval(), pictures((1, 8, 8)))
    with warnings.catch_warnings(action="ignore"):
        prepare = quantize_fx.prepare_qat_fx if qat else quantize_fx.prepare_fx
        mapping = get_default_qat_qconfig_mapping("fbgemm") if qat else get_default_qconfig_mapping("fbgemm")
        theirs = prepare(graph.train(qat), mapping, (torch.zeros(1, 1, 8, 8),))
        x = torch.randn(32, 1, 8, 8)
        with torch.no_grad():
            assert torch.equal(ours(x), theirs(x))
        assert ours.code == theirs.code
        public = quantize_fx.convert_fx(theirs.eval())
        converted = fx.convert(ours)
        use_parameters_like(converted, public)
    assert converted.code == public.code
    assert torch.equal(converted(x), public(x))


def use_parameters_like(converted: nn.Module, public: nn.Module) -> None:
    """All that our conversion changes: each bias by some thousandths of a step."""
    for name, layer in public.named_modules():
        if has_int8_weights(layer):
            own = converted.get_submodule(name)
            torch.testing.assert_close(own.bias(), layer.bias(), rtol=0, atol=layer.scale / 50)
            assert torch.equal(own.weight().dequantize(), layer.weight().dequantize())
            layer.set_weight_bias(own.weight(), own.bias())


class WideAndDeep(nn.Module):
    """A layer with batch norm and ReLU whose output is put beside the network's input."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.cat([x, self.deep(x)], 1))


def test_relu_behind_the_batch_norm_of_a_linear_layer_is_kept() -> None:
    torch.manual_seed(0)
    network, x = WideAndDeep(), torch.randn(64, 4)
    network(x)
    expected = network.eval()(x)
    graph, scopes = fx.trace(network, pictures((4,)))
    qconfig = static_qconfig("min_max", per_channel=True, narrow_weights=reduced("fbgemm"))
    mapping = fx.qconfig_mapping("fbgemm", qconfig, qconfig, is_qat=False)
    with torch.no_grad(), quantized_engine("fbgemm"):
        observed = fx.add_observers(graph, scopes, mapping, is_qat=False)
        observed(x)
        int8 = fx.convert(observed)
        found = int8(x)
    assert type(int8.get_submodule("deep.0")) is torch.ao.nn.intrinsic.quantized.LinearReLU
    assert has_int8_weights(int8.head)
    assert (found - expected).square().mean().sqrt() < 0.03 * expected.std()


def prepared_for_qat(network: nn.Module) -> torch.fx.GraphModule:
    graph, scopes = fx.trace(network.eval(), pictures((8, 8, 8)))
    with warnings.catch_warnings(action="ignore"):
        qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        return fx.add_observers(graph, scopes, fx.qconfig_mapping("fbgemm", qconfig, qconfig, is_qat=True), is_qat=True)


def test_layers_inside_a_module_that_is_called_as_a_whole_stay_float() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False
    )
    graph = prepared_for_qat(nn.Sequential(nn.Linear(8, 8), encoder, nn.Linear(8, 10)))
    inside = [layer for layer in graph.get_submodule("1").modules() if isinstance(layer, nn.Linear)]
    assert not any(hasattr(layer, "weight_fake_quant") for layer in inside)
    assert all(type(graph.get_submodule(name)) is torch.ao.nn.qat.Linear for name in ("0", "2"))


def test_tracing_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys, torch\nfrom torch import nn\nfrom ptpipe_quant.transforms import prepare_static, to_int8\n"
        "net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))\n"
        "images = dict(name='images', dtype='float32', shape=['batch', 1, 4, 4])\n"
        "options = dict(inputs=[images], skip=())\n"
        "options |= dict(backend='fbgemm', observer='min_max', weights='per_channel')\n"
        "to_int8(prepare_static(net, **options, calibrating=False), backend='fbgemm')\n"
        "print([name for name in ('torch._dynamo.convert_frame', 'torch._inductor.compile_fx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")  # and there is no warning
