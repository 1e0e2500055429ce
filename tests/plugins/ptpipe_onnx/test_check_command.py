from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from ptpipe import Context, IntegrityError, StageError, UsageError
from ptpipe_onnx import ExportConfig, export_onnx, reproduction
from ptpipe_onnx.check_command import check
from ptpipe_onnx.reproduction import _may_saturate, difference_of
from ptpipe_onnx.vectors import Tolerance, Vectors
from ptpipe_torch import Data, Model, OnnxFile

from .conftest import NARROW, Exported
from .test_layer_norms import normalized_model

Export = Callable[..., OnnxFile]
Make = Callable[..., Model]


@pytest.fixture
def shipped(exported: Callable[..., Exported], tmp_path: Path) -> Path:
    """A file and its vectors, alone in a folder."""
    folder = tmp_path / "target"
    folder.mkdir()
    exported("cnn", "fbgemm", narrow=NARROW).file.save(folder)
    return folder / "model.onnx"


def run(*arguments: object) -> tuple[int, str]:
    """Return exit code and output; the command raises what the command line turns into an exit code."""
    result = CliRunner().invoke(check, [str(argument) for argument in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.stdout


def altered(path: Path, **changes: object) -> Path:
    """Write the vectors with other arrays or another description."""
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(str(arrays["about"]))
    for name, value in changes.items():
        if name in about:
            about[name] = value
        else:
            arrays[name.replace("__", ".")] = value
    arrays["about"] = np.array(json.dumps(about))
    other = path.parent / "other.npz"
    np.savez(other, **arrays)
    return other


def test_a_file_reproduces_its_vectors(shipped: Path) -> None:
    code, output = run(shipped)
    assert code == 0
    assert "model.onnx reproduces its 8 test vectors on this machine" in output
    assert "100.00%" in output
    assert "equal" in output
    code, output = run(shipped, "--json")
    found = json.loads(output)
    assert (code, found["reproduced"], found["num_samples"]) == (0, True, 8)
    assert found["outputs"]["logits"]["max_abs_difference"] == 0
    assert found["outputs"]["logits"]["match"] == "equal"
    assert 0 < found["outputs"]["logits"]["rms_allowed"] < found["outputs"]["logits"]["max_abs_allowed"]
    assert found["made_with"].keys() == {"ptpipe", "onnxruntime", "architecture"}
    assert found["made_with"].items() <= found["here"].items()


def test_neither_torch_nor_onnx_is_imported(shipped: Path) -> None:
    code = (
        "import sys; from ptpipe_onnx.check_command import check\n"
        f"code = check([{str(shipped)!r}], standalone_mode=False)\n"
        "print(code, [name for name in ('torch', 'onnx', 'onnx_ir', 'ptpipe_quant') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_other_outputs_fail_with_figures(shipped: Path) -> None:
    vectors = shipped.with_suffix(".vectors.npz")
    logits_NK = Vectors.load(vectors).outputs["logits"]
    code, output = run(shipped, "--vectors", altered(vectors, output__logits=logits_NK[:, ::-1] * 2))
    assert code == 1
    assert "does not reproduce" in output
    assert "differs" in output


def test_another_model_and_damaged_bytes_are_distinguished_from_a_difference(shipped: Path) -> None:
    vectors = shipped.with_suffix(".vectors.npz")
    content = shipped.read_bytes()
    shipped.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="not the file that these test vectors were made for"):
        run(shipped)
    vectors.write_bytes(vectors.read_bytes()[:-40])
    with pytest.raises(IntegrityError, match="can't be read as test vectors"):
        run(shipped)


@pytest.mark.parametrize(
    "changes",
    [
        {"input__images": np.array([None] * 8, dtype=object)},
        {"input__images": np.zeros((3, 1, 16, 16), np.float32)},
        {"output__logits": np.zeros((8, 10), np.complex64)},
        {"tolerances": {}},
        {"tolerances": {"logits": {"max_abs": 1, "rms": 1, "scales": [], "class_axis": 7}}},
        {"tolerances": {"logits": {"max_abs": 1, "rms": 1, "scales": [1.0], "class_axis": 1}}},
        {"made_with": 3},
    ],
)
def test_what_are_no_vectors(shipped: Path, changes: dict[str, object]) -> None:
    vectors = shipped.with_suffix(".vectors.npz")
    if any(getattr(value, "dtype", None) == np.dtype(object) for value in changes.values()):
        np.savez(vectors.parent / "other.npz", **changes)
        path = vectors.parent / "other.npz"
    else:
        path = altered(vectors, **changes)
    with pytest.raises(IntegrityError, match="can't be read as test vectors"):
        Vectors.load(path)


def test_files_that_are_missing(shipped: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        run(shipped.with_name("gone.onnx"))
    shutil.move(shipped.with_suffix(".vectors.npz"), shipped.with_name("v.npz"))
    with pytest.raises(UsageError, match="name them with --vectors"):
        run(shipped)
    assert run(shipped, "--vectors", shipped.with_name("v.npz"))[0] == 0


def test_the_vectors_are_stored_and_delivered(
    shipped: Path, run_export: Export, float_model: Make, tmp_path: Path
) -> None:
    assert OnnxFile.deliverables(shipped.parent) == ("model.onnx", "model.vectors.npz")
    assert OnnxFile.load(shipped.parent).test_vectors == shipped.with_suffix(".vectors.npz")
    bare = run_export(float_model("cnn"), num_samples=16, num_test_vectors=0)
    assert bare.test_vectors is None
    (tmp_path / "bare").mkdir()
    bare.save(tmp_path / "bare")
    assert OnnxFile.deliverables(tmp_path / "bare") == ("model.onnx",)


def test_equal_models_give_equal_vectors(run_export: Export, float_model: Make) -> None:
    contents = [run_export(float_model("cnn"), num_samples=16).test_vectors.read_bytes() for _ in range(2)]
    assert contents[0] == contents[1]


def test_differences_are_in_units_of_the_columns() -> None:
    expected_NK = np.zeros((4, 2), np.float32)
    found_NK = np.tile(np.array([30, 0.5], np.float32), (4, 1))
    output = difference_of(found_NK, expected_NK, Tolerance(3, 3, scales=(10.0, 1.0)))
    assert output.max_abs == 3
    assert output.is_reproduced
    assert output.top1_agreement is None
    assert not difference_of(found_NK, expected_NK, Tolerance(2.9, 3, scales=(10.0, 1.0))).is_reproduced
    assert not difference_of(found_NK * np.nan, expected_NK, Tolerance(3, 3)).is_reproduced
    with pytest.raises(StageError, match="its vectors have"):
        difference_of(found_NK[:2], expected_NK, Tolerance(1, 1))
    maps = [np.repeat(values[..., None, None], 5, axis=-1) for values in (found_NK, expected_NK)]
    assert difference_of(*maps, Tolerance(3, 3, scales=(10.0, 1.0))).max_abs == 3


@pytest.mark.parametrize(
    ("architecture", "vnni", "layers", "may"),
    [
        ("x86_64", "none", '["0"]', True),
        ("AMD64", "unknown", '["0"]', True),
        ("x86_64", "avx_vnni", '["0"]', False),
        ("aarch64", "none", '["0"]', False),
        ("x86_64", "none", "[]", False),
    ],
)
def test_where_saturation_may_explain_a_difference(architecture: str, vnni: str, layers: str, may: bool) -> None:
    here = {"architecture": architecture, "vnni": vnni}
    assert _may_saturate(here, {"saturating_layers_without_vnni": layers}) is may


@pytest.mark.parametrize(
    ("difference", "step", "match"),
    [(0, 0.25, "equal"), (0.25, 0.25, "one step"), (0.5, 0.25, "within tolerance"), (0.25, None, "within tolerance")],
)
def test_how_outputs_match(difference: float, step: float | None, match: str) -> None:
    expected_NK = np.ones((4, 3), np.float32)
    found_NK = expected_NK + np.float32(difference) * np.eye(4, 3, dtype=np.float32)
    assert difference_of(found_NK, expected_NK, Tolerance(1, 1, step=step)).match == match
    assert difference_of(found_NK + 2, expected_NK, Tolerance(1, 1, step=step)).match == "differs"


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_other_kernels_are_within_the_tolerance(backend: str, run_export: Export, int8_model: Make) -> None:
    """Without its fusions ONNX Runtime computes the same network in float between the roundings."""
    file = run_export(int8_model("mobile", backend), num_samples=100, num_test_vectors=64)
    vectors = Vectors.load(file.test_vectors)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(file.path), options, providers=["CPUExecutionProvider"])
    (logits_NK,) = session.run(["logits"], dict(vectors.inputs))
    expected_NK, tolerance = vectors.outputs["logits"], vectors.tolerances["logits"]
    assert difference_of(logits_NK, expected_NK, tolerance).is_reproduced
    assert tolerance.step < tolerance.max_abs < expected_NK.std() / 2


def test_the_code_of_the_documentation_runs(shipped: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "onnx.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=shipped.parent, capture_output=True, text=True, check=True, timeout=100
    )
    assert re.fullmatch(r"logits 0\.0 allowed: \d\.\d+\n", done.stdout)


def test_wrong_products_of_integers_are_named_though_nothing_differs(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors' batch may be too small to show them."""
    vectors = Vectors.load(shipped.with_suffix(".vectors.npz"))
    assert "multiplies integers wrongly" not in reproduction.reproduce(shipped, vectors).hint
    monkeypatch.setattr("ptpipe_onnx.integer_products.are_right", lambda: False)
    found = reproduction.reproduce(shipped, vectors)
    assert found.is_reproduced
    assert found.hint.startswith(f"onnxruntime {ort.__version__} multiplies integers wrongly on this processor")


def test_inexact_layer_norms_are_named_where_outputs_differ(
    digits: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = Context("onnx", "export.onnx", 7, tmp_path)
    path = export_onnx(ExportConfig(num_samples=8), ctx, normalized_model(), digits).path
    vectors, here = path.with_suffix(".vectors.npz"), reproduction.environment()
    monkeypatch.setattr(reproduction, "environment", lambda: here)
    for version, offset, is_named in (("1.26.0", 9.0, True), ("1.26.0", 0.0, False), ("1.27.0", 9.0, False)):
        here["onnxruntime"] = version
        shifted = Vectors.load(vectors).outputs["logits"] + np.float32(offset)
        found = reproduction.reproduce(path, Vectors.load(altered(vectors, output__logits=shifted)))
        assert found.is_reproduced == (offset == 0)
        assert found.hint.startswith("onnxruntime 1.26.0 computes the variance in layer norms") == is_named
        assert bool(found.hint) == is_named


def test_more_than_a_step_without_vnni_names_saturation(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = shipped.with_suffix(".vectors.npz")
    original = Vectors.load(vectors)
    step = original.tolerances["logits"].step
    assert step is not None
    here = reproduction.environment() | {"architecture": "x86_64", "vnni": "none"}
    monkeypatch.setattr(reproduction, "environment", lambda: here)
    monkeypatch.setattr(reproduction, "_may_saturate", lambda here, metadata: here["vnni"] == "none")
    for num_steps, hint in ((0, ""), (1, ""), (2, "this processor has no VNNI")):
        logits_NK = original.outputs["logits"].copy()
        logits_NK[0, 0] += num_steps * step
        found = reproduction.reproduce(shipped, Vectors.load(altered(vectors, output__logits=logits_NK)))
        assert found.is_reproduced
        assert found.hint.startswith(hint) and bool(found.hint) == bool(hint)
