"""Strings that came from users, plugins and files, made fit to be shown."""

from __future__ import annotations

import unicodedata

_UNSHOWABLE = "\N{REPLACEMENT CHARACTER}"


def one_line(text: str) -> str:
    """The text in one line, without anything that a terminal would obey.

    White space of any kind becomes single spaces. Control characters (escape sequences begin with one) and lone
    surrogates (undecodable file names) are replaced; invisible format characters (which can reverse the reading
    direction) are left out.
    """
    visible = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return "".join(map(_shown, " ".join(visible.split())))


def _shown(character: str) -> str:
    return _UNSHOWABLE if unicodedata.category(character) in {"Cc", "Cs"} else character
