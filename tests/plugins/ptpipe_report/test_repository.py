from __future__ import annotations

from ptpipe_report.repository import path_in_repository


def test_the_root_is_the_nearest_folder_with_git(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine" / "manifests").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "mine" / ".git").write_text("gitdir: elsewhere")  # a work tree, or a submodule
    monkeypatch.chdir(tmp_path / "mine" / "manifests")
    assert path_in_repository("m.yaml") == "manifests/m.yaml"
    assert path_in_repository(str(tmp_path / "m.yaml")) == "m.yaml"


def test_without_git_it_is_the_workspace_and_else_the_working_directory(tmp_path, monkeypatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    assert path_in_repository("m.yaml") == "m.yaml"
    assert path_in_repository("../m.yaml").endswith("/m.yaml")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert path_in_repository("m.yaml") == "a/b/m.yaml"
    assert path_in_repository("/elsewhere/m.yaml") == "/elsewhere/m.yaml"
