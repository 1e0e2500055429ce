"""Networks that a function in a Python file of the user's makes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ptpipe import Context, StageError
from ptpipe_torch import Data, DatasetInfo, FunctionRef, Model, seeded
from ptpipe_torch.errors import first_line
from ptpipe_torch.model.example_inputs import copies, zeros
from ptpipe_torch.model.outputs import describe, named_outputs, specs_of, tensors_of, with_outputs
from ptpipe_torch.model.signature import BATCH, Signature, TensorSpec
from ptpipe_torch.paths import find_path
from ptpipe_torch.python_file import own_errors, seeded_everywhere
from ptpipe_torch.random_outputs import random_draws
from ptpipe_torch.read_files import reads_recorded
from ptpipe_torch.runtime import warnings_silenced
from ptpipe_zoo import nets, weights
from ptpipe_zoo.input_checks import check_ids, padding_dependence, refuses_ids

if TYPE_CHECKING:
    from ptpipe_zoo.config import PythonModelConfig

_SQUASHING = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}
"""Operators that make probabilities of logits, by the name of their gradient."""
_MAX_NAMES = 10
_VIEWS = ("SqueezeBackward", "UnsqueezeBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward")


def build_model(config: PythonModelConfig, ctx: Context, data: Data) -> Model:
    """Implement `model.python`."""
    file = Path(config.file).expanduser().absolute()
    reference = FunctionRef.in_file(file, config.function, config.arguments)
    maker = f"{file.name}: {config.function}()"
    with seeded_everywhere(ctx.seed), reads_recorded(ctx, map(find_path, config.reads)):
        network = nets.build_seeded(reference, ctx.seed)
    _check_network(network, maker)
    if config.weights_file is not None:
        _load_weights(network, Path(config.weights_file).expanduser(), config.weights_entry, ctx)
    else:
        weights.refuse_not_finite(network, maker)
    inputs = _inputs(data)
    try:
        signature = _signature(network, inputs, data.info, file, maker)
        outputs = _call(network, inputs, signature, file, maker, data.info)
    except StageError as error:
        if refuses_ids(error.__cause__):
            check_ids(network, inputs, data.info, file)
        raise
    check_ids(network, inputs, data.info, file)
    if "logits" in outputs and (name := _squashing_operator(outputs["logits"])) is not None:
        ctx.notice(
            f"{maker}: the network ends in {name}, but its task takes logits, which are what comes before {name}: "
            "return those, else it learns and is measured wrongly"
        )
    if data.info.task.outputs and _loses_gradient(network, inputs, outputs.values(), file):
        ctx.notice(
            f"{maker}: the network can be evaluated, not trained: its outputs have no gradient. detach(), .data, NumPy "
            "and torch.no_grad() in forward() lose it: compute with torch's operators alone"
        )
    if reason := _fails_alone(network, inputs, signature, maker):
        ctx.notice(f"{maker}: {reason}")
    # Random outputs differ with the padding, too.
    if reason := random_draws(network, inputs) or padding_dependence(network, inputs, data.info, signature):
        ctx.notice(f"{maker}: {reason}")
    model = nets.with_signature(reference, network, signature, ctx)
    _check_rebuilt(_call(model.build(), inputs, signature, file, maker, data.info), outputs, maker)
    return model


def _load_weights(network: nn.Module, path: Path, entry: str | None, ctx: Context) -> None:
    for notice in weights.load_state(network, weights.read_weights(path, ctx.notice, entry), str(path)):
        ctx.notice(notice)


def _check_network(network: object, maker: str) -> None:
    if not isinstance(network, nn.Module):
        raise StageError(f"{maker} returned {describe(network)}, not a torch.nn.Module")
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    if lazy := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        raise StageError(f"{maker}: {lazy[0]} has no shape until the network is called; give its layer's sizes")
    if elsewhere := [name for name, tensor in tensors.items() if tensor.device.type != "cpu"]:
        device = tensors[elsewhere[0]].device
        raise StageError(f"{maker}: {elsewhere[0]} is on {device}; return the network on the CPU, ptpipe moves it")


def _inputs(data: Data) -> tuple[torch.Tensor, ...]:
    """Return two samples; zeros where there are none."""
    batch = next(iter(data.batches("train", batch_size=2)), None)
    return zeros(data.info.signature.inputs, 2) if batch is None else batch.args


def _signature(
    network: nn.Module, inputs: Sequence[torch.Tensor], info: DatasetInfo, file: Path, maker: str
) -> Signature:
    """Return what the data set needs; for an unlabeled one, with the outputs that the network has."""
    needed = info.signature
    if needed.outputs:
        return needed
    calls = (inputs, [tensor[:1] for tensor in inputs])
    returned = [_returned(network, each, needed, file) for each in calls]
    try:
        signature = with_outputs(needed, specs_of(returned, [len(each[0]) for each in calls]))
    except StageError as error:
        raise StageError(f"{maker}: {error}") from error
    if any(_open_axes(spec) for spec in needed.inputs):
        _refuse_open_outputs(network, inputs, signature, file, maker)
    return signature


def _open_axes(spec: TensorSpec) -> list[int]:
    """Return the axes that may have any size, but the batch's: the length of tokens."""
    return [axis for axis, size in enumerate(spec.shape) if isinstance(size, str) and size != BATCH]


