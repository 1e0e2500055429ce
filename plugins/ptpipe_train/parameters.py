"""Parameters chosen by patterns of their names: which ones are frozen, and which learn at another rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ptpipe import StageError, nearest
from ptpipe_torch import Undecayed

_NUM_SHOWN = 5


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name matches a pattern, in place.

    A norm with running statistics of which no weight is left to train is put in eval mode: it normalizes by these and
    keeps them; one without weights of its own, where all of the module around it are frozen. Raises StageError for a
    pattern that matches no parameter, and where none is left to train.
    """
    names = _names(module)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise StageError(
            f"nothing to train: none of the network's {len(names)} parameters requires a gradient. If they were "
            "loaded so, call requires_grad_() on the network in the function that makes it"
        )
    for pattern in patterns:
        for name in _matching("freeze", pattern, names):
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise StageError(f"freeze: no parameter is left to train ({', '.join(patterns)} freeze all {len(names)})")
    frozen = {id(parameter) for name, parameter in names.items() if any(fnmatchcase(name, p) for p in patterns)}
    for name, layer in module.named_modules():
        if isinstance(layer, _NormBase) and frozen.issuperset(map(id, _nearest_parameters(module, name))):
            layer.eval()


def _nearest_parameters(module: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters of a layer itself; where it has none, those of the smallest module around it with any."""
    found = list(module.get_submodule(name).parameters(recurse=False))
    while not found:
        name = name.rpartition(".")[0]
        found = list(module.get_submodule(name).parameters())
    return found


def norms_in_eval_mode(module: nn.Module) -> list[nn.Module]:
    """Return the norms that may have running statistics, and keep them: those in eval mode."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and not layer.training]


def resolve_lr_factors(module: nn.Module, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each trained parameter that a pattern matches, by name: that of the first pattern.

    Raises StageError for a pattern that decides the factor of no trained parameter.
    """
    names = _names(module)
    found: dict[int, float] = {}
    for pattern, factor in factors.items():
        trained = [names[name] for name in _matching("lr_factors", pattern, names) if names[name].requires_grad]
        if not trained:
            raise StageError(f"lr_factors: every parameter that {pattern!r} matches is frozen")
        undecided = [parameter for parameter in trained if id(parameter) not in found]
        if not undecided:
            raise StageError(
                f"lr_factors: patterns before {pattern!r} match every parameter that it matches, and the first match "
                "counts: put it before them"
            )
        found |= {id(parameter): factor for parameter in undecided}
    # One name for each: that under which an optimizer finds it.
    return {name: found[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in found}


def undecayed_parameters(module: nn.Module) -> set[str]:
    """Return the names of the parameters that their layers exempt from weight decay; of a shared one, each."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, Undecayed)
        for name in layer.undecayed
    }


def _names(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name; a shared one under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def _matching(option: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches. Raises StageError where there are none."""
    if matching := [name for name in names if fnmatchcase(name, pattern)]:
        return matching
    prefixes = {f"{prefix}.*": None for name in names for prefix in _prefixes(name)}
    if close := nearest(pattern, [*prefixes, *names]):
        hint = f"did you mean {close!r}?"
    else:
        shown = list(names)[:_NUM_SHOWN]
        hint = f"there are {', '.join(shown)}{' and others' if len(shown) < len(list(names)) else ''}"
    raise StageError(f"{option}: no parameter's name matches {pattern!r} ({hint})")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts))]
