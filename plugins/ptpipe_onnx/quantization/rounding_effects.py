"""Which nodes the rounding of an int8 file harms most, and which to keep float.

A copy of the float file rounds the same tensors, each where an input says so: one session measures any part of them.
Nodes belong to groups, as `skip` names them: a node with weights by its layer, those behind the last layers by their
own names (a detector joins boxes and scores there), all others by their operator. A tensor is float where all groups
that want it as integers are.

Shape legend: N samples, K classes, or values of an output that are no scores of classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ptpipe import JSON, Context, host
from ptpipe_onnx.quantization.agreement import Outputs, join_rows
from ptpipe_onnx.quantization.nodes import LAYERS, NodeNames, in_front_of_layers
from ptpipe_onnx.quantization.preparation import only_batch_size
from ptpipe_torch import Data, OnnxFile, epoch_order
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort
from ptpipe_torch.parity.comparison import figures_of, num_comparable

_RANKING_SAMPLES, _NUM_SAMPLES, _BATCH_SIZE = 16, 128, 16
_MIN_AGREEMENT, _MIN_SQNR_DB = 0.99, 20.0
_FINE_SQNR_DB = 30.0
"""From here on, predictions that differ are close ones: neighbors of 360 pitches in 4 % of the samples, at no cost."""
_MAX_SKIPPED = 8
_SMALL_DB, _SMALL_AGREEMENT = 1.0, 0.005
"""For so little, no further group is kept float."""
Figures = Mapping[str, JSON]


@dataclass(frozen=True)
class Remedy:
    """What to keep float, and what that is expected to give."""

    noise_db: Mapping[str, float]
    """Signal-to-quantization-noise ratio of the outputs where one group alone is rounded, in dB; the worst first.

    -inf: outputs that are not finite; inf: no difference.
    """
    skip: Sequence[str]
    before: Figures
    """Of the outputs, as those of `agreement`."""
    after: Figures
    """The same without these groups."""

    def describe(self, skip: Sequence[str]) -> str:
        """Return what to do, for a notice. `skip`: what the manifest keeps float."""
        alone = ", ".join(f"{name} ({self.noise_db[name]:.1f} dB)" for name in self.skip)
        num_samples = max(_number(value) for name, value in self.after.items() if name.endswith("num_samples"))
        return (
            f"outputs lose most where these alone are rounded: {alone}. `skip: [{', '.join([*skip, *self.skip])}]` "
            f"keeps them float: {_shown(self.after)} instead of {_shown(self.before)} on {num_samples} samples"
        )


def describe_poor(figures: Figures, *, ranks: bool) -> str:
    """Return what to say of outputs that are poor for no reason that is known. `ranks`: whether the file ranks values.

    Then rows change places where values are nearly equal, and can't be compared one by one.
    """
    found = f"outputs are far from the float file's ({_shown(figures)})"
    if ranks:
        return f"{found}, row by row, as the file ranks values (TopK): judge it by a metric of your own"
    return f"{found}; no few nodes are known to cause that"


def is_poor(figures: Figures) -> bool:
    """Whether an output is far from the float file's: a hundredth of the predictions or of the signal."""
    agreement, decibels = _agreement(figures), _worst_db(figures)
    return decibels < _MIN_SQNR_DB if agreement is None else agreement < _MIN_AGREEMENT and decibels < _FINE_SQNR_DB


