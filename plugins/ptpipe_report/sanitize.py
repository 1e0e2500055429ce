"""Neutralize text of users, plugins and files before it reaches a terminal or a report."""

from __future__ import annotations

import unicodedata

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def one_line(text: str) -> str:
    """Return the text on one line, without anything that a terminal interprets.

    Whitespace of any kind collapses to single spaces. Control characters (escape sequences start with one) and lone
    surrogates (undecodable file names) are replaced; invisible format characters (which can reverse the reading
    direction) are removed.
    """
    visible = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return "".join(map(_printable, " ".join(visible.split())))


def _printable(character: str) -> str:
    return _REPLACEMENT if unicodedata.category(character) in {"Cc", "Cs"} else character
