"""`ptpipe stages`, of a kind that nobody offers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ptpipe import UsageError
from ptpipe.cli.stages import stages


def test_installed_plugins_that_may_have_an_unknown_kind_are_named(project, monkeypatch, capsys):
    broken = SimpleNamespace(name="acme", value="acme_that_is_not_there")
    monkeypatch.setattr("ptpipe.plan.vocabulary._entry_points", lambda: [broken])
    with pytest.raises(UsageError, match=r"there is no stage kind 'acme.prune'; name the plugin"):
        stages.main(["acme.prune"], standalone_mode=False)
    assert capsys.readouterr() == (
        "",
        "warning: plugin acme failed to load: ModuleNotFoundError: No module named 'acme_that_is_not_there'\n",
    )
