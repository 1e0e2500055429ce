"""Rank layers by the noise that rounding them makes in the network's outputs, and find what to skip for each.

To keep a layer's weights float, skip it. Its output is still rounded where the next layer takes int8 inputs: to keep
that float too, skip the layer, those that read it, and what lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.analysis.measuring import Measurement
from ptpipe_quant.analysis.rounded_network import RoundedLayer, RoundedNetwork, Rounding
from ptpipe_quant.attention import layer_types
from ptpipe_quant.tuning.trials import Choice
from ptpipe_torch import Batch, Data, Model


def ranked_skips(network: RoundedNetwork, model: Model, data: Data, batches: Iterable[Batch]) -> list[tuple[str, ...]]:
    """Return what to skip for each layer, the noisiest first. `model`: the float one, whose modules are named."""
    layers = network.layers
    roundings = [Rounding([layer]) for layer in layers] + [Rounding((), [layer]) for layer in layers]
    measurement = Measurement(network, data.info.task, model.signature, roundings)
    measurement.run(batches, lambda _: None)
    noises = [record.noise for record in measurement.rounded]
    modules = set(layer_types(model.build()))
    found = []
    for layer, of_weights, of_output in zip(layers, noises, noises[len(layers) :], strict=False):
        own = _known(layer.node, network.graph, modules)
        around = _known_all(_around(layer), network.graph, modules)
        skip = around if of_output > of_weights else own
        if skip:
            found.append((max(of_weights, of_output), skip))
    return [skip for _, skip in sorted(found, key=lambda item: -item[0])]


def choices_of(first: Choice, skips: Sequence[tuple[str, ...]], is_per_channel_next: bool) -> list[Choice]:
    """Return the choices to try: each is the one before and one thing more, the cheapest first, then by rank.

    `is_per_channel_next`: whether weights with a scale for each channel, which cost nothing, may be tried.
    """
    choices = [first]
    if is_per_channel_next:
        choices.append(Choice("per_channel", first.skip))
    for skip in skips:
        last = choices[-1]
        added = [name for name in skip if name not in last.skip]
        if added:
            choices.append(Choice(last.weights, (*last.skip, *added)))
    return choices


def _around(layer: RoundedLayer) -> Iterator[Node]:
    """Yield the layer's node, what reads its output, and what lies between."""
    seen, waiting = {layer.node}, [*(layer.outputs), layer.node]
    passing = {node for output in layer.passed_on for node in (output, output.all_input_nodes[0])}
    yield layer.node
    while waiting:
        for reader in waiting.pop().users:
            if reader in seen or reader.op == "output":
                continue
            seen.add(reader)
            is_rounding = "quantize_per_tensor" in str(reader.target)
            if not is_rounding:
                yield reader
            if is_rounding or reader in passing:
                waiting.append(reader)


def _known(node: Node, graph: GraphModule, modules: set[str]) -> tuple[str, ...]:
    return _known_all([node], graph, modules)


def _known_all(nodes: Iterable[Node], graph: GraphModule, modules: set[str]) -> tuple[str, ...]:
    """Return the modules of these nodes, by the names that `skip` takes; none of inputs and of the network itself."""
    scopes: Mapping[str, str] = graph.meta.get("scopes", {})
    names = (scopes.get(node.name) or (str(node.target) if node.op == "call_module" else "") for node in nodes)
    return tuple(dict.fromkeys(name for name in names if name in modules))


def quantizable(network: RoundedNetwork, modules: nn.Module) -> list[str]:
    """Return the layers with int8 weights, by the names that `skip` takes."""
    known = set(layer_types(modules))
    return [name for layer in network.layers if layer.weights for name in _known(layer.node, network.graph, known)]