def _refuse_open_outputs(
    network: nn.Module, inputs: Sequence[torch.Tensor], signature: Signature, file: Path, maker: str
) -> None:
    """Raise StageError where an output has another shape for inputs with a token less."""
    names, shorter = [], []
    for spec, tensor in zip(signature.inputs, inputs, strict=True):
        axes = _open_axes(spec)
        names += [spec.name] * bool(axes)
        shorter.append(tensor[tuple(slice(max(1, size - (axis in axes))) for axis, size in enumerate(tensor.shape))])
    try:
        returned = _returned(network, shorter, signature, file)
    except StageError:  # of one length
        return
    try:
        named_outputs(returned, signature.outputs)
    except StageError as error:
        raise StageError(
            f"{maker}: of shorter {', '.join(names)}, {error}: outputs of an unlabeled data set have fixed sizes. "
            "Return a row for each sample, such as the mean over its tokens, or leave out `tokens` in the data stage: "
            "then all samples have one length"
        ) from error


def _returned(network: nn.Module, inputs: Sequence[torch.Tensor], signature: Signature, file: Path) -> Any:
    """Return what a network in eval mode returns."""
    named = zip(signature.inputs, inputs, strict=True)
    called_with = ", ".join(f"{spec.name} {tuple(tensor.shape)} {spec.dtype}" for spec, tensor in named)
    remedy = ": let it take such inputs, in batches of any size, or let the data stage give others"
    with seeded(0), own_errors(file, f"the network, called with {called_with},", remedy):
        return network.eval()(*copies(inputs))


def _call(
    network: nn.Module, inputs: Sequence[torch.Tensor], signature: Signature, file: Path, maker: str, info: DatasetInfo
) -> Mapping[str, torch.Tensor]:
    """Return the outputs of a network in eval mode. Raises StageError where they don't fit the data set."""
    returned = _returned(network, inputs, signature, file)
    try:
        outputs = named_outputs(returned, signature.outputs)
    except StageError as error:
        given = ", ".join(map(str, signature.inputs))
        raise StageError(f"{maker}: {error}, for {given}{_names(returned, info)}") from error
    for spec in signature.outputs:
        if str(outputs[spec.name].dtype) != f"torch.{spec.dtype}":
            raise StageError(
                f"{maker}: the network returns {spec.name} as {outputs[spec.name].dtype}, not {spec.dtype}"
            )
    return outputs


def _names(returned: Any, info: DatasetInfo) -> str:
    """Return what the numbers of a single output stand for, to end an error about their number."""
    words = [word for name in info.task.meanings for word in info.task.meanings[name]]
    if not words or not isinstance(returned, torch.Tensor):
        return ""
    shown = ", ".join(words[:_MAX_NAMES]) + (", ..." if len(words) > _MAX_NAMES else "")
    return f"; {info.name} has {len(words)} {'classes' if info.task.class_scores else 'targets'}: {shown}"


def _fails_alone(network: nn.Module, inputs: Sequence[torch.Tensor], signature: Signature, maker: str) -> str | None:
    """Return why a network can't take one sample; None if it can. Raises StageError where it drops the batch's axis."""
    try:
        with seeded(0), torch.no_grad():
            returned = network(*copies([tensor[:1] for tensor in inputs]))
    except Exception as error:  # noqa: BLE001  # as norms by the batch's own statistics
        return f"the network fails for a single sample, as for latencies of one: {first_line(error)}"
    try:
        named_outputs(returned, signature.outputs)
    except StageError as error:
        raise StageError(
            f"{maker}: {error}, also for a single sample; squeeze() drops the axis of the batch then: flatten(1), or "
            "squeeze with the axes to drop, does not"
        ) from error
    return None


def _squashing_operator(output: torch.Tensor) -> str | None:
    """Return softmax or sigmoid where the output is one's, whatever its shape became since."""
    node = output.grad_fn
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0]
    return None if node is None else _SQUASHING.get(node.name())


def _loses_gradient(
    network: nn.Module, inputs: Sequence[torch.Tensor], outputs: Iterable[torch.Tensor], file: Path
) -> bool:
    """Return whether no output depends on the parameters in a way that torch can follow.

    `outputs`: of eval mode. Some networks compute a gradient in training mode alone, which a copy is tried in then; one
    that fails there is not judged.
    """
    has_parameters = any(parameter.requires_grad for parameter in network.parameters())
    if not has_parameters or any(output.requires_grad for output in outputs):
        return False
    try:
        with seeded_everywhere(0), warnings_silenced(), own_errors(file, "the network"):
            returned = tensors_of(copy.deepcopy(network).train()(*copies(inputs)))
    except Exception:  # noqa: BLE001  # as where it needs targets
        return False
    return not any(output.requires_grad for output in returned)


def _check_rebuilt(rebuilt: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], maker: str) -> None:
    for name, output in outputs.items():
        if not torch.allclose(rebuilt[name], output, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise StageError(
                f"{maker}: the network, rebuilt with the same weights, returns another {name}: whatever its "
                "outputs depend on must be a parameter, a buffer, or the same in every call of the function"
            )
