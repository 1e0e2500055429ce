"""What one of several workers imports by a computed name is a dependency of the stage's result."""

from __future__ import annotations

from pathlib import Path

PLUGIN = '''
import importlib

from ptpipe import Context, StageConfig, stage
from ptpipe_torch import Ranges


@stage("workers.imports", workers=lambda config: 2)
def imports(config: StageConfig, ctx: Context) -> Ranges:
    """Import a module in worker 1 alone."""
    if ctx.rank == 1:
        importlib.import_module("dy" + "n")
    return Ranges({}, 0)
'''


def test_a_module_that_a_worker_imports(tmp_path: Path, run_cli) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "dyn.py").write_text("A = 1\n")
    (tmp_path / "m.yaml").write_text(
        "version: 1\nname: imports\nplugins: [./plugin.py]\nstages:\n  t: {uses: workers.imports}\n"
    )
    ended = run_cli("run", "m.yaml")
    assert ended.code == 0, ended.err
    assert run_cli("plan", "m.yaml", "--json").json["stages"][0]["cached"]
    (tmp_path / "dyn.py").write_text("A = 2\n")
    (stage,) = run_cli("plan", "m.yaml", "--json").json["stages"]
    assert stage["reasons"] == ["a module it imported changed: dyn.py"]
