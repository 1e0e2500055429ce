"""Whether the network that is delivered, built from what is stored of it, is the one that was trained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import Data, Model
from ptpipe_torch.model.outputs import named_outputs
from ptpipe_torch.parity.parity import FLOAT_TOLERANCE
from ptpipe_torch.python_file import seeded_everywhere
from ptpipe_train.device import first_batch
from ptpipe_train.evaluation import state_restored
from ptpipe_train.parallel import ParallelStrategy

_MAX_SAMPLES = 8
"""That both networks are run on: what is not stored shows in any of them."""
_MAX_NAMED = 3


def refuse_unstored_state(model: Model, data: Data, strategy: ParallelStrategy, batch_size: int) -> None:
    """Raise StageError where outputs of the trained network depend on a state that its state dict does not hold.

    Evaluation would then be of another network than the one that is delivered. `model`: the recipe; `data`: both
    networks are run on some samples of val, where there are none of train, in eval mode; `strategy`: has the trained
    network, which is left as it is, as are random streams; `batch_size`: of the training. Rank 0 does it for all.
    Outputs are mostly equal bit for bit; allowed is what another order of sums can make of them. Outputs of train that
    are not finite at all are refused, too: they can't be compared, and without val no metric shows them.
    """
    if strategy.workers.rank:
        return
    module, settings = strategy.module, strategy.settings
    # Not zeros: as tokens they are padding alone, which some networks don't take.
    split = "val" if len(data.splits["val"]) else "train"
    inputs = first_batch(data, settings, min(_MAX_SAMPLES, strategy.pass_size(batch_size)), split).args
    found: list[dict[str, torch.Tensor]] = []
    with seeded_everywhere(0, settings.device):
        delivered = settings.place(model.with_state_dict_of(module).build_prepared())
    for network in (module, delivered):
        with seeded_everywhere(0, settings.device), state_restored(network), torch.no_grad():
            found.append(named_outputs(network(*inputs), model.signature.outputs))
    trained, rebuilt = found
    if split == "train" and not any(of.isfinite().any() for of in trained.values()):
        raise StageError(
            "all outputs of the trained network are nan or inf in eval mode: its buffers are not finite, or it "
            "computes otherwise than in training mode"
        )
    if not all(_are_close(of, rebuilt[name]) for name, of in trained.items()):
        names = ", ".join(islice(_unstored(module, delivered), _MAX_NAMED))
        raise StageError(
            f"outputs depend on a state that is not stored with the weights{f' ({names})' if names else ''}: the "
            "delivered network would answer otherwise than the trained one; make it a persistent buffer "
            "(register_buffer)"
        )


def _are_close(trained: torch.Tensor, rebuilt: torch.Tensor) -> bool:
    if trained.shape != rebuilt.shape:
        return False
    expected, other = trained.double(), rebuilt.double()
    finite = expected[expected.isfinite()].abs()
    tolerance = FLOAT_TOLERANCE * finite.max().item() if finite.numel() else 0.0
    return torch.allclose(expected, other, rtol=0, atol=tolerance, equal_nan=True)


def _unstored(module: nn.Module, delivered: nn.Module) -> Iterator[str]:
    """Yield the names of buffers and attributes that differ in the two networks."""
    stored, others = set(module.state_dict()), dict(delivered.named_modules())
    for path, layer in module.named_modules():
        other = others.get(path)
        if other is None:
            continue
        for own, rebuilt in ((layer._buffers, other._buffers), (vars(layer), vars(other))):
            for name, value in own.items():
                full_name = f"{path}.{name}".lstrip(".")
                if full_name not in stored and name != "training" and _differ(value, rebuilt.get(name)):
                    yield full_name


def _differ(value: object, rebuilt: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not (isinstance(rebuilt, torch.Tensor) and torch.equal(value.detach().cpu(), rebuilt.detach().cpu()))
    return isinstance(value, bool | int | float) and value != rebuilt
