"""Which arguments of a network's `forward` get the inputs, and which keep their defaults."""

from __future__ import annotations

import inspect


def has_kept_default(forward: inspect.Signature, name: str, num_inputs: int) -> bool:
    """Return whether an argument has a default and gets no input: inputs are the first ones, by position.

    `forward`: of the unbound method, with `self`. A network traced with a value in place of such a default would take
    the wrong side of `if mask is None`.
    """
    names = list(forward.parameters)
    return (
        name in forward.parameters
        and forward.parameters[name].default is not inspect.Parameter.empty
        and names.index(name) > num_inputs
    )
