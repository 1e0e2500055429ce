"""Check the subject of a commit message: one imperative line of at most 72 characters.

`commit_subject.py FILE` reads a message (git's hook commit-msg), `commit_subject.py -` one subject a line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_LENGTH = 72
MADE_BY_GIT = re.compile(r"(Merge|Revert|fixup!|squash!|amend!) ?")
# Not a grammar: the usual slips, "Added", "Adding" and "Adds".
ENDS_AS_VERBS_DO = {"Bring", "Embed", "Feed", "Need", "Seed", "Shed", "Speed", "Spring", "String"}
NOT_IMPERATIVE = re.compile(r"(\w+(ed|ing)|(Add|Allow|Change|Fix|Improve|Make|Move|Remove|Rename|Update|Use)(s|es))\b")


def problems(subject: str) -> list[str]:
    """Return what is wrong with a subject, one line each."""
    if MADE_BY_GIT.match(subject):
        return []
    found = []
    if len(subject) > MAX_LENGTH:
        found.append(f"{len(subject)} characters, {MAX_LENGTH} are allowed")
    if not subject[:1].isupper():
        found.append("begin with a capital letter")
    if subject.endswith("."):
        found.append("no full stop at the end")
    if (first := NOT_IMPERATIVE.match(subject)) and first[0] not in ENDS_AS_VERBS_DO:
        found.append('begin with an imperative: "Add", not "Added", "Adds" or "Adding"')
    return found


def main(source: str) -> int:
    """Print every problem and return the exit code."""
    if source == "-":
        subjects = sys.stdin.read().splitlines()
    else:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
        subjects = [next((line for line in lines if line and not line.startswith("#")), "")]
    found = [f"{subject!r}: {problem}" for subject in subjects for problem in problems(subject)]
    print("\n".join(found), file=sys.stderr, end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
