"""Functions that a stored recipe may name: builders make a network, transforms change one.

A recipe is data and may come from anywhere, so a name in it runs nothing unless its function was marked with
`@builder` or `@transform`, in a package that the user's plugins have already loaded.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ptpipe import JSON, IntegrityError

if TYPE_CHECKING:
    from torch import nn

_MARK = "__ptpipe_part__"
F = TypeVar("F", bound=Callable[..., "nn.Module"])


def builder(function: F) -> F:
    """Mark a module-level function `(**arguments) -> nn.Module` as one that recipes may name.

    Arguments must be JSON values. The same arguments must give the same architecture (weights may be random).
    """
    setattr(function, _MARK, "builder")
    return function


def transform(function: F) -> F:
    """Mark a module-level function `(module: nn.Module, **arguments) -> nn.Module` as one that recipes may name."""
    setattr(function, _MARK, "transform")
    return function


@dataclass(frozen=True)
class Part:
    """A marked function's address, `package.module:function`, and its JSON arguments."""

    address: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], **arguments: JSON) -> Part:
        """The part that calls this marked function."""
        assert hasattr(function, _MARK), f"{function} is not marked with @builder or @transform"
        return cls(f"{function.__module__}:{function.__qualname__}", json.loads(json.dumps(arguments)))

    def resolve(self, role: str) -> Callable[..., nn.Module]:
        """The function itself. `role` is 'builder' or 'transform'.

        Raises IntegrityError where the address names anything but a function so marked, in a loaded plugin.
        """
        module_name, _, function_name = self.address.partition(":")
        if module_name.partition(".")[0] not in sys.modules:
            raise IntegrityError(f"{self.address}: its plugin is not loaded (name it under `plugins:`)")
        try:
            function = getattr(importlib.import_module(module_name), function_name, None)
        except ImportError as error:
            raise IntegrityError(f"{self.address}: {error}") from error
        if getattr(function, _MARK, None) != role:
            raise IntegrityError(f"{self.address} is not a {role}")
        assert callable(function)
        return function
