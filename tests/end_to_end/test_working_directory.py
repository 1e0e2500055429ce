"""Nothing is imported from the folder that one happens to be in, by any of a run's processes."""

from __future__ import annotations

import json

import pytest

from ..conftest import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TRAP = 'raise SystemExit("imported from the working directory")\n'
PLUGIN = """
from ptpipe import Context, Decision, StageConfig, Verdict, stage
from ptpipe_torch import Data, init_worker_group

from helpers import value


class Config(StageConfig):
    \"\"\"Options.\"\"\"

    workers: int = 1


@stage("my.check", workers=lambda config: config.workers)
def check(config: Config, ctx: Context, data: Data) -> Verdict:
    \"\"\"Pass, and say where a module came from.\"\"\"
    with init_worker_group(ctx, on_cuda=False):
        return Verdict(Decision.PASSED, value, {})
"""
MANIFEST = """
version: 1
name: traps
seed: 3
plugins: [./plugins/mine.py]
stages:
  data: {uses: data.digits, with: {batch_size: 64}}
  check: {uses: my.check, with: {workers: 2}}
  net: {uses: model.mlp}
  compare:
    uses: eval.compare
    needs: {models: [net]}
    with: {batch_sizes: [1], threads: [one], budget_s: 0.1}
"""


@pytest.fixture
def in_a_folder_of_traps(run_cli: CommandLine) -> CommandLine:
    """The command line, in a folder with modules named as those that Python and the plugin import."""
    for name in ("random", "statistics", "json", "runpy", "helpers"):
        (run_cli.folder / f"{name}.py").write_text(TRAP, encoding="utf-8")
    plugins = run_cli.folder / "plugins"
    plugins.mkdir()
    (plugins / "mine.py").write_text(PLUGIN, encoding="utf-8")
    (plugins / "helpers.py").write_text("value = 'beside the plugin'\n", encoding="utf-8")
    (run_cli.folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    return run_cli


def test_a_stage_of_several_workers_and_a_measurement(in_a_folder_of_traps: CommandLine) -> None:
    ended = in_a_folder_of_traps("run", "m.yaml", python=("-P",))
    assert ended.code == 0, ended.err
    assert "beside the plugin" in ended.err


def test_the_trials_of_a_sweep(in_a_folder_of_traps: CommandLine) -> None:
    arguments = ("m.yaml", "-s", "compare.batch_sizes=[]", "--over", "check.workers=1,2", "--json")
    swept = in_a_folder_of_traps("sweep", *arguments, python=("-P",))
    assert swept.code == 0, swept.err
    assert [trial["exit_code"] for trial in json.loads(swept.out)["trials"]] == [0, 0]
