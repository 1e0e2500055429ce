"""The checks of `ptpipe doctor`: the core's own, and those of the plugins' `ptpipe_doctor` hooks."""

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
from ptpipe.check import Check, in_range, supported_python
from ptpipe.plan.vocabulary import Vocabulary, call_each

_TIGHT_BYTES, _FULL_BYTES = 5_000_000_000, 500_000_000


def diagnose(vocabulary: Vocabulary, artifacts: Path, workers: int = 0) -> list[Check]:
    """Check this installation and this machine; return the checks in reading order.

    `artifacts`: the folder to test for writing and free space. `workers`: how many processes to start for the
    process-group checks; 0 starts none. A plugin whose hook fails is a failed check itself.
    """
    python = supported_python()
    with contextlib.redirect_stdout(sys.stderr):  # results own stdout: what a plugin prints would spoil --json
        return [
            in_range("python", platform.python_version(), python, f"create the environment with Python {python}"),
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
        remedy = (
            f"install the missing package, or `pip install --upgrade` (or uninstall) the package that provides {name}"
        )
        yield Check.fail(f"plugin {name}", f"failed to load: {reason}", remedy)
    for problem in vocabulary.problems:
        yield Check.fail("plugins", str(problem), "fix that plugin, or leave it out")


def _writable(artifacts: Path) -> Check:
    """Write a temporary file to the folder, or to its nearest existing parent: a check creates no folders."""
    place = _nearest(artifacts)
    detail = str(place) if place == artifacts.absolute() else f"{artifacts.absolute()} (can be created)"
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = f"{place} can't be written to: {error.strerror or error}"
        return Check.fail("artifacts folder", reason, "fix its permissions, or choose another folder with --artifacts")
    return Check.ok("artifacts folder", detail)


def _space(artifacts: Path) -> Check:
    free_bytes = shutil.disk_usage(_nearest(artifacts)).free
    return check_free_space(free_bytes)


def check_free_space(free_bytes: int) -> Check:
    """Check the disk space that is left for results and checkpoints."""
    detail = f"{free_bytes / 1e9:.1f} GB free for artifacts"
    remedy = "`ptpipe gc` deletes old runs and their results; or choose another disk with --artifacts"
    if free_bytes < _FULL_BYTES:
        return Check.fail("disk", detail, remedy)
    return Check.warn("disk", detail, remedy) if free_bytes < _TIGHT_BYTES else Check.ok("disk", detail)


def _nearest(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.access(place, os.F_OK))


def _answers(vocabulary: Vocabulary, workers: int) -> Iterator[Check]:
    for answer in call_each(vocabulary.manager, "ptpipe_doctor", workers=workers):
        strange = [item for item in answer.items if not isinstance(item, Check)]
        reason = answer.error or (f"it returned {strange[0]!r}, which is not a Check" if strange else "")
        if reason:
            remedy = "fix the failed checks above first; if there are none, report it to the plugin's author"
            yield Check.fail(f"plugin {answer.plugin}", f"its checks failed: {reason}", remedy)
        else:
            yield from answer.items