def find_remedy(
    ctx: Context,
    split: str,
    float_file: OnnxFile,
    data: Data,
    contents: tuple[ModelProto, ModelProto],
    *,
    skipped: Collection[str],
) -> Remedy | None:
    """Return the fewest of the worst groups without which the outputs aren't poor, else about as good as they get.

    `contents`: of the float file as it was quantized, and of the one with QuantizeLinear and DequantizeLinear.
    `skipped`: names of nodes that are float already. None where nothing helps.
    """
    switched = _SwitchedFile(*contents, skipped)
    measure = _measurement(ctx, split, float_file, switched, data, only_batch_size(contents[0]))
    noise_db = {}
    for number, group in enumerate(switched.groups, 1):
        noise_db[group] = _worst_db(measure({group}, _RANKING_SAMPLES))
        ctx.progress(number, len(switched.groups), "groups of nodes")
    ordered = sorted(noise_db, key=noise_db.__getitem__)
    steps: list[Figures] = []
    for num_float in range(min(len(ordered), 1 + _MAX_SKIPPED)):
        steps.append(measure(ordered[num_float:], _NUM_SAMPLES))
        if not is_poor(steps[-1]):
            break
    if not steps:
        return None
    qualities = [_quality(step) for step in steps]
    enough = max(qualities) - (_SMALL_DB if _agreement(steps[0]) is None else _SMALL_AGREEMENT)
    best = next(step for step, quality in enumerate(qualities) if quality >= enough)
    if not best:
        return None
    return Remedy({name: noise_db[name] for name in ordered}, ordered[:best], steps[0], steps[best])


def _measurement(
    ctx: Context, split: str, float_file: OnnxFile, switched: _SwitchedFile, data: Data, fixed_size: int | None
) -> Callable[[Collection[str], int], Figures]:
    """Return a function of the groups that are rounded and a number of samples. `fixed_size`: of all batches."""
    info, names = data.info, [spec.name for spec in float_file.signature.outputs if spec.is_float]
    order_N = epoch_order(len(data.splits[split]), ctx.seed, 0)[:_NUM_SAMPLES]
    batch_size = fixed_size or _BATCH_SIZE
    read = data.batches(split, order_N=order_N, batch_size=batch_size)
    batches = [batch.input_arrays() for batch in read if fixed_size is None or len(batch) == fixed_size]
    with float_file.predictor() as predict:
        expected = [predict(inputs) for inputs in batches[:1]]
        batches = batches[: -(-num_comparable(expected[0]) // batch_size)]
        expected += [predict(inputs) for inputs in batches[1:]]

    def measure(rounded: Collection[str], num_samples: int) -> Figures:
        num_batches = -(-num_samples // batch_size)
        found = (switched.run(inputs, rounded) for inputs in batches[:num_batches])
        return figures_of(
            join_rows(info, names, zip(batches[:num_batches], expected[:num_batches], found, strict=True))
        )

    return measure


def _agreement(figures: Figures) -> float | None:
    return min((_number(value) for name, value in figures.items() if name.endswith("top1_agreement")), default=None)


def _worst_db(figures: Figures) -> float:
    decibels = [_number(value) for name, value in figures.items() if name.endswith("sqnr_db")]
    return min((-math.inf if math.isnan(value) else value for value in decibels), default=math.inf)


def _quality(figures: Figures) -> float:
    agreement = _agreement(figures)
    return _worst_db(figures) if agreement is None else agreement


def _shown(figures: Figures) -> str:
    agreement = _agreement(figures)
    return f"{_worst_db(figures):.1f} dB" if agreement is None else f"{100 * agreement:.1f} % agreement"


def _number(value: JSON) -> float:
    assert isinstance(value, int | float)
    return value


class _SwitchedFile:
    """A float file in which each tensor that another file rounds can be rounded in the same way."""

    def __init__(self, content: ModelProto, quantized: ModelProto, skipped: Collection[str]) -> None:
        groups = _groups_by_tensor(content.graph, skipped)
        model = ModelProto.FromString(content.SerializeToString())
        self._groups_by_switch = {
            _switch(tensor): groups.get(tensor, frozenset()) for tensor in _add_switches(model.graph, quantized.graph)
        }
        self.groups = sorted(frozenset().union(*self._groups_by_switch.values()))
        options = session_options(host.num_threads())
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Mapping[str, npt.NDArray[np.generic]], rounded: Collection[str]) -> Outputs:
        """Return the outputs, with the tensors of these groups rounded."""
        fed: dict[str, npt.NDArray[np.generic]] = {
            switch: np.array(not groups or not groups.isdisjoint(rounded))
            for switch, groups in self._groups_by_switch.items()
        }
        for name, array in inputs.items():
            fed[_float(name) if _switch(name) in fed else name] = array
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, fed), strict=True))


