"""Strangers' bytes: files made to run code, to fill the memory or to hang, read as ptpipe reads them.

Each is read in a process of limited memory that reports the programs, connections and unpickled classes that it saw.
`PTPIPE_THOROUGH=1` adds the larger ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .attack import Attack
from .corpus import ATTACKS

pytestmark = [pytest.mark.plugins, pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")]
TESTS = Path(__file__).parent.parent
STUB = "#!/bin/sh\ntouch {canary}\n"


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Attack], dict[str, Any]]]:
    """Let the other process make an attack and read it."""
    folder = tmp_path_factory.mktemp("attacks")
    canary = folder / "canary"
    (folder / "bin").mkdir()
    for program in ("gs", "sh"):
        (folder / "bin" / program).write_text(STUB.format(canary=canary))
        (folder / "bin" / program).chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", "from attacks.victim import main; main()"],
        cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    numbers = iter(range(len(ATTACKS) + 1))

    def run(attack: Attack) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        place = folder / f"{next(numbers)}x{30 if not attack.is_thorough else 1500}"
        place.mkdir()
        print(json.dumps({"name": attack.name, "folder": str(place)}), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, f"the process that reads the files has ended: {process.wait()}"
        return {**json.loads(answer), "canary": canary.exists()}

    with process:
        yield run


@pytest.mark.parametrize(
    "attack",
    [pytest.param(attack, id=attack.name, marks=[pytest.mark.thorough] * attack.is_thorough) for attack in ATTACKS],
)
def test_an_attack_ends_in_one_line_and_runs_nothing(
    victim: Callable[[Attack], dict[str, Any]], attack: Attack, record_property: Callable[[str, object], None]
) -> None:
    answer = victim(attack)
    record_property("peak_mb", answer["peak_mb"])
    assert (answer["signal"], answer["ran"], answer["canary"], answer["left"]) == (0, [], False, []), answer
    found = f"{answer['error']}: {answer['text']}"
    if attack.expect is None:
        assert found == ": "
    else:
        assert answer["is_expected_type"], found
        assert re.search(attack.expect, found), found
        assert answer["text"].isprintable() and len(answer["text"]) < 1500, found
    assert re.fullmatch(attack.prints, answer["output"]), "something was written to the terminal"
    assert answer["peak_mb"] < attack.peak_mb, answer
    assert answer["seconds"] < attack.limit_s


def test_attacks_have_names_of_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) > 100
