"""The bench, on stages that keep their contract and on one for each way to break it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import pytest
from pydantic import Field, SecretStr

from ptpipe import Artifact, Context, Decision, ManifestError, StageConfig, StageError, Verdict, stage
from ptpipe.events import LogLine, Metric, Notice, Progress
from ptpipe.testing import Bench, BrokenContractError

from ..conftest import TOY

pytest_plugins = ["ptpipe.testing", "pytester"]


@dataclass(frozen=True)
class Number(Artifact):
    value: float
    made_by: str = "a test"  # not stored: what comes out of the store says so

    def save(self, folder: Path) -> None:
        (folder / "number.json").write_text(json.dumps(self.value))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(json.loads((folder / "number.json").read_text()), "load")


class ScaleConfig(StageConfig):
    factor: float = Field(2.0, gt=0, description="what to multiply with")
    digits: tuple[int, ...] = Field((), description="a list")


@stage("number.scale")
def scale(config: ScaleConfig, ctx: Context, number: Number) -> Number:
    """Multiply."""
    ctx.progress(1, 1, "numbers")
    ctx.metric(made_by=number.made_by, seed=ctx.seed, factor=1.0)
    ctx.metric(factor=config.factor)
    ctx.notice("scaled")
    ctx.log("a line")
    return Number(number.value * config.factor)


class Halves(NamedTuple):
    low: Number
    high: Number


@stage("number.split")
def split(config: StageConfig, ctx: Context, numbers: Sequence[Number], bias: Number | None = None) -> Halves:
    """Add up, then give a quarter and three quarters."""
    ctx.metric(sources={name: list(references) for name, references in ctx.input_names.items()})
    ctx.metric(digests={name: list(digests) for name, digests in ctx.input_digests.items()})
    total = sum(number.value for number in numbers) + (bias.value if bias else 0)
    return Halves(Number(total / 4), Number(total * 3 / 4))


def test_runs_a_stage_on_what_the_store_gives_and_returns_what_the_store_gives(bench: Bench):
    assert bench.run(scale, {"factor": 3}, number=Number(2.0)) == Number(6.0, "load")
    assert bench.metrics == {"made_by": "load", "seed": 7, "factor": 3.0}
    assert bench.notices == ["scaled"]
    assert [type(event) for event in bench.events] == [Progress, Metric, Metric, Metric, Metric, Notice, LogLine]


def test_keeps_what_the_last_stage_said_only(bench: Bench):
    bench.run(scale, number=Number(1.0))
    bench.run(split, numbers=[Number(1.0)])
    assert bench.notices == [] and list(bench.metrics) == ["sources", "digests"]


def test_gives_several_inputs_and_several_outputs(bench: Bench):
    halves = bench.run(split, numbers=[Number(1.0), Number(3.0)], bias=Number(4.0))
    assert (halves.low.value, halves.high.value) == (2.0, 6.0)
    assert bench.metrics["sources"] == {"numbers": ["numbers1", "numbers2"], "bias": ["bias"]}
    one, three = bench.metrics["digests"]["numbers"]
    assert len({one, three, *bench.metrics["digests"]["bias"]}) == 3
    bench.run(split, numbers=[Number(3.0), Number(1.0)])
    assert bench.metrics["digests"] == {"numbers": [three, one]}
    assert bench.run(split, numbers=[Number(4.0)]).low.value == 1.0


class Only(NamedTuple):
    number: Number


def test_gives_a_named_tuple_of_one_as_it_is(bench: Bench):
    @stage("number.only")
    def only(config: StageConfig, ctx: Context) -> Only:
        return Only(Number(3.0))

    assert bench.run(only).number.value == 3.0


def test_runs_a_gate(bench: Bench):
    @stage("gate.even")
    def even(config: StageConfig, ctx: Context, number: Number) -> Verdict:
        return Verdict(Decision.REFUSED, "odd", {"value": number.value})

    assert bench.run(even, number=Number(1.0)).decision is Decision.REFUSED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factr": 1}, r"unknown option 'factr' of number.scale \(did you mean 'factor'\?\)"),
        ({"factor": -1}, "factor: .*greater than 0.*-1"),
        ({"factor": "2"}, 'factor: .*number.*"2"'),
        ({"digits": [1, True]}, "digits.1: .*true"),
    ],
)
def test_refuses_options_as_a_manifest_would(bench: Bench, options, message):
    with pytest.raises(ManifestError, match=message):
        bench.run(scale, options, number=Number(1.0))


class TokenConfig(StageConfig):
    token: SecretStr


def test_refuses_options_that_a_run_would_not_pass_on(bench: Bench):
    @stage("number.fetch")
    def fetch(config: TokenConfig, ctx: Context) -> Number:
        return Number(float(config.token.get_secret_value()))

    with pytest.raises(BrokenContractError, match=r"option 'token' of number.fetch is a secret"):
        bench.run(fetch, {"token": "3"})


def test_takes_a_list_for_a_tuple_and_a_whole_number_for_a_float_as_json_does(bench: Bench):
    assert bench.run(scale, {"factor": 2, "digits": [1, 2]}, number=Number(1.0)).value == 2.0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "number.scale: input number wants a Number, not None"),
        ({"number": 3}, "number.scale: input number wants a Number, not 3"),
        ({"number": Number(1.0), "nubmer": 3}, r"number.scale has no input 'nubmer' \(did you mean 'number'\?\)"),
    ],
)
def test_refuses_inputs_that_do_not_fit(bench: Bench, inputs, message):
    with pytest.raises(TypeError, match=message):
        bench.run(scale, **inputs)


def test_refuses_one_input_where_several_are_wanted(bench: Bench):
    with pytest.raises(TypeError, match="input numbers wants a sequence of Number"):
        bench.run(split, numbers=Number(1.0))


def test_says_what_a_preflight_finds_before_any_work(bench: Bench):
    def find_missing(config: StageConfig) -> Iterable[str]:
        return ["there is no engine", "there is no disk"]

    @stage("number.late", preflight=find_missing)
    def late(config: StageConfig, ctx: Context) -> Number:
        raise AssertionError("worked")

    with pytest.raises(ManifestError, match=r"there is no engine\nnumber.late: there is no disk"):
        bench.run(late)


def test_passes_on_what_a_stage_raises_and_keeps_scratch_until_it_succeeds(bench: Bench):
    @stage("number.count")
    def count(config: StageConfig, ctx: Context) -> Number:
        tries = len(list(ctx.scratch.iterdir())) + 1
        (ctx.scratch / str(tries)).touch()
        if tries == 2:
            return Number(tries)
        raise StageError(f"try {tries}")

    for _ in range(2):  # the second round starts with an empty folder again
        with pytest.raises(StageError, match="try 1"):
            bench.run(count)
        assert bench.run(count).value == 2


def test_refuses_a_stage_that_wants_several_processes(bench: Bench):
    @stage("number.many", workers=lambda config: 2)
    def many(config: StageConfig, ctx: Context) -> Number:
        return Number(1)

    with pytest.raises(ValueError, match=r"number.many wants 2 workers"):
        bench.run(many)


# Each way to break the contract


def broken(returned: object, said: object = None, type_: type[Artifact] = Number, **extras):
    def function(config, ctx):
        ctx.metric(value=said)
        return returned

    function.__annotations__ = {"config": StageConfig, "ctx": Context, "return": type_}
    return stage("number.broken", **extras)(function)


class Forgetful(Number):
    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(0.0)


class Linked(Number):
    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "link").symlink_to("number.json")


class Pickled(Number):
    def save(self, folder: Path) -> None:
        (folder / "number.bin").write_bytes(pickle.dumps(self.value))


class Unwritable(Number):
    def save(self, folder: Path) -> None:
        raise ZeroDivisionError("by nothing")


class Unreadable(Number):
    @classmethod
    def load(cls, folder: Path) -> Self:
        raise KeyError("value")


@pytest.mark.parametrize(
    ("stage_", "message"),
    [
        (broken(3), "number.broken promised output: Number, returned int"),
        (broken(Number(1), said=os), "metric value=<module 'os'.* is not JSON"),
        (broken(Number(1), said=float("nan")), "metric value=nan is not JSON"),
        (broken(Number(1), fingerprint=lambda config: Path("x")), r"fingerprint\(config\) returned no JSON"),
        (broken(Linked(1), type_=Linked), "output output: Linked.save raised ValueError: .*link"),
        (broken(Pickled(1), type_=Pickled), "number.bin is a pickle"),
        (broken(Unwritable(1), type_=Unwritable), "Unwritable.save raised ZeroDivisionError: by nothing"),
        (broken(Forgetful(1)), "output output: a run loads it as the promised Number, but it is a Forgetful"),
    ],
)
def test_names_the_broken_promise(bench: Bench, stage_, message):
    with pytest.raises(BrokenContractError, match=message):
        bench.run(stage_)


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (Forgetful, "input number: Forgetful.load does not restore what save wrote"),
        (Unreadable, "input number: Unreadable.load raised KeyError: 'value'"),
    ],
)
def test_names_an_input_that_does_not_come_back(bench: Bench, type_, message):
    with pytest.raises(BrokenContractError, match=message):
        bench.run(scale, number=type_(1.0))


def test_a_stage_that_prints_is_told_what_to_use(bench: Bench):
    @stage("number.loud")
    def loud(config: StageConfig, ctx: Context) -> Number:
        print("epoch 1")
        return Number(1)

    with pytest.raises(BrokenContractError, match=r"number.loud printed 'epoch 1\\n': use ctx.log"):
        bench.run(loud)


class TorchZip(Number):
    def save(self, folder: Path) -> None:
        import torch

        torch.save({"x": torch.zeros(3)}, folder / "tensors.pt")


class Safetensors(Number):
    def save(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save

        content = save({"x" * 584: torch.full((3,), self.value)})
        assert content[:2] == b"\x80\x02"  # a header of 640 bytes: the file begins as a pickle does
        (folder / "tensors.safetensors").write_bytes(content)

    @classmethod
    def load(cls, folder: Path) -> Self:
        from safetensors.torch import load_file

        (values,) = load_file(folder / "tensors.safetensors").values()
        return cls(values[0].item())


@pytest.mark.plugins
def test_a_file_of_torch_save_is_a_pickle_and_safetensors_are_not(bench: Bench):
    with pytest.raises(BrokenContractError, match=r"tensors\.pt is a pickle"):
        bench.run(broken(TorchZip(1), type_=TorchZip))
    assert bench.run(broken(Safetensors(3.0), type_=Safetensors)).value == 3.0


@pytest.mark.plugins
def test_the_starter_plugin_of_init_passes_its_own_test(tmp_path: Path):
    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("ptpipe", "init", "--plugin", "my_net", ".")
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", "--basetemp", "temporary")
    assert "1 passed" in run("pytest", *options, "test_my_net.py")


def test_importing_the_bench_imports_no_torch():
    code = "import sys, ptpipe.testing; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# Whole manifests


GATES = """
version: 1
plugins: [./toy.py]
stages:
  one: {uses: toy.make}
  small: {uses: toy.gate, with: {least: 1}}
  large: {uses: toy.gate, with: {least: 5}}
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run the body of a test in somebody's own suite, beside a manifest of two gates."""
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ())
    monkeypatch.delenv("PTPIPE_ARTIFACTS", raising=False)
    shutil.copy(TOY, pytester.path)
    pytester.makefile(".yaml", m=GATES)
    pytester.makeconftest('pytest_plugins = ["ptpipe.testing"]')

    def run(*lines: str) -> pytest.RunResult:
        body = "\n    ".join(lines)
        pytester.makepyfile(f"import pytest, ptpipe\ndef test_ships(ptpipe_run):\n    {body}\n")
        return pytester.runpytest_inprocess("-p", "no:cacheprovider")

    return run


