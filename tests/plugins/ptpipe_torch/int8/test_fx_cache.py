from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from ptpipe_quant import parts
from ptpipe_quant.torch_ao import quietly

pytestmark = pytest.mark.filterwarnings("ignore:.*must run observer:UserWarning")


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).eval()


@pytest.mark.parametrize("is_converted", [False, True])
def test_torch_ao_keeps_no_network_alive(is_converted: bool) -> None:
    options = {"backend": "fbgemm", "weights": "per_channel", "reduce_range": True, "skip": ()}
    with quietly(), torch.no_grad():
        prepared = parts.prepare_static(network(), observer="min_max", calibrating=False, **options)
        prepared(torch.zeros(1, 1, 4, 4))
        references = [weakref.ref(prepared)]
        if is_converted:
            references.append(weakref.ref(parts.to_int8(prepared, backend="fbgemm")))
        del prepared
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
