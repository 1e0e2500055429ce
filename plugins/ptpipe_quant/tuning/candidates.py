"""Rank layers by the noise that rounding them makes in the network's outputs, and find what to change for each.

Where the output is harmful, another observer may help; where the weights are, a scale for each channel. To keep a
layer's weights float, skip it. Its output is still rounded where the next layer takes int8 inputs: to keep that float
too, skip the layer, those that read it, and what lies between them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.analysis.measuring import Measurement
from ptpipe_quant.analysis.rounded_network import RoundedLayer, RoundedNetwork, Rounding
from ptpipe_quant.trace import skippable_names
from ptpipe_quant.tuning.trials import Choice
from ptpipe_torch import Batch, Data, Model


@dataclass(frozen=True)
class RankedLayer:
    """What to change for a layer, by the names that options of `quant.prepare` take."""

    skip: tuple[str, ...]
    """What to keep float."""
    names: tuple[str, ...]
    """What has its observer and its weights."""
    is_output: bool
    """Whether the output is more harmful than the weights."""


def ranked_layers(network: RoundedNetwork, model: Model, data: Data, batches: Iterable[Batch]) -> list[RankedLayer]:
    """Return the layers, the noisiest first. `model`: the float one, whose modules are named."""
    layers = network.layers
    roundings = [Rounding([layer]) for layer in layers] + [Rounding((), [layer]) for layer in layers]
    measurement = Measurement(network, data.info.task, model.signature, roundings)
    measurement.run(batches, lambda _: None)
    noises = [record.noise for record in measurement.rounded]
    names = skippable_names(model.build())
    found = []
    for layer, of_weights, of_output in zip(layers, noises, noises[len(layers) :], strict=False):
        own = _known(layer.node, network.graph, names)
        around = _known_all(_around(layer), network.graph, names)
        skip = around if of_output > of_weights else own
        if skip:
            ranked = RankedLayer(skip, own or skip, is_output=bool(of_output > of_weights))
            found.append((max(of_weights, of_output), ranked))
    return [ranked for _, ranked in sorted(found, key=lambda item: -item[0])]


def chains_of(first: Choice, layers: Sequence[RankedLayer], remedies: Sequence[str]) -> list[list[Choice]]:
    """Return the choices to try for each remedy: each is the one before and one layer more, by rank.

    A layer for which a remedy is none gets the last one in `remedies` that is.
    """
    chains: list[list[Choice]] = [[first] for _ in remedies]
    for layer in layers:
        usable = [remedy for remedy in remedies if _is_usable(remedy, layer)]
        if not usable or _with_remedy(chains[-1][-1], layer, usable[-1]) == chains[-1][-1]:
            continue
        for chain, remedy in zip(chains, remedies, strict=True):
            chain.append(_with_remedy(chain[-1], layer, remedy if remedy in usable else usable[-1]))
    return chains


def _is_usable(remedy: str, layer: RankedLayer) -> bool:
    return remedy == "float" or (remedy != "per_channel") is layer.is_output


def _with_remedy(choice: Choice, layer: RankedLayer, remedy: str) -> Choice:
    """Return the choice with a remedy more."""
    if remedy == "float":
        added = tuple(name for name in layer.skip if name not in choice.skip)
        others = tuple(pair for pair in choice.layers if pair[0] not in layer.skip)
        return replace(choice, skip=(*choice.skip, *added), layers=others)
    pairs = ((name, remedy) for name in layer.names if name not in choice.skip)
    return replace(choice, layers=tuple(dict.fromkeys((*choice.layers, *pairs))))


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


def _known(node: Node, graph: GraphModule, known: Container[str]) -> tuple[str, ...]:
    return _known_all([node], graph, known)


def _known_all(nodes: Iterable[Node], graph: GraphModule, known: Container[str]) -> tuple[str, ...]:
    """Return the modules of these nodes, by the names that `skip` takes; none of inputs and of the network itself."""
    scopes: Mapping[str, str] = graph.meta.get("scopes", {})
    names = (scopes.get(node.name) or (str(node.target) if node.op == "call_module" else "") for node in nodes)
    return tuple(dict.fromkeys(name for name in names if name in known))


def quantizable(network: RoundedNetwork, modules: nn.Module) -> list[str]:
    """Return the layers with int8 weights, by the names that `skip` takes."""
    known = skippable_names(modules)
    return [name for layer in network.layers if layer.weights for name in _known(layer.node, network.graph, known)]
