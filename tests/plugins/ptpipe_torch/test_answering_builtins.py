"""Built-in functions that answer for what stands in the place of a tensor."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from ptpipe_torch.answering_builtins import answering_builtins


class Stand:
    """Stands for a tensor of three numbers."""

    value = torch.zeros(3)

    def __len__(self) -> int:
        return 99


def for_value(function: Any, stand: Stand, *arguments: Any) -> Any:
    return function(stand.value, *arguments)


def answers(stand: Any) -> list[Any]:
    return [
        isinstance(stand, torch.Tensor),
        isinstance(stand, (int, torch.Tensor)),
        torch.is_tensor(stand),
        torch.jit.isinstance(stand, torch.Tensor),
        callable(stand),
        len(stand),
    ]


NAMES = ("isinstance", "callable", "len")


def test_they_answer_for_the_value() -> None:
    with answering_builtins(NAMES, Stand, for_value, ()):
        assert answers(Stand()) == [True, True, True, True, False, 3]
    assert answers(Stand()) == [False, False, False, False, False, 99]


def test_what_asks_for_the_stand_in_itself_finds_it() -> None:
    with answering_builtins(NAMES, Stand, for_value, ()):
        assert isinstance(Stand(), Stand)
        assert isinstance(Stand(), (dict, Stand))


def test_internal_files_get_what_is_there() -> None:
    with answering_builtins(NAMES, Stand, for_value, (str(Path(__file__).parent),)):
        assert answers(Stand()) == [False, False, False, False, False, 99]


def test_other_values_are_none_of_its_business() -> None:
    with answering_builtins(NAMES, Stand, for_value, ()):
        assert answers([1, 2]) == [False, False, False, False, False, 2]
        assert isinstance(True, int)
        assert callable(print)


def test_the_functions_are_restored_after_an_error() -> None:
    before = [getattr(builtins, name) for name in NAMES]
    with pytest.raises(KeyError), answering_builtins(NAMES, Stand, for_value, ()):
        raise KeyError
    assert [getattr(builtins, name) for name in NAMES] == before
