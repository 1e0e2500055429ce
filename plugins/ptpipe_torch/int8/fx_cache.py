"""Where FX graph mode quantization keeps networks, and with them their weights."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import GraphModule


def release_networks() -> None:
    """Let go of the networks that `torch.ao.quantization.fx` keeps alive after it has prepared or converted them.

    It caches the device of a network under the network itself (`functools.cache`): all of its weights would stay in
    memory for as long as the process lives.
    """
    with warnings.catch_warnings(action="ignore"):  # torch.ao announces its removal when it is imported
        from torch.ao.quantization.fx.utils import assert_and_get_unique_device

    assert_and_get_unique_device.cache_clear()


def release_layers(prepared: GraphModule) -> None:
    """Let go of the layers that the qconfigs of a prepared network keep: all on the CPU, where observers are made.

    Each qconfig has a function that looks up the device of its layer. Converted networks take the qconfigs over, and
    would keep the float weights of every layer beside their own.
    """
    for qconfig in prepared.meta["_observed_graph_module_attrs"].node_name_to_qconfig.values():
        for constructor in qconfig or ():
            getattr(constructor, "callable_args", {}).pop("factory_kwargs", None)
