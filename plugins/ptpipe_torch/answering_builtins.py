"""Built-in functions that answer for the values that a tracer has in the place of tensors.

Networks that check their inputs (`if not isinstance(x, torch.Tensor): raise TypeError`) would refuse the proxies of
torch.fx, and those that choose by a type would take the wrong branch. A proxy can't call itself a tensor by its
`__class__`: torch's C++ code would read it as one. Nor can `len` return the symbol of a size that is not fixed.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import _jit_internal

Answer: TypeAlias = Callable[..., Any]
"""Takes a built-in function, a value and further arguments; returns what the function is to return."""

_isinstance = isinstance
_CHECKS_OF_TORCH = {
    function.__code__ for function in (torch.is_tensor, torch.jit.isinstance, _jit_internal._isinstance)
}


@contextmanager
def answering_builtins(names: Sequence[str], type_: type, answer: Answer, internal: tuple[str, ...]) -> Iterator[None]:
    """Let these built-in functions return `answer(function, value, ...)` for values of a type.

    `internal`: folders whose files get what the functions return otherwise. That `torch.is_tensor` and
    `torch.jit.isinstance` are files of torch's makes no difference: who calls them matters.
    """
    with ExitStack() as restored:
        for name in names:
            original = getattr(builtins, name)
            restored.callback(setattr, builtins, name, original)
            setattr(builtins, name, _answering(original, type_, answer, internal))
        yield


def _answering(original: Answer, type_: type, answer: Answer, internal: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(value: Any, *arguments: Any) -> Any:
        if _isinstance(value, type_) and not _calling_code().co_filename.startswith(internal):
            is_asked_for = arguments and original(value, *arguments)  # by code that knows what tracers have
            return is_asked_for or answer(original, value, *arguments)
        return original(value, *arguments)

    return function


def _calling_code() -> CodeType:
    frame: Any = sys._getframe(2)
    while frame.f_code in _CHECKS_OF_TORCH:
        frame = frame.f_back
    code: CodeType = frame.f_code
    return code
