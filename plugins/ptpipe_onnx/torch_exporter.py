"""Export a torch network to an ONNX graph. Only this file uses torch's ONNX exporter."""

from __future__ import annotations

import copy
import functools
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.values import TracedOnnxFunction
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx import config as fx_config
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._errors import DispatchError
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable, _TypePromotionInterpreter
from torch.utils._pytree import tree_leaves

from ptpipe import StageError
from ptpipe_onnx import cells, recurrent, translations
from ptpipe_onnx.decompositions import decompose, decompose_each
from ptpipe_onnx.embedding_bags import embedding_bag_replacements
from ptpipe_onnx.graph import dropped_arrays_released, keep_outputs_inside, register_constants
from ptpipe_onnx.kernels_of_samples import multiply_kernels_of_samples, without_products
from ptpipe_onnx.layer_norms import use_layer_norms
from ptpipe_onnx.program_passes import read_sizes_of_pairs, write_translatable
from ptpipe_onnx.shape_pass import use_constant_shapes
from ptpipe_onnx.tensor_names import name_transposed_weights
from ptpipe_torch import Signature, TensorSpec
from ptpipe_torch.errors import depends_on_size, export_failure, makes_constant_of_size, root_cause
from ptpipe_torch.model.outputs import exported_names
from ptpipe_torch.runtime import loggers_limited
from ptpipe_torch.sized_export import export_sized
from ptpipe_torch.torch_export import original_names, place_of_error, place_of_operator

_FAILED = "this network can't be exported to ONNX"
_REMEDY = "Write it with other operators, or compute that part outside of the network"
_OWN_OPERATOR = re.compile(r"onnx\.\w+\.opset(\d+)")
_NUMBERS = {float: torch.float32, int: torch.int64, bool: torch.bool}
_SHAPES_LOGGER = "torch.fx.experimental.symbolic_shapes"
_LOGGERS = ("torch.onnx", "torch.export", "torch.__trace", _SHAPES_LOGGER, "onnxscript", "onnx_ir")
"""Loggers to silence. The third formats a record for every step of a trace if it is enabled: ten times the time."""

_NO_STACK_TRACES = "do_not_emit_stack_traces"
"""Setting, of newer versions of torch, that spares a stack trace for each operator of a trace: a tenth of the time."""


def export(network: nn.Module, signature: Signature, opset: int) -> ir.Model:
    """Export a network in eval mode, on the CPU: parameters keep their names, axes with a symbol are dynamic.

    Operators in place are exported with their effect on all that shares their memory: the exporter rewrites them.
    Raises StageError, with the line, for what has no ONNX form, and if the outputs are not those of the signature.
    """
    with _silent(), torch.no_grad(), _layers_replaced(network, signature):
        program = _program(network, signature)
        _check_opset(network, signature, program, opset)
        for node, reason in (*translations.without_form(program.graph), *without_products(program.graph)):
            operator, place = _origin(network, signature, node)
            raise StageError(f"{_FAILED}: {reason.format(operator)}{place}. {_REMEDY}")
        names = exported_names(program, signature.outputs)
        try:
            multiply_kernels_of_samples(program)
            write_translatable(program)
            use_layer_norms(program)
            decompose(program)
            read_sizes_of_pairs(program)
            with _reused_registry(), _passes_where_needed():
                result = torch.onnx.export(
                    program,
                    dynamo=True,
                    optimize=False,
                    verbose=False,
                    opset_version=opset,
                    input_names=[spec.name for spec in signature.inputs],
                    output_names=names,
                    custom_translation_table={
                        **recurrent.translations(),
                        **cells.translations(),
                        **translations.translations(program.graph),
                    },
                )
        except Exception as error:  # of any step
            raise _untranslated(network, signature, error) from error
    assert result is not None
    assert isinstance(result.model, ir.Model)
    _order_outputs(result.model.graph.outputs, signature.outputs)
    return result.model


