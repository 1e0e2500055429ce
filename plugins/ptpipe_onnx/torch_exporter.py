"""A torch network as an ONNX graph. The one file of this plugin that uses torch's ONNX exporter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_onnx.graph import Model, Value

INPUT, OUTPUT, BATCH_AXIS = "images", "logits", "N"

_TALKATIVE = ("torch.onnx", "torch.export", "torch.__trace", "onnxscript", "onnx_ir")
"""Loggers. The third formats a record for every step of a trace as soon as anybody listens: ten times the time."""


def exported(network: nn.Module, input_shape_CHW: tuple[int, int, int], num_classes: int, opset: int) -> Model:
    """Export a network in eval mode, on the CPU: parameters keep their names, the batch axis is dynamic.

    In-place activations of `network` are switched off for good. Raises StageError where the network does
    something that has no ONNX form, or gives anything but logits of shape (N, K).
    """
    for module in network.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # the exporter decomposes x.clamp_() at great length
    images_NCHW = torch.zeros(2, *input_shape_CHW)  # a batch of 1 would be taken for a constant
    with _silent(), torch.no_grad():
        try:
            program = torch.export.export(
                network, (images_NCHW,), dynamic_shapes=({0: torch.export.Dim(BATCH_AXIS)},), strict=False
            )
            result = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=opset,
                input_names=[INPUT],
                output_names=[OUTPUT],
            )
        except Exception as error:  # the exporter raises whatever a step of it met
            raise StageError(f"this network can't be exported to ONNX: {_first_line(error)}") from error
    assert result is not None
    _check_outputs(result.model.graph.outputs, num_classes)
    return result.model


def tidied(model: Model) -> Model:
    """Fold constants and batch norms and drop what is unused, in place."""
    from onnxscript import optimizer

    stored = list(model.graph.initializers.values())
    with _silent():
        optimizer.optimize_ir(model, num_iterations=1)
    kept = set(model.graph.initializers.values())
    for value in stored:
        if value not in kept:
            value.const_value = None  # the graph keeps counts of dropped values, and so the values themselves
    return model


def _check_outputs(outputs: Sequence[Value], num_classes: int) -> None:
    if len(outputs) != 1:
        raise StageError(f"this network gives {len(outputs)} tensors; only one, the logits, can be exported")
    shape = [str(size) if index == 0 else size for index, size in enumerate(outputs[0].shape)]
    if shape[1:] != [num_classes]:
        raise StageError(f"logits should be of shape (N, {num_classes}); this network gives {tuple(shape)}")


@contextmanager
def _silent() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in _TALKATIVE}
    try:
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
