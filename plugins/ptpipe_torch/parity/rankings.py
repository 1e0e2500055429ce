"""Compare implementations of a network that ranks values (topk, sort), in the order that one of them found.

Nearly equal values change places wherever sums are rounded otherwise, and so does all that is computed from their
positions, such as the boxes that a detector keeps. So the second implementation computes with the positions that the
first one found. The ranking itself is compared by the values alone: sorted, they are nearly equal in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATORS = (torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.argsort)
TARGETS = (torch.argsort, torch.sort, torch.topk, "argsort", "sort", "topk")
"""What ranks values in a traced network."""


@dataclass(frozen=True)
class RankedTensors:
    """Names of the outputs of an exported model that tell what it ranked."""

    values: str
    positions: str
    axis: int
    """Along which the values are ranked."""

    @property
    def comparable(self) -> str:
        """The name of what `comparable` makes of them; `values` itself may be an output of the model."""
        return f"{self.values}, ranked"


class Rankings(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch has it
    """Records what is ranked inside the `with`.

    `imposed`: the positions that another implementation found, of one ranking after the other. Operators return these
    in place of their own, where they have the shape of their own.
    """

    def __init__(self, imposed: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._imposed = imposed
        self.positions: list[torch.Tensor] = []
        """That the operators found themselves, one tensor for each."""
        self.values: list[torch.Tensor] = []
        """Of each operator, as `comparable` returns them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _OPERATORS:
            return returned
        ranked, axis = args[0], _axis(func, args, kwargs or {})
        own = given = returned if isinstance(returned, torch.Tensor) else returned[1]
        imposed = self._imposed[len(self.positions) : len(self.positions) + 1]
        if imposed and imposed[0].shape == own.shape:
            given = imposed[0]
        self.positions.append(own)
        values = _gathered(ranked, axis, given)
        self.values.append(comparable(_gathered(ranked, axis, own), values, axis))
        return given if isinstance(returned, torch.Tensor) else (values, given)


def comparable(highest: torch.Tensor, values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return what two implementations must agree in, along the last axis.

    `highest`: values at the positions that an implementation found itself, which are returned in descending order: they
    show that both rank the same way. `values`: at the positions that it was given, as they are: they show that both
    mean the same by a position. `axis`: along which both are ranked.
    """
    if not values.dim():
        return values
    return torch.cat([highest.movedim(axis, -1).sort(descending=True).values, values.movedim(axis, -1)], -1)


def ranks_values(network: GraphModule) -> bool:
    """Return whether a traced or an exported network ranks values."""
    return any(
        node.target in TARGETS or getattr(node.target, "overloadpacket", None) in _OPERATORS
        for node in network.graph.nodes
    )


def _gathered(values: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    return values.gather(axis, positions) if values.dim() else values


def _axis(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    place = [argument.name for argument in operator._schema.arguments].index("dim")
    axis: int = args[place] if place < len(args) else kwargs.get("dim", -1)
    return axis
