"""Sparsity: prune.magnitude and prune.n_m set weights to zero, and later trainings keep the zeros."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ptpipe import Context, Stage, hookimpl, stage
from ptpipe_prune.config import MagnitudeConfig, NMConfig
from ptpipe_torch import Model

if TYPE_CHECKING:
    from ptpipe import Plan, Problem

__all__ = ["MagnitudeConfig", "NMConfig", "magnitude", "n_m", "ptpipe_stages"]


@stage("prune.magnitude", packages=("torch",))
def magnitude(config: MagnitudeConfig, ctx: Context, model: Model) -> Model:
    """Set the smallest weights of convolutions and linear layers to zero.

    train.supervised keeps the zeros from then on, also behind quant.prepare_qat, and quant.convert stores them as the
    integer 0: a compressed file is smaller. Zeros of an earlier pruning count among the smallest weights, so stages
    that prune and train in turn reach a high sparsity step by step; `pruning` of train.supervised does so within one
    training. Fails if the model is not float, if a pattern of
    `skip` matches no layer, or if a layer would keep no weight.
    """
    from ptpipe_prune import pruning

    return pruning.magnitude(config, ctx, model)


@stage("prune.n_m", packages=("torch",))
def n_m(config: NMConfig, ctx: Context, model: Model) -> Model:
    """Keep the n largest of every m weights that are consecutive along a layer's inputs, and set the others to zero.

    2 of 4 is the pattern that sparse tensor cores take. Layers of convolutions and linear layers whose number of input
    channels, or of a group, is no multiple of m stay dense, and are reported. Zeros are kept as those of
    prune.magnitude are; it fails for the same reasons.
    """
    from ptpipe_prune import pruning

    return pruning.n_m(config, ctx, model)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Return the kinds of this plugin."""
    return [magnitude, n_m]


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find models that are pruned after they were prepared for int8, before anything runs."""
    for planned in plan.stages:
        if planned.kind not in ("prune.magnitude", "prune.n_m"):
            continue
        references = planned.wiring.get("model", ())
        while references:
            upstream = plan[references[0].stage]
            if upstream.kind.startswith("quant."):
                message = f"needs a float model: put it before {upstream.id} ({upstream.kind})"
                yield plan.problem(planned.id, message)
                break
            references = upstream.wiring.get("model", ())
