"""Names of a network's attributes that FX can't use: Python's keywords, which it is taught, and those of its own."""

from __future__ import annotations

import keyword

import torch.fx.graph as fx_graph
from torch import nn
from torch.fx import Graph, GraphModule

from ptpipe import StageError

RESERVED = frozenset(dir(GraphModule(nn.Module(), Graph()))) - frozenset(dir(nn.Module()))
"""What a GraphModule has beside the network: `code`, `graph`, `meta`."""


class ReservedNameError(StageError):
    """An attribute of the network that FX has one of the same name for."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"self.{name} of the network can't be traced: torch.fx has an attribute of that name. Rename it in the "
            f"network, to self.{name}_ for example, and in the state dicts that it loads"
        )


def refuse_reserved_names(graph: Graph) -> None:
    """Raise ReservedNameError if a graph needs an attribute of the network that a GraphModule can't have."""
    for node in graph.nodes:
        name = str(node.target).partition(".")[0]
        if node.op in ("call_module", "get_attr") and name in RESERVED:
            raise ReservedNameError(name)


def reserved_name_in(message: str, network: nn.Module) -> str | None:
    """Return the reserved name of a module or a tensor of the network that torch's message mentions."""
    own = {*network._modules, *network._parameters, *network._buffers}
    return next((name for name in sorted(own & RESERVED) if name in message), None)


def accept_keywords() -> None:
    """Let the code of graphs reach attributes with names such as `class` (a key of an `nn.ModuleDict`).

    FX writes `self.class`, which is no Python, and `getattr` for names that are no identifiers (torch 2.13).
    """
    fx_graph._format_target = _with_keywords


def _with_keywords(base: str, target: str) -> str:
    for part in target.split("."):
        is_plain = part.isidentifier() and not keyword.iskeyword(part)
        base = f"{base}.{part}" if is_plain else f'getattr({base}, "{part}")'
    return base
