"""The three commands of docs/quantization.md, as they stand there: from an accuracy that fell to layer and remedy."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("manifests/accuracy_fell.yaml", "examples/accuracy_fell/digit_net.py")
PAGE = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## My accuracy fell\n")[2].partition("\n## ")[0]


def test_the_page_shows_both_files_in_full():
    manifest, network = ((ROOT / name).read_text(encoding="utf-8") for name in FILES)
    stages = manifest[manifest.index("version: 1\n") :]
    assert f"```yaml\n{stages}```\n" in SECTION
    assert f"```python\n{network}```\n" in SECTION


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_commands_lead_to_the_layer_and_to_the_remedy(tmp_path, forked_cli):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commands = [shlex.split(line) for line in re.findall(r"^\$ (.+)$", SECTION, re.MULTILINE)]
    assert [command[0] for command in commands] == ["ptpipe"] * 3
    refused, shown, remedied = (forked_cli(*command[1:]) for command in commands)

    assert refused.code == 3, refused.err
    assert re.search(r"^✗ quality +refused +int8 loses \d\d\.\d\d points", refused.out + refused.err, re.MULTILINE)

    assert shown.code == 0, shown.err
    _, worst = re.findall(r"^! why: ([^:]+): costs ", shown.out, re.MULTILINE)[:2]
    assert f"It is `{worst}`" in SECTION
    assert f".{worst}." in commands[2][-1]

    assert remedied.code == 0, remedied.err
    assert re.search(r"^✓ quality +passed ", remedied.out + remedied.err, re.MULTILINE)
