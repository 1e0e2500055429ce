"""Compare an int8 network, as this machine's engine computes it, with its reference network, layer by layer.

The two may differ by one step, the rounding of a layer's output (see `ptpipe_torch.int8.layer_parity`). More means that
the engine computes another function: a kernel with a fault, or one whose sums of 8-bit products saturate in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from ptpipe import Context, StageError
from ptpipe_quant.int8_graph import drop_redundant_clamps
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.int8_recorder import Int8Recorder
from ptpipe_torch.int8.layer_parity import NetworkDifference, compare_layers
from ptpipe_torch.int8.layers import has_narrow_weights
from ptpipe_torch.model.outputs import tensors_of

MAX_STEPS = 1.01
"""Largest difference of a layer: one step, and the float32 rounding of tensors whose grid is not the reference's."""
MAX_OUTPUT_DIFFERENCE = 1e-4
"""Of float parts behind the last int8 layer, relative to the largest output: both run the same float32 operators."""

_SATURATING = ("fbgemm", "x86", "onednn")


def check_int8(
    ctx: Context, int8: GraphModule, prepared: GraphModule, inputs: Sequence[torch.Tensor], *, backend: str
) -> None:
    """Compare an int8 network with the prepared one that it was converted from, which is consumed; report figures.

    Raises StageError that names the layer with the largest difference if that is more than a step. `backend` must be
    the selected engine.
    """
    drop_redundant_clamps(prepared)  # as conversion does
    difference = compare_with_reference(int8, prepared, inputs)
    worst = difference.worst
    ctx.metric(
        compared_layers=len(difference.layers),
        max_difference_steps=0.0 if worst is None else round(worst.max_steps, 3),
        worst_layer=None if worst is None else worst.layer,
    )
    if difference.missing:
        raise StageError(f"{ctx.kind}: {difference.missing[0]} has no int8 form on {backend}: leave it float with skip")
    wrong = [layer for layer in difference.layers if not layer.max_steps <= MAX_STEPS]
    if worst is not None and wrong:
        others = f" ({len(wrong) - 1} other layers are off too)" if len(wrong) > 1 else ""
        remedy = "set `reduce_range: true`, " if backend in _SATURATING and not has_narrow_weights(int8) else ""
        raise StageError(
            f"{ctx.kind}: {backend} computes {worst.layer} wrongly: its output is up to {worst.max_steps:.0f} steps "
            f"from what its weights and inputs say, where 1 is rounding{others}. Where layers are prepared, {remedy}"
            f"leave the layer float (`skip: [{worst.layer}]`) or choose another backend"
        )
    if not difference.output <= MAX_OUTPUT_DIFFERENCE:
        raise StageError(
            f"{ctx.kind}: the output of the int8 network differs by {difference.output:.2g} of its largest value from "
            f"what follows from its last int8 layer on {backend}"
        )


def compare_with_reference(
    int8: GraphModule, prepared: GraphModule, inputs: Sequence[torch.Tensor]
) -> NetworkDifference:
    """Return by how much each layer of an int8 network differs from its reference, in steps of its output.

    `prepared`: the network that `int8` was converted from; consumed. The engine must be selected.
    """
    reference = reference_network(prepared)[0]  # without the integers
    recorder = Int8Recorder(int8, reference)
    with torch.no_grad(), deprecations_silenced():
        outputs = tensors_of(recorder.run(*inputs))
    return compare_layers(reference, inputs, recorder.found, outputs)