@contextmanager
def _layers_replaced(network: nn.Module, signature: Signature) -> Iterator[None]:
    """Put others in the place of layers that the exporter would write as loops, inside the `with`."""
    has_any_length = any(spec.symbols for spec in signature.inputs)
    replacements = recurrent.recurrent_replacements(
        network, has_any_length=has_any_length
    ) | embedding_bag_replacements(network)
    layers = {name: layer for name, layer in network.named_modules(remove_duplicate=False) if layer in replacements}
    for name, layer in layers.items():
        network.set_submodule(name, replacements[layer])
    try:
        yield
    finally:
        for name, layer in layers.items():
            network.set_submodule(name, layer)


def _program(network: nn.Module, signature: Signature) -> ExportedProgram:
    """Trace a network. Raises StageError, with the line, for one that torch.export can't trace."""
    try:
        return export_sized(network, signature.inputs)
    except Exception as error:  # a network may raise anything while it is traced
        if scripted := [name for name, part in network.named_modules() if isinstance(part, torch.jit.ScriptModule)]:
            message = f"{scripted[0] or 'the network'} is TorchScript, which torch.export can't trace"
            raise StageError(f"{_FAILED}: {message}: take the module that was scripted") from error
        is_of_size = makes_constant_of_size(error) or depends_on_size(error)
        if is_of_size and (reason := recurrent.written_out(network)):
            raise StageError(f"{_FAILED}: {reason}") from error
        place = place_of_error(network, error, __file__).in_parentheses
        raise StageError(f"{_FAILED}: {export_failure(error, place=place)}") from error


def _untranslated(network: nn.Module, signature: Signature, error: Exception) -> StageError:
    """Return the error for what the exporter raised while it translated a network, with the operator and the line."""
    node = _translated_node(error)
    if node is None:
        return StageError(f"{_FAILED}: {export_failure(error)}")
    operator, place = _origin(network, signature, node)
    has_form = not isinstance(root_cause(error), DispatchError)
    of_what = " for complex numbers" if any(map(_is_complex, (node, *node.all_input_nodes))) else ""
    reason = f"can't be translated ({export_failure(error)})" if has_form else f"has no ONNX form{of_what}"
    return StageError(f"{_FAILED}: {operator} {reason}{place}. {_REMEDY}")


def _translated_node(error: BaseException | None) -> Node | None:
    """Return the operator that the exporter stopped at, which only its frames have."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "_translate_fx_graph":
                node = frame.f_locals.get("node")
                return node if isinstance(node, Node) else None
        error = error.__cause__
    return None


def _origin(network: nn.Module, signature: Signature, node: Node) -> tuple[str, str]:
    """Return the operator that the network calls where the exporter has this node, and the place of that call.

    It traces the network once more, now with stack traces.
    """
    setattr(fx_config, _NO_STACK_TRACES, False)
    *_, first = names = list(original_names(node))  # each graph has names of its own, which others may have, too
    parts = _program(network, signature).graph_module.modules()
    nodes = (own for part in parts if isinstance(part, GraphModule) for own in part.graph.nodes if own.name in names)
    origin = next((own for own in nodes if list(original_names(own))[-1] == first), node)
    schema = getattr(origin.target, "_schema", None)
    operator = str(origin.target) if schema is None else schema.name.replace("::", ".")
    return operator, place_of_operator(network, origin).in_parentheses


def _check_opset(network: nn.Module, signature: Signature, program: ExportedProgram, opset: int) -> None:
    """Raise StageError for an operator of ONNX's own (`torch.onnx.ops`) that the opset does not have yet."""
    targets = ((node, str(node.target)) for node in program.graph.nodes)
    needed = {node: int(found[1]) for node, target in targets if (found := _OWN_OPERATOR.fullmatch(target))}
    newest = max(needed, key=needed.__getitem__, default=None)
    if newest is not None and needed[newest] > opset:
        operator, place = _origin(network, signature, newest)
        raise StageError(
            f"opset: {opset} is too low for {operator}, an operator of opset {needed[newest]}{place}. Set opset: "
            f"{needed[newest]}, or call an operator of torch's in its place"
        )


