"""Text of manifests, records, plugins and files, made safe to print."""

from __future__ import annotations

import re

_MAX_DETAILS = 3
"""Of pydantic's errors, how many are shown in a line."""
_WHITESPACE = re.compile(r"\s+")
# Characters without a shape of their own that Unicode does not count as format characters: they hide text.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U0001d159\U000e0100-\U000e01ef]"
)


def one_line(text: str) -> str:
    r"""Return `text` on one line, with every character that a reader could not see escaped: `\x1b`, `\u202e`.

    Control characters start a terminal's commands, format characters reverse or hide what follows, private and
    unassigned ones show as anything, and lone surrogates (undecodable file names) can't be encoded. Line breaks and
    tabs become a space.
    """
    if not text.isprintable():
        text = _WHITESPACE.sub(lambda run: " " if run[0].strip(" ") else run[0], text.rstrip())
        text = "".join(character if character.isprintable() else _escaped(character) for character in text)
    return _INVISIBLE.sub(lambda found: _escaped(found[0]), text)


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says; a plugin's may raise when it is asked."""
    return error_text(error).strip().partition("\n")[0]


def error_text(error: BaseException) -> str:
    """Return what `error` says, or that its `__str__` raised: a plugin's may."""
    try:
        return _text(error)
    except Exception as second:  # noqa: BLE001  # a plugin's `__str__` may raise anything
        return f"<its __str__ raised {type(second).__name__}>"


def _text(error: BaseException) -> str:
    """Return an exception's text, and the reason where its class puts it below the first line."""
    from pluggy import PluginValidationError  # `ptpipe --help` needs neither
    from pydantic import ValidationError

    if isinstance(error, PluginValidationError):
        return str(error).replace("\n", "; ")
    if not isinstance(error, ValidationError):
        return str(error)
    details = error.errors(include_url=False, include_input=False)
    shown = [
        ": ".join([*map(str, detail["loc"]), detail["msg"].removeprefix("Value error, ")])
        for detail in details[:_MAX_DETAILS]
    ]
    shown += [f"and {len(details) - _MAX_DETAILS} more"] if len(details) > _MAX_DETAILS else []
    return f"{error.title}: {'; '.join(shown)}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
