"""What is used of torch.ao, held against its public functions. A failure here means that torch has moved it.

The remedy is then in `ptpipe_quant/torch_ao.py` alone, or another route behind the same kinds.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ptpipe_quant
from ptpipe_quant import torch_ao
from ptpipe_quant.network import as_graph
from ptpipe_torch.runtime import quantized_engine

from .conftest import small_net

ROOM = Path(ptpipe_quant.__file__).parent


def prepared(qat: bool) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    graph, scopes = as_graph(small_net())
    public = torch.ao.quantization.get_default_qat_qconfig if qat else torch.ao.quantization.get_default_qconfig
    with warnings.catch_warnings(action="ignore"):  # torch's own defaults warn of themselves
        qconfig = public("fbgemm")
        mapping = torch_ao.qconfig_mapping("fbgemm", qconfig, qconfig, is_qat=qat)
        return torch_ao.add_observers(graph, scopes, mapping, is_qat=qat)


@pytest.mark.parametrize("qat", [True, False])
def test_the_route_gives_what_torchs_public_functions_give(qat) -> None:
    from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping, quantize_fx

    mine = prepared(qat)
    torch.manual_seed(0)
    graph, _ = as_graph(small_net())
    with warnings.catch_warnings(action="ignore"):
        prepare = quantize_fx.prepare_qat_fx if qat else quantize_fx.prepare_fx
        mapping = get_default_qat_qconfig_mapping("fbgemm") if qat else get_default_qconfig_mapping("fbgemm")
        theirs = prepare(graph.train(qat), mapping, (torch.zeros(1, 1, 8, 8),))
        x = torch.randn(32, 1, 8, 8)
        with torch.no_grad():
            assert torch.equal(mine(x), theirs(x))
        assert mine.code == theirs.code
        public = quantize_fx.convert_fx(theirs.eval())
        converted = torch_ao.convert(mine)
    assert converted.code == public.code
    assert torch.equal(converted(x), public(x))


def test_tracing_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys, torch\nfrom torch import nn\nfrom ptpipe_quant.parts import prepare_static, to_int8\n"
        "net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))\n"
        "options = dict(backend='fbgemm', observer='min_max', weights='per_channel', reduce_range=False, skip=())\n"
        "to_int8(prepare_static(net, **options, calibrating=False), backend='fbgemm')\n"
        "print([name for name in ('torch._dynamo.convert_frame', 'torch._inductor.compile_fx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")  # nor does it warn anybody


def test_one_file_imports_torch_ao() -> None:
    def imports(path: Path) -> set[str]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        return {*names, *(node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))}

    users = {path.name for path in ROOM.rglob("*.py") if any(name.startswith("torch.ao") for name in imports(path))}
    assert users == {"torch_ao.py"}


def test_layers_of_both_kinds_are_known() -> None:
    relus = {type_.__name__: relu for type_, relu in torch_ao._QAT_LAYERS.items()}
    expected = {
        f"{name}{n}d": "ReLU" in name for name in ("Conv", "ConvReLU", "ConvBn", "ConvBnReLU") for n in (1, 2, 3)
    }
    assert relus.items() >= (expected | {"Linear": False, "LinearReLU": True, "LinearBn1d": False}).items() - {
        ("ConvReLU1d", True)  # not in every release
    }


@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_as_integers(per_channel) -> None:
    weight = torch.randn(6, 3, 3, 3)
    quantized = torch_ao.int8_weight(weight, per_channel=per_channel, axis=1)
    limits = weight.abs().amax((0, 2, 3)) if per_channel else weight.abs().amax().repeat(3)
    step = (limits / 127.5).reshape(1, 3, 1, 1)
    expected = (weight / step).round().clamp(-128, 127)
    assert (quantized.int_repr() - expected).abs().max() <= 1  # torch multiplies by 1 / step: ties may fall otherwise
    assert (quantized.int_repr() == expected).float().mean() > 0.95
    torch.testing.assert_close(quantized.dequantize(), quantized.int_repr() * step)


def test_a_dynamic_layer_uses_all_of_8_bits() -> None:
    torch.manual_seed(0)
    x, linear = torch.rand(64, 200) * 3, nn.Linear(200, 5)
    errors = []
    for reduce_range in (False, True):
        net = torch_ao.swap_dynamic_linears(
            nn.Sequential(nn.Linear(200, 5)), [], per_channel=True, reduce_range=reduce_range
        )
        net.load_state_dict({f"0.{name}": value for name, value in linear.state_dict().items()})
        torch_ao.swap_dynamic_linears(net, ["0"], per_channel=True, reduce_range=reduce_range)
        with quantized_engine("fbgemm"):
            exact = nn.functional.linear(x, net[0].weight().dequantize(), linear.bias)
            errors.append((net(x) - exact).pow(2).mean().sqrt().item())
    assert errors[0] < 0.7 * errors[1]
