"""Errors of libraries in one line."""

from __future__ import annotations

import re

from ptpipe_torch.model.signature import BATCH

ON_VALUES = "it depends on the values of a tensor"
_MAX_LENGTH = 300
_CONSTANT_AXIS = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant")
_AXIS_DECIDES = re.compile(r"Constraints violated \((\w+)|Cannot create Dim with inconsistent")
_VALUES_DECIDE = re.compile(r"data-dependent expression|Dynamic control flow is not supported")
_CHANGED_PARAMETER = re.compile(
    r"fake tensor in the exported program constant's list.*?model attribute: ([\w.]*\w)", re.DOTALL
)
_FIXED_FORMS = (
    "Compute all cases and choose one by torch.where, give sizes as numbers, multiply by a mask in place of selecting "
    "by it (x[mask]), or compute that part outside of the network"
)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something, or its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:_MAX_LENGTH]


def root_cause(error: BaseException) -> BaseException:
    """Return the first of the exceptions that led to this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def export_failure(error: BaseException, *, remedy: str = "", place: str = "") -> str:
    """Return why `torch.export`, or what follows it, refused a network: its first cause, in one line.

    `remedy`: for an axis whose size the network makes a constant, another one than to write `x.shape[0]`. `place`:
    where the network did what was refused, as the end of a phrase.
    """
    constant = _CONSTANT_AXIS.search(str(error))
    if constant is not None:
        size, causes, instead = "x.shape[2]", "int(x.shape[2]) does", ""
        if constant[1] == BATCH:
            size, causes = "x.shape[0]", "int(x.shape[0]) and torch.take_along_dim do"
            instead = ", and x.gather in its place"
        advice = f"write {size}{instead}{remedy and f', or {remedy}'}"
        return f"it makes a constant of the size of the axis {constant[1]}, as {causes}: {advice}"
    axis = _AXIS_DECIDES.search(str(error))
    if axis is not None:
        where = f"the axis {axis[1]}" if axis[1] else "an axis"
        return f"which operators it runs depends on the size of {where}: take the same ones for all sizes"
    if depends_on_values(error):
        return f"a branch, a loop or a size depends on values of tensors{place}. {_FIXED_FORMS}"
    changed = _CHANGED_PARAMETER.search(str(error))
    if changed is not None:
        module = changed[1].rpartition(".")[0] or "the network"
        return (
            f"the forward pass of {module} changes a parameter (weight.data *= mask) or makes a tensor that it keeps"
            f"{place}: compute a new tensor, as F.conv2d(x, weight * mask, bias) does, which also becomes int8"
        )
    error = root_cause(error)
    line = "".join(char if char.isprintable() else " " for char in first_line(error))
    return f"{line if line == type(error).__name__ else f'{type(error).__name__}: {line}'}{place}"


def makes_constant_of_size(error: BaseException) -> bool:
    """Return whether `torch.export` stopped since a network makes a constant of a size that is not fixed."""
    return _CONSTANT_AXIS.search(str(error)) is not None


def depends_on_size(error: BaseException) -> bool:
    """Return whether `torch.export` stopped since a branch depends on the size of an axis that is not fixed."""
    return _AXIS_DECIDES.search(str(error)) is not None


def depends_on_values(error: BaseException) -> bool:
    """Return whether `torch.export` stopped at a branch, a loop or a size that depends on the values of a tensor."""
    return _VALUES_DECIDE.search(str(error)) is not None
