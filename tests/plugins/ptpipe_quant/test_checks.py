"""Quant stages in an order that can't work are found when the manifest is bound, by the real binder."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ptpipe import ExitCode, ManifestError, load_plan

PARTS = '''
from __future__ import annotations
from collections.abc import Sequence
from ptpipe import Context, StageConfig, hookimpl, stage
from ptpipe_torch import Data, Deployable, Model

class None_(StageConfig):
    """No options."""

@stage("toy.data")
def data(config: None_, ctx: Context) -> Data: ...

@stage("toy.net")
def net(config: None_, ctx: Context, data: Data) -> Model: ...

@stage("toy.train")
def train(config: None_, ctx: Context, model: Model, data: Data) -> Model: ...

@stage("toy.average")
def average(config: None_, ctx: Context, models: Sequence[Model]) -> Model: ...

@stage("toy.eval")
def evaluate(config: None_, ctx: Context, model: Deployable) -> Deployable: ...

@hookimpl
def ptpipe_stages():
    return [data, net, train, average, evaluate]
'''

HEAD = """\
version: 1
name: toy
plugins: [./parts.py]
stages:
  data: {uses: toy.data}
  net: {uses: toy.net}
"""

STATIC = [
    "static: {uses: quant.prepare, needs: {model: net}}",
    "seen: {uses: quant.calibrate, needs: {model: static}}",
    "int8: {uses: quant.convert, needs: {model: seen.model}}",
]
QAT = [
    "fake: {uses: quant.prepare_qat, needs: {model: net}}",
    "tuned: {uses: toy.train, needs: {model: fake}}",
    "int8: {uses: quant.convert, needs: {model: tuned}}",
]


def problems(folder: Path, *stages: str) -> list[str]:
    (folder / "parts.py").write_text(PARTS, encoding="utf-8")
    manifest = folder / "toy.yaml"
    manifest.write_text(HEAD + textwrap.indent("\n".join(stages) + "\n", "  "), encoding="utf-8")
    try:
        load_plan(manifest)
    except ManifestError as error:
        assert error.exit_code is ExitCode.USAGE
        assert all(problem.location for problem in error.problems)
        return [problem.message for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "stages",
    [
        STATIC,
        QAT,
        ["small: {uses: quant.dynamic, needs: {model: net}}"],
        [*STATIC[:2], "why: {uses: quant.analyze, needs: {model: seen.model}}"],
        # A prepared model may be evaluated, and calibrated before it is trained.
        [STATIC[0], "look: {uses: toy.eval, needs: {model: static}}"],
        [
            QAT[0],
            "seen: {uses: quant.calibrate, needs: {model: fake}}",
            "int8: {uses: quant.convert, needs: {model: seen.model}}",
        ],
        # Ranges that are frozen from the first step are observed before it, or have a first part of the training.
        [
            "fake: {uses: quant.prepare_qat, needs: {model: net}, with: {freeze_at: 0}}",
            "seen: {uses: quant.calibrate, needs: {model: fake}}",
            "tuned: {uses: train.supervised, needs: {model: seen.model}}",
            "int8: {uses: quant.convert, needs: {model: tuned}}",
        ],
        [
            "fake: {uses: quant.prepare_qat, needs: {model: net}, with: {freeze_at: 0.01}}",
            "tuned: {uses: train.supervised, needs: {model: fake}}",
        ],
        ["onnx: {uses: export.onnx, needs: {model: net}}"],
        [*STATIC, "onnx: {uses: export.onnx, needs: {model: int8}}"],
        [
            "small: {uses: quant.dynamic, needs: {model: net}}",
            "phone: {uses: export.executorch, needs: {model: small}}",
        ],
        # All repairs, each in its place.
        [
            "even: {uses: quant.equalize, needs: {model: net}}",
            "smooth: {uses: quant.smooth, needs: {model: even}}",
            "static: {uses: quant.prepare, needs: {model: smooth}}",
            STATIC[1],
            "rounded: {uses: quant.adaround, needs: {model: seen.model}}",
            "biases: {uses: quant.bias_correct, needs: {model: rounded}}",
            "int8: {uses: quant.convert, needs: {model: biases}}",
        ],
        # A third party's stage that takes several models is assumed to return a float one.
        ["mean: {uses: toy.average, needs: {models: [net]}}", "small: {uses: quant.dynamic, needs: {model: mean}}"],
    ],
)
def test_an_order_that_works(tmp_path, stages) -> None:
    assert problems(tmp_path, *stages) == []


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            ["int8: {uses: quant.convert, needs: {model: net}}"],
            "int8: needs a prepared model, but there is no quant.prepare or quant.prepare_qat between net and this",
        ),
        (
            ["a: {uses: toy.train, needs: {model: net}}", "seen: {uses: quant.calibrate, needs: {model: a}}"],
            "seen: needs a prepared model, but there is no quant.prepare or quant.prepare_qat between net and this",
        ),
        (
            [STATIC[0], "int8: {uses: quant.convert, needs: {model: static}}"],
            "int8: needs a model whose observers have seen data: put quant.calibrate between static and this",
        ),
        (
            [QAT[0], "int8: {uses: quant.convert, needs: {model: fake}}"],
            "int8: needs a model whose observers have seen data: put train.supervised between fake and this",
        ),
        (
            [*STATIC, "again: {uses: quant.convert, needs: {model: int8}}"],
            "again: needs a prepared model, but int8 (quant.convert) has already made it int8",
        ),
        (
            [STATIC[0], "small: {uses: quant.dynamic, needs: {model: static}}"],
            "small: needs a float model, but static (quant.prepare) has already prepared it",
        ),
        (
            [*STATIC, "tuned: {uses: train.supervised, needs: {model: int8}}"],
            "tuned: trains float and prepared models, but int8 (quant.convert) has already made it int8",
        ),
        (
            [
                "small: {uses: quant.dynamic, needs: {model: net}}",
                "tuned: {uses: train.supervised, needs: {model: small}}",
            ],
            "tuned: trains float and prepared models, but small (quant.dynamic) has already made it int8",
        ),
        (
            [*QAT, "static: {uses: quant.prepare, needs: {model: int8}}"],
            "static: needs a float model, but int8 (quant.convert) has already made it int8",
        ),
        (
            [*QAT, "fake2: {uses: quant.prepare_qat, needs: {model: tuned}}"],
            "fake2: needs a float model, but fake (quant.prepare_qat) has already prepared it",
        ),
        (
            [
                "fake: {uses: quant.prepare_qat, needs: {model: net}, with: {freeze_at: 0}}",
                "tuned: {uses: train.supervised, needs: {model: fake}}",
                "int8: {uses: quant.convert, needs: {model: tuned}}",
            ],
            "tuned: would train without rounding activations, because freeze_at of fake is 0: their ranges are frozen "
            "before any is observed. Put quant.calibrate between fake and this, or set a freeze_at above 0",
        ),
        (
            ["why: {uses: quant.analyze, needs: {model: net}}"],
            "why: needs a prepared model, but there is no quant.prepare or quant.prepare_qat between net and this",
        ),
        (
            [STATIC[0], "even: {uses: quant.equalize, needs: {model: static}}"],
            "even: needs a float model, but static (quant.prepare) has already prepared it",
        ),
        (
            [*STATIC, "smooth: {uses: quant.smooth, needs: {model: int8}}"],
            "smooth: needs a float model, but int8 (quant.convert) has already made it int8",
        ),
        (
            ["biases: {uses: quant.bias_correct, needs: {model: net}}"],
            "biases: needs a prepared model, but there is no quant.prepare or quant.prepare_qat between net and this",
        ),
        (
            [STATIC[0], "biases: {uses: quant.bias_correct, needs: {model: static}}"],
            "biases: needs a model whose observers have seen data: put quant.calibrate between static and this",
        ),
        (
            [*QAT[:2], "rounded: {uses: quant.adaround, needs: {model: tuned}}"],
            "rounded: needs a model from quant.prepare, but fake (quant.prepare_qat) prepared it for training, which "
            "fits weights and biases to int8: leave this out",
        ),
        (
            [
                *STATIC[:2],
                "biases: {uses: quant.bias_correct, needs: {model: seen.model}}",
                "rounded: {uses: quant.adaround, needs: {model: biases}}",
            ],
            "rounded: needs biases that are not corrected yet, but biases (quant.bias_correct) is above: it is the "
            "last repair in front of quant.convert, and runs once",
        ),
        (
            [*STATIC, "onnx: {uses: export.onnx, needs: {model: seen.model}}"],
            "onnx: needs a float or an int8 model, but static (quant.prepare) has prepared it for int8: put a "
            "quant.convert between static and this",
        ),
        (
            [*QAT, "phone: {uses: export.executorch, needs: {model: tuned}}"],
            "phone: needs a float or an int8 model, but fake (quant.prepare_qat) has prepared it for int8: put a "
            "quant.convert between fake and this",
        ),
        (
            [
                "found: {uses: quant.tune, needs: {model: net}, with: {max_drop: 0.01}}",
                "onnx: {uses: export.onnx, needs: {model: found.model}}",
            ],
            "onnx: needs a float or an int8 model, but found (quant.tune) has prepared it for int8: put a "
            "quant.convert between found and this",
        ),
    ],
)
def test_an_order_that_cannot(tmp_path, stages, message) -> None:
    assert problems(tmp_path, *stages) == [message]
