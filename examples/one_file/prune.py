"""A plugin in one file: `my.prune`. A manifest names it with `plugins: [./prune.py]`."""

from __future__ import annotations

from pydantic import Field

from ptpipe import Context, StageConfig, StageError, stage
from ptpipe_torch import Model


class PruneConfig(StageConfig):
    """Options of `my.prune`."""

    amount: float = Field(default=0.3, gt=0, lt=1, description="fraction of the weights of each layer that become zero")


@stage("my.prune", packages=("torch",))
def prune(config: PruneConfig, ctx: Context, model: Model) -> Model:
    """Set the smallest weights of every convolution and linear layer to zero."""
    import torch
    from torch import nn

    if model.recipe.convert:
        raise StageError("my.prune changes float weights: put it before quant.convert")
    network = model.build_prepared()
    weights = [layer.weight.detach() for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for weight in weights:
        smallest = torch.topk(weight.abs().flatten(), int(config.amount * weight.numel()), largest=False).indices
        weight.view(-1)[smallest] = 0
    ctx.metric(
        num_weights=sum(weight.numel() for weight in weights),
        num_zeros=sum(int((weight == 0).sum()) for weight in weights),
    )
    return model.with_state_dict_of(network)
