"""Check the subjects of commits: one imperative line of at most 72 characters.

`commit_subject.py FILE` reads a message (git's hook commit-msg), `commit_subject.py` the new commits of HEAD.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Earlier subjects stay: history is not rewritten. A shallow clone knows a date, but perhaps not a commit.
NEW_SINCE = "2026-11-25T03:54:00Z"
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


def subject_of(message: Path) -> str:
    """Return the first line that is no comment."""
    lines = message.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line and not line.startswith("#")), "")


def new_subjects() -> list[str]:
    """Return the subjects of HEAD's commits since `NEW_SINCE`; none, with a notice, outside of a clone."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        print("commit subjects are not checked: this is no git clone, or git is not installed", file=sys.stderr)
        return []
    log = ["git", "-C", str(ROOT), "log", "--no-merges", f"--since={NEW_SINCE}", "--format=%s"]
    return subprocess.run(log, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()  # noqa: S603


def main(messages: list[str]) -> int:
    """Print every problem and return the exit code."""
    subjects = [subject_of(Path(message)) for message in messages] or new_subjects()
    found = [f"{subject!r}: {problem}" for subject in subjects for problem in problems(subject)]
    if found:
        print(*found, "reword them: `git commit --amend`, or `git rebase -i` for older ones", sep="\n", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
