"""Files that are quantized twice are found when the manifest is bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptpipe import ManifestError, load_plan

HEAD = """\
version: 1
name: twice
stages:
  data:  {uses: data.digits}
  net:   {uses: model.small_cnn}
  float: {uses: export.onnx, needs: {model: net}}
  small: {uses: quant.dynamic, needs: {model: net}}
"""


def problems(folder: Path, *stages: str) -> list[str]:
    path = folder / "twice.yaml"
    path.write_text(HEAD + "".join(f"  {stage}\n" for stage in stages), encoding="utf-8")
    try:
        load_plan(path)
    except ManifestError as error:
        return [problem.message for problem in error.problems]
    return []


@pytest.mark.parametrize("kind", ["quant.onnx", "quant.weight_only"])
def test_a_float_file_is_taken(kind: str, tmp_path: Path) -> None:
    assert problems(tmp_path, f"again: {{uses: {kind}, needs: {{model: float}}}}") == []


@pytest.mark.parametrize(
    ("before", "culprit"),
    [
        ("int8: {uses: export.onnx, needs: {model: small}}", "small (quant.dynamic)"),
        ("int8: {uses: quant.onnx, needs: {model: float}}", "int8 (quant.onnx)"),
        ("int8: {uses: quant.weight_only, needs: {model: float}}", "int8 (quant.weight_only)"),
    ],
)
@pytest.mark.parametrize("kind", ["quant.onnx", "quant.weight_only"])
def test_a_quantized_file_is_refused(kind: str, before: str, culprit: str, tmp_path: Path) -> None:
    found = problems(tmp_path, before, f"again: {{uses: {kind}, needs: {{model: int8}}}}")
    assert found == [f"again: needs a float file, but {culprit} has quantized it"]


@pytest.mark.parametrize("options", ["preprocessing: nchw", "postprocessing: true"])
def test_a_file_with_more_than_the_network_is_refused(options: str, tmp_path: Path) -> None:
    whole = f"whole: {{uses: export.onnx, needs: {{model: net}}, with: {{{options}}}}}"
    found = problems(tmp_path, whole, "again: {uses: quant.onnx, needs: {model: whole}}")
    assert found == ["again: needs the network alone, but whole has preprocessing or postprocessing in its file"]
