"""Observers that are made as copies of one: no other than those that torch would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_quant.fake_quant import qat_qconfig
from ptpipe_torch.int8 import fx
from ptpipe_torch.int8.observers import is_observer, static_qconfig

from ....signatures import pictures


class Net(nn.Module):
    """Layers that torch swaps for QAT, a concatenation whose inputs share an observer, and a fixed range."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.one(x), self.two(x)], 1)
        return self.head((y * y.sigmoid()).mean((2, 3)))


QCONFIGS = {
    "min_max": lambda: static_qconfig("min_max", per_channel=True),
    "mse": lambda: static_qconfig("mse", per_channel=False),
    "percentile": lambda: static_qconfig("percentile", per_channel=True, percentile=99.0),
    "qat": lambda: qat_qconfig(per_channel=True, freeze_at=0.5),
    "learned step size": lambda: qat_qconfig(per_channel=True, freeze_at=0.5, learned_step_size=True),
}


def prepared(qconfig: Any, dtype: torch.dtype, *, is_qat: bool) -> GraphModule:
    torch.manual_seed(0)
    graph, scopes = fx.trace(Net().to(dtype).eval(), pictures((3, 8, 8)))
    return fx.add_observers(graph, scopes, fx.qconfig_mapping("fbgemm", qconfig, qconfig, is_qat=is_qat), is_qat=is_qat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", QCONFIGS)
def test_copies_are_what_torch_would_make(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    is_qat = name in {"qat", "learned step size"}
    ours = prepared(QCONFIGS[name](), dtype, is_qat=is_qat)
    monkeypatch.setattr(fx, "insert_by_copying", lambda insert: insert())
    made = prepared(QCONFIGS[name](), dtype, is_qat=is_qat)
    assert ours.code == made.code
    parts, theirs = dict(ours.named_modules()), dict(made.named_modules())
    assert parts.keys() == theirs.keys()
    assert list(map(str, parts.values())) == list(map(str, theirs.values()))
    for path, part in parts.items():
        assert part.training is theirs[path].training
        plain = {key for key in part.__dict__ if not key.startswith("_")} if is_observer(part) else set()
        assert all(part.__dict__[key] == theirs[path].__dict__[key] for key in plain if key != "qconfig")
    x = torch.randn(5, 3, 8, 8, dtype=dtype)
    for network in (ours, made):
        torch.manual_seed(1)
        network(x)
    state, expected = ours.state_dict(), made.state_dict()
    assert state.keys() == expected.keys()
    for key, value in state.items():
        assert torch.equal(value, expected[key]) and value.dtype is expected[key].dtype, key


@pytest.mark.parametrize("name", QCONFIGS)
def test_no_two_observers_share_a_state(name: str) -> None:
    network = prepared(QCONFIGS[name](), torch.float32, is_qat=name in {"qat", "learned step size"})
    observers = [part for part in network.children() if is_observer(part)]
    observers += [part.weight_fake_quant for part in network.modules() if hasattr(part, "weight_fake_quant")]
    assert len(observers) > 4
    owned: set[int] = set()
    for observer in dict.fromkeys(observers):
        own = {id(part) for part in observer.modules()} | {id(part.__dict__["_buffers"]) for part in observer.modules()}
        own |= {tensor.data_ptr() for tensor in (*observer.parameters(), *observer.buffers()) if tensor.numel()}
        assert owned.isdisjoint(own)
        owned |= own
