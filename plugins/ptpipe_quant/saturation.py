"""Layers whose int8 kernel adds products in 16 bits on every x86 processor, also with VNNI.

fbgemm's kernels for depthwise 3x3, 5x5 and 7x7 convolutions in 2 or 3 dimensions add two products of an unsigned and
a signed byte with `vpmaddubsw`, which saturates. torch's `x86` runs them on fbgemm too, from 101 groups on; oneDNN and
qnnpack add in 32 bits (torch 2.13: `tests/plugins/ptpipe_torch/int8/test_engine.py`). Weights of -64 to 64 can't
overflow: 2 * 255 * 64 = 32,640 < 2^15. Why weights and not activations: `pipeline/decisions/0010-depthwise-weights.md`.
"""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

_KERNEL_SIZES = {3, 5, 7}


def saturating_layers(graph: GraphModule, backend: str) -> list[str]:
    """Return the names of the layers of a traced network that may overflow on this backend with 8-bit weights."""
    if backend not in ("fbgemm", "x86"):
        return []
    targets = dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "call_module")
    return [name for name in targets if _saturates(graph.get_submodule(name))]


def _saturates(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d | nn.Conv3d)
        and layer.groups == layer.in_channels > 1
        and set(layer.kernel_size) <= _KERNEL_SIZES
    )