def _groups_by_tensor(graph: GraphProto, skipped: Collection[str]) -> dict[str, frozenset[str]]:
    """Return the groups that want a tensor as integers."""
    names, (quantizable, passing), inner = NodeNames(graph), _operators(), in_front_of_layers(graph)
    groups: dict[str, frozenset[str]] = {}
    for node in graph.node:  # in topological order
        if node.op_type not in quantizable or node.name in skipped:
            continue
        tensors = [*node.input, *node.output]
        operator = node.op_type if node.name in inner else node.name
        wanting = frozenset({names.layer(node) if node.op_type in LAYERS else operator})
        if node.op_type in passing:
            tensors, wanting = [*node.output], groups.get(node.input[0], frozenset())
        for tensor in tensors:
            groups[tensor] = groups.get(tensor, frozenset()) | wanting
    return groups


def _add_switches(graph: GraphProto, quantized: GraphProto) -> list[str]:
    """Round tensors as the nodes of another graph do, where an input says so. Return their names."""
    roundings = _roundings(quantized)
    inserted = {tensor: [*nodes, _where(tensor)] for tensor, nodes in roundings.items()}
    for value in (*graph.input, *graph.initializer):
        value.name = _float(value.name) if value.name in roundings else value.name
    known = {value.name for value in (*graph.input, *graph.initializer)}
    nodes = [node for tensor, own in inserted.items() if _float(tensor) in known for node in own]
    tensors = [tensor for tensor in inserted if _float(tensor) in known]
    for node in graph.node:
        nodes.append(node)
        for position, tensor in enumerate(node.output):
            if tensor in inserted:
                node.output[position] = _float(tensor)
                nodes += inserted[tensor]
                tensors.append(tensor)
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    read = {name for node in copies for name in node.input}
    graph.initializer.extend(tensor for tensor in quantized.initializer if tensor.name in read - known)
    graph.input.extend(helper.make_tensor_value_info(_switch(tensor), TensorProto.BOOL, []) for tensor in tensors)
    return tensors


def _roundings(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """Return the nodes that round each tensor, from its float values to rounded ones, by its name in the float file."""
    sources = {node.output[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
    found: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        dequantize, source = NodeProto.FromString(node.SerializeToString()), sources.get(node.input[0])
        if source is None:  # a stored tensor: its integers are in the file
            tensor = node.input[0].removesuffix("_quantized")
            nodes = [dequantize]
        else:
            tensor = source.input[0].removesuffix("_QuantizeLinear_Input")
            quantize = NodeProto.FromString(source.SerializeToString())
            quantize.input[0], quantize.output[0] = _float(tensor), f"{tensor}:integers"
            dequantize.input[0] = quantize.output[0]
            nodes = [quantize, dequantize]
        dequantize.output[0] = _rounded(tensor)
        found[tensor] = nodes
    return found


def _where(tensor: str) -> NodeProto:
    return helper.make_node("Where", [_switch(tensor), _rounded(tensor), _float(tensor)], [tensor])


def _float(tensor: str) -> str:
    return f"{tensor}:float"


def _rounded(tensor: str) -> str:
    return f"{tensor}:rounded"


def _switch(tensor: str) -> str:
    return f"{tensor}:switch"


def _operators() -> tuple[Collection[str], Collection[str]]:
    """Return the operators that ONNX Runtime quantizes, and those of them that do if their input is."""
    from onnxruntime.quantization.operators.activation import QDQRemovableActivation
    from onnxruntime.quantization.operators.direct_q8 import QDQDirect8BitOp
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    follows = (QDQDirect8BitOp, QDQRemovableActivation)
    passing = {name for name, operator in QDQRegistry.items() if issubclass(operator, follows)}
    return {*QDQRegistry, *QLinearOpsRegistry}, passing