def test_a_suite_asserts_gates(suite, pytester):
    ended = suite(
        'result = ptpipe_run("m.yaml")',
        'result.assert_passed("small")',
        '(verdict,) = result.verdicts("large")',
        'assert (verdict.decision, verdict.reason) == (ptpipe.Decision.REFUSED, "1.0 against 5.0")',
        'ptpipe_run("m.yaml", {"large.least": 0}).assert_passed()',
        'assert ptpipe_run("m.yaml", artifacts="mine").artifact("one").value == 1',
    )
    ended.assert_outcomes(passed=1)
    assert {path.name for path in pytester.path.iterdir()} >= {"artifacts", "mine"}


def test_a_gate_that_did_not_pass_says_why_on_what_figures_and_where_the_report_is(suite, pytester):
    toy = pytester.path / "toy.py"
    toy.write_text(toy.read_text().replace('against {config.least}"', "against {config.least}\", {'drop': 0.5}"))
    ended = suite('ptpipe_run("m.yaml").assert_passed("small", "large")')
    ended.assert_outcomes(failed=1)
    (folder,) = pytester.path.glob("artifacts/runs/*")
    ended.stdout.fnmatch_lines(
        [
            "E * AssertionError: gate large refused: 1.0 against 5.0",
            "E *     drop = 0.5",
            f"E * report: {folder}",
        ]
    )
    assert "small" not in "\n".join(line for line in ended.stdout.lines if line.startswith("E "))
    ended.stdout.no_fnmatch_line("*def assert_passed*")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('ptpipe_run("m.yaml").assert_passed()', "AssertionError: gate large refused: *"),
        ('ptpipe_run("m.yaml", {"large.unsure_at": 1}).assert_passed()', "AssertionError: gate large undecided: *"),
        ('ptpipe_run("m.yaml").assert_passed("larg")', "ValueError: m.yaml has no gate 'larg', but small, large (did*"),
        ('ptpipe_run("m.yaml").assert_passed("one")', "ValueError: m.yaml has no gate 'one', but small, large"),
        ('ptpipe_run("m.yaml", {"large.last": 1})', "ptpipe.errors.ManifestError: *unknown option 'last'*"),
    ],
)
def test_what_a_suite_is_told(suite, call, message):
    ended = suite(call)
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines([f"E * {message}"])