class _RootedRule:
    """A rewrite rule that is tried only at operators of its pattern's root: a rule looks at much before it sees that.

    A pattern of two roots even lists the whole graph first, for each node: together a quarter of a ViT's export.
    """

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self._root = rule._target_pattern.output_nodes[0].op_identifier()  # None: any operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        """See `onnxscript.rewriter.RewriteRule`."""
        if self._root is not None and node.op_identifier() != self._root:
            return None
        return self._rule.try_rewrite(model, graph, node, **options)


@contextmanager
def _exact_constants(rules: Iterable[Any]) -> Iterator[None]:
    """Let onnxscript's rules take a constant for 0 or 1 if it is: they drop `x + 1e-8` as they do `x + 0`."""
    values = (value for rule in rules for node in rule._target_pattern for value in node.inputs)
    constants = [(value, value._rel_tol, value._abs_tol) for value in values if hasattr(value, "_abs_tol")]
    try:
        for constant, _, _ in constants:
            constant._rel_tol = constant._abs_tol = 0.0
        yield
    finally:
        for constant, rel_tol, abs_tol in constants:
            constant._rel_tol, constant._abs_tol = rel_tol, abs_tol


def optimize(model: ir.Model) -> ir.Model:
    """Fold constants and batch norms and remove unused nodes, in place; return the model."""
    from onnx_ir.passes import common
    from onnxscript import optimizer, rewriter

    # As `optimizer.optimize_ir`, but for the operators that each rule is tried at.
    rules = rewriter._DEFAULT_REWRITE_RULES
    names = [value.name for value in (*model.graph.inputs, *model.graph.outputs)]
    with _silent(), dropped_arrays_released(model), _exact_constants(rules):
        common.InlinePass()(model)
        name_transposed_weights(model.graph)
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        ir.passes.Sequential(
            rewriter.RewritePass([_RootedRule(rule) for rule in rules]),
            common.IdentityEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedOpsetsPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            common.DeduplicateInitializersPass(),
            common.CommonSubexpressionEliminationPass(),
            common.OutputFixPass(),
        )(model)
        keep_outputs_inside(model)
        for value, name in zip((*model.graph.inputs, *model.graph.outputs), names, strict=True):
            value.name = name  # which those passes change where the graph returns an input, or a value twice
        common.NameFixPass()(model)
        register_constants(model)
        use_constant_shapes(model.graph)
    return model


def _order_outputs(outputs: MutableSequence[ir.Value], specs: Sequence[TensorSpec]) -> None:
    if len(outputs) != len(specs):
        raise StageError(f"this network returns {len(outputs)} tensors; it must return {', '.join(map(str, specs))}")
    by_name = {output.name: output for output in outputs}
    if missing := [spec.name for spec in specs if spec.name not in by_name]:
        raise StageError(
            f"{_FAILED}: the output {missing[0]} is another output, changed in place: return its `.clone()`"
        )
    outputs[:] = [by_name[spec.name] for spec in specs]
    for output, spec in zip(outputs, specs, strict=True):
        shape = [size if isinstance(size, int) else "?" for size in output.shape or ()]
        if not spec.fits(shape):
            found_text = ", ".join(map(str, shape))
            raise StageError(f"this network returns {spec.name} of shape ({found_text}); it must return {spec}")


_from_torchlib = ONNXRegistry.from_torchlib


@functools.cache
def _make_registry(*arguments: Any, **options: Any) -> ONNXRegistry:
    """Return the exporter's table of operators.

    The source of each would be parsed for a domain that nothing reads, half of the time: that of its opset stands in.
    """
    traced: Any = TracedOnnxFunction
    parsed = traced.__dict__["function_ir"]
    try:
        traced.function_ir = property(lambda function: function.opset)
        return _from_torchlib(*arguments, **options)
    finally:
        traced.function_ir = parsed


