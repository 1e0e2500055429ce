"""What `ptpipe doctor` looks at: the core's own checks, and the plugins' answers to `ptpipe_doctor`."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ptpipe import __version__
from ptpipe.check import Check, in_range
from ptpipe.plan.vocabulary import Vocabulary, call_each

PYTHON = ("3.11", "3.14")
"""First version that works, and first that is not known to."""
_TIGHT_BYTES, _FULL_BYTES = 5_000_000_000, 500_000_000


def diagnose(vocabulary: Vocabulary, artifacts: Path, workers: int = 0) -> list[Check]:
    """Look at this installation and this machine, in the order in which a person wants to read it.

    `workers`: how many processes to try to work together, 0: none. A plugin that fails to answer is a finding itself.
    """
    with contextlib.redirect_stdout(sys.stderr):  # results own stdout: what a plugin prints would spoil --json
        return [
            in_range("python", platform.python_version(), *PYTHON, remedy="make the environment with a Python between"),
            Check.ok("ptpipe", __version__),
            *_plugins(vocabulary),
            _writable(artifacts),
            _space(artifacts),
            *_answers(vocabulary, workers),
        ]


def _plugins(vocabulary: Vocabulary) -> Iterator[Check]:
    for plugin in vocabulary.plugins:
        num_kinds = sum(owner is plugin for owner in vocabulary.owners.values())
        kinds = f"{num_kinds} stage kind{'s' * (num_kinds != 1)}" if num_kinds else "no stage kinds"
        yield Check.ok(f"plugin {plugin.name}", f"{plugin.source}, {kinds}")
    for name, reason in vocabulary.broken.items():
        remedy = f"install what it misses, or `pip install --upgrade` (or uninstall) what brings {name}"
        yield Check.fail(f"plugin {name}", f"failed to load: {reason}", remedy)
    for problem in vocabulary.problems:
        yield Check.fail("plugins", str(problem), "mend that plugin, or leave it out")


def _writable(artifacts: Path) -> Check:
    """Try the folder, or the nearest one above it that is there: looking makes no folders."""
    place = _nearest(artifacts)
    there = str(place) if place == artifacts.absolute() else f"{artifacts.absolute()} (can be made)"
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = f"{place} can't be written to: {error.strerror or error}"
        return Check.fail("artifacts folder", reason, "mend its permissions, or choose another with --artifacts")
    return Check.ok("artifacts folder", there)


def _space(artifacts: Path) -> Check:
    free_bytes = shutil.disk_usage(_nearest(artifacts)).free
    return check_free_space(free_bytes)


def check_free_space(free_bytes: int) -> Check:
    """Judge the room that is left for results and checkpoints."""
    detail = f"{free_bytes / 1e9:.1f} GB free for artifacts"
    remedy = "`ptpipe gc` deletes old runs and what only they used; or choose another disk with --artifacts"
    if free_bytes < _FULL_BYTES:
        return Check.fail("disk", detail, remedy)
    return Check.warn("disk", detail, remedy) if free_bytes < _TIGHT_BYTES else Check.ok("disk", detail)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.access(place, os.F_OK))


def _answers(vocabulary: Vocabulary, workers: int) -> Iterator[Check]:
    for answer in call_each(vocabulary.manager, "ptpipe_doctor", workers=workers):
        strange = [item for item in answer.items if not isinstance(item, Check)]
        reason = answer.error or (f"it gave {strange[0]!r}, which is no Check" if strange else "")
        if reason:
            remedy = "see to what lacks above first; if nothing does, tell the plugin's author"
            yield Check.fail(f"plugin {answer.plugin}", f"could not look: {reason}", remedy)
        else:
            yield from answer.items
