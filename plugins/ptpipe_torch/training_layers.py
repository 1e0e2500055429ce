"""Layers that do something in training alone, as stochastic depth and noise do."""

from __future__ import annotations

import inspect

from torch import nn


def may_act_in_training_alone(layer: nn.Module) -> bool:
    """Return whether a layer may return its input in eval mode, and something else in train mode.

    Such a layer has no parameters, no buffers and no layers of its own, and its forward pass asks for the mode.
    """
    code = getattr(inspect.unwrap(getattr(type(layer), "forward", layer.forward)), "__code__", None)
    is_empty = not any(True for part in (layer.children(), layer.parameters(), layer.buffers()) for _ in part)
    return is_empty and code is not None and "training" in code.co_names
