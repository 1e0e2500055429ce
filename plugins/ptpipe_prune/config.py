"""Options of the prune stages. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ptpipe import StageConfig


class PruneConfig(StageConfig):
    """Options of every prune stage."""

    skip: tuple[str, ...] = Field(
        (), description="layers to keep dense, by name (`classifier`, `layer4.*`) or type (`Linear`, `BasicBlock`)"
    )


class MagnitudeConfig(PruneConfig):
    """Options of `prune.magnitude`."""

    amount: float = Field(0.5, gt=0, lt=1, description="fraction of the weights that are zero afterwards")
    scope: Literal["layer", "global"] = Field(
        "layer",
        description="layer: that fraction of each layer's weights; global: of all together, so that layers of small "
        "weights lose more",
    )


class NMConfig(PruneConfig):
    """Options of `prune.n_m`."""

    n: int = Field(2, ge=1, le=63, description="weights that are kept of every m")
    m: int = Field(4, ge=2, le=64, description="consecutive weights, along the inputs of a layer, that n are kept of")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n >= self.m:
            raise ValueError(f"n must be less than m: keeping {self.n} of {self.m} weights prunes none")
        return self
