"""Run an int8 network and record its quantized tensors, to compare them with a reference network's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_torch.int8.layer_parity import quantize_nodes, source_nodes


class Int8Recorder(Interpreter):
    """Runs an int8 network and records its quantized tensors as integers, by quantize node of the reference network."""

    def __init__(self, int8: GraphModule, reference: GraphModule) -> None:
        super().__init__(int8)
        self.found: dict[str, torch.Tensor] = {}
        self._candidates: dict[str, list[Node]] = defaultdict(list)
        for quantize in quantize_nodes(reference):
            for source in source_nodes(quantize, reference):
                self._candidates[source.name].append(quantize)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        quantize = self._quantize_node(n) if isinstance(result, torch.Tensor) and result.is_quantized else None
        if quantize is None:
            return result
        _, scale, zero_point, *_ = cast(Any, quantize.args)
        if (result.q_scale(), result.q_zero_point()) != (scale, zero_point):  # as torch adds a number to a tensor
            self.found[quantize.name] = result.dequantize() / scale + zero_point
        else:
            self.found[quantize.name] = result.int_repr()
        return result

    def _quantize_node(self, n: Node) -> Node | None:
        # Nodes that conversion made have the name of the prepared network's node as their stack trace.
        if n.target is not torch.quantize_per_tensor:
            return next(iter(self._candidates[n.stack_trace or ""]), None)
        source = n.all_input_nodes[0]
        while source.target == "dequantize":  # a second grid
            source = source.all_input_nodes[0]
        # A tensor may be quantized for each of its readers: in the same order in both networks.
        left = [node for node in self._candidates[source.stack_trace or ""] if node.name not in self.found]
        return next(iter(left), None)