@contextmanager
def _reused_registry() -> Iterator[None]:
    """Let the exporter copy its table of operators, which it makes from scratch for every export."""

    def copied(*arguments: Any, **options: Any) -> ONNXRegistry:
        registry = copy.copy(_make_registry(*arguments, **options))
        registry.functions = {name: list(functions) for name, functions in registry.functions.items()}
        return registry

    registry_type: Any = ONNXRegistry
    original = registry_type.__dict__["from_torchlib"]
    try:
        registry_type.from_torchlib = staticmethod(copied)
        yield
    finally:
        registry_type.from_torchlib = original


@contextmanager
def _passes_where_needed() -> Iterator[None]:
    """Let the exporter trace a network again only where that changes an operator.

    Decomposition takes a third to half of an export, promotion of types, which runs each operator, a tenth.
    """
    trace_again, promote = _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes
    interpreter: Any = _TypePromotionInterpreter
    run_again = interpreter.run_node

    def decomposed(exported_program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
        _decompose_each(exported_program, registry)
        is_needed = _needs_decomposition(exported_program, registry)
        return trace_again(exported_program, registry) if is_needed else exported_program

    def promoted(graph_module: GraphModule) -> None:
        if _needs_promotion(graph_module):
            promote(graph_module)

    def run(interpreter: Any, node: Node) -> Any:
        is_known = "val" in node.meta and not _is_promoted(node, interpreter.type_promotion_table)
        return node.meta["val"] if is_known else run_again(interpreter, node)

    try:
        _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes = decomposed, promoted
        interpreter.run_node = run
        yield
    finally:
        interpreter.run_node = run_again
        _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes = trace_again, promote


def _decompose_each(program: ExportedProgram, registry: ONNXRegistry) -> None:
    """Replace operators without an ONNX form by what they are made of, in place, if that is all that is needed."""
    with_form = set(_decomp.get_onnx_implemented_overloads(registry))
    operators = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    is_written = not any(node.target._schema.is_mutable or _is_complex(node) for node in operators)
    if is_written and any(node.target not in with_form for node in operators):
        decompose_each(program, with_form, _decomp.create_onnx_friendly_decomposition_table(with_form))


def _needs_decomposition(program: ExportedProgram, registry: ONNXRegistry) -> bool:
    """Return whether a network has operators without an ONNX form, operators in place, or graphs inside its graph.

    Or complex numbers, for which fewer operators have one.
    """
    with_onnx_form = set(_decomp.get_onnx_implemented_overloads(registry))
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            has_form = node.target in with_onnx_form and not _is_complex(node)
            if node.target._schema.is_mutable or not has_form:
                return True
        elif node.op == "get_attr" or isinstance(node.target, torch._ops.OperatorBase):
            return True
    return False


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _needs_promotion(graph_module: GraphModule) -> bool:
    """Return whether an operator has arguments of another type than it computes with."""
    table = TypePromotionTable()
    graphs = (module.graph for module in graph_module.modules() if isinstance(module, GraphModule))
    return any(_is_promoted(node, table) for graph in graphs for node in graph.nodes)


def _is_promoted(node: Node, table: TypePromotionTable) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    rule = table.get_rule(node.target.overloadpacket)
    if rule is None:
        return False
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    promotion = rule.preview_type_promotion(args, kwargs)
    types = [(args[index], dtype) for index, dtype in promotion.args_dtypes.items() if index < len(args)]
    types += [(kwargs[name], dtype) for name, dtype in promotion.kwargs_dtypes.items() if name in kwargs]
    return any(
        _dtype_of(value) is not dtype for values, dtype in types if dtype is not None for value in tree_leaves(values)
    )


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else _NUMBERS.get(type(value))


@contextmanager
def _silent() -> Iterator[None]:
    has_no_stack_traces = getattr(fx_config, _NO_STACK_TRACES, False)
    try:
        setattr(fx_config, _NO_STACK_TRACES, True)
        with loggers_limited(_LOGGERS), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        setattr(fx_config, _NO_STACK_TRACES, has_no_stack_traces)