def test_a_gate_that_never_ran_names_what_failed(suite, pytester):
    pytester.makefile(".yaml", m=GATES.replace("toy.make}", "toy.fail}"))
    ended = suite('ptpipe_run("m.yaml").assert_passed("large")')
    ended.stdout.fnmatch_lines(
        ["E * gate large gave no verdict: skipped, needs one", "E * one failed: told to fail"], consecutive=True
    )


def test_without_gates_and_after_a_failure_beside_the_gates_nothing_is_called_passed(suite, pytester):
    pytester.makefile(".yaml", m=GATES.partition("  small")[0])
    suite('ptpipe_run("m.yaml").assert_passed()').stdout.fnmatch_lines(["E * m.yaml has no gate"])
    pytester.makefile(".yaml", m=GATES.partition("  large")[0] + "  bad: {uses: toy.fail}")
    ended = suite('ptpipe_run("m.yaml").assert_passed()')
    ended.stdout.fnmatch_lines(["E * the run ended with exit code 1", "E * bad failed: told to fail"])


def test_a_signal_ends_the_whole_suite(suite, pytester):
    pytester.makefile(".yaml", m=GATES.replace("toy.make}", "toy.fail, with: {how: interrupt}}"))
    ended = suite('ptpipe_run("m.yaml")')
    assert ended.ret == 130
    ended.stdout.fnmatch_lines(["*m.yaml was interrupted*"])
