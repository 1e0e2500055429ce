"""Which operators must stay float."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ptpipe_quant.float_nodes import operators_on_integers
from ptpipe_quant.trace import trace_network

from .spellings import INPUT_SHAPE_CHW, Net, conv, logits


def test_integers_are_followed_back_to_the_last_layer() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(n.stem(x) + 1)
        best = (2 * x).argmax(1, keepdim=True)
        return logits(n, n.conv(x * 3).gather(1, best).expand(-1, 8, -1, -1))

    graph = trace_network(Net(body, conv=conv()), INPUT_SHAPE_CHW).graph
    names = {node.name for node in operators_on_integers(graph)}
    assert names == {"add", "relu_1", "mul", "argmax", "gather"}


def test_a_network_without_integers_has_none() -> None:
    network = Net(lambda n, x: logits(n, F.relu(n.stem(x)) + 1))
    assert operators_on_integers(trace_network(network, INPUT_SHAPE_CHW).graph) == []
