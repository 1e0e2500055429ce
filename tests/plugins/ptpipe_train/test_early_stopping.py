"""What early stopping can't monitor is found before the first stage where the data set is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

import ptpipe
from ptpipe import ExitCode, ManifestError, Outcome

MANIFEST = """\
version: 1
name: m
stages:
  data: {uses: data.synthetic, with: {num_train: 64, val_size: 16, num_test: 8, image_size: 8}}
  net: {uses: model.mlp, with: {hidden: [4]}}
  train:
    uses: train.supervised
    with: {epochs: 1, early_stopping: {metric: val_accuracy}}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(MANIFEST, encoding="utf-8")
    return path


def run(manifest: Path, **options: object) -> ptpipe.RunResult:
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    return ptpipe.run(manifest, overrides, artifacts=manifest.parent / "artifacts")


def test_a_misspelt_metric_is_found_where_the_data_set_is_stored(manifest: Path) -> None:
    misspelt = {"train__early_stopping": {"metric": "val_acuracy"}}
    assert run(manifest, **misspelt).exit_code is ExitCode.FAILED, "nothing is known of the data yet"
    text = manifest.read_text(encoding="utf-8").replace("val_accuracy", "val_acuracy")
    manifest.write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError) as caught:
        run(manifest)
    assert str(caught.value) == (
        f"{manifest}:8:48: train: early_stopping.metric: synthetic has no metric 'val_acuracy' "
        "(did you mean 'val_accuracy'?)"
    )


def test_a_missing_val_split_is_found_where_the_data_set_is_stored(manifest: Path) -> None:
    text = manifest.read_text(encoding="utf-8").replace("val_size: 16", "val_size: 0")
    manifest.write_text(text.replace("{metric: val_accuracy}", "{}"), encoding="utf-8")
    assert run(manifest, train__early_stopping=None).exit_code is ExitCode.DONE
    with pytest.raises(
        ManifestError, match=r"m.yaml:8:\d+: train: early_stopping needs a val split, and synthetic has"
    ):
        run(manifest)


def test_what_can_be_monitored_is_trained(manifest: Path) -> None:
    run(manifest, train__early_stopping=None)
    result = run(manifest)
    assert [stage.outcome for stage in result.stages.values()] == [Outcome.CACHED, Outcome.CACHED, Outcome.DONE]
