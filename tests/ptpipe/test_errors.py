"""Problems, their places, and which exit code wins."""

from __future__ import annotations

import pickle

import pytest

from ptpipe import ExitCode, IntegrityError, Location, ManifestError, Problem, PtpipeError, StageError
from ptpipe.errors import Terminated, UsageError, nearest


def test_a_problem_is_one_line_with_place_and_suggestion():
    assert str(Problem("no such kind")) == "no such kind"
    problem = Problem("no such kind", Location("m.yaml", 3, 7), "model.mlp")
    assert str(problem) == "m.yaml:3:7: no such kind (did you mean 'model.mlp'?)"


def test_a_manifest_error_carries_every_problem():
    error = ManifestError(Problem(text) for text in ("a", "b"))
    assert [problem.message for problem in error.problems] == ["a", "b"]
    assert str(error) == "a\nb"
    with pytest.raises(AssertionError):
        ManifestError([])


def test_a_problem_is_short_and_printable_whatever_it_quotes():
    problem = Problem("-s " + "x\x1b" * 100_000 + ": nested too deep", Location("a\u202eb", 1, 1), "\x9b")
    assert len(problem.message) < 1000
    assert problem.message.startswith("-s x") and problem.message.endswith(": nested too deep")
    assert str(problem).isprintable()
    assert str(problem).startswith("a\\u202eb:1:1: -s x\\x1b")


def test_a_hundred_problems_are_told_and_the_others_counted():
    def told(number):
        return ManifestError([Problem("a")] * number).problems

    assert [len(told(number)) for number in (1, 100, 101, 102, 5000)] == [1, 100, 101, 101, 101]
    assert told(101)[-1] == Problem("a")
    assert told(5000)[-1] == Problem("... and 4,900 more problems")


def test_a_broken_plugin_gives_the_exit_code():
    plain, broken = Problem("a"), Problem("b", code=ExitCode.PLUGIN)
    assert ManifestError([*[plain] * 5000, broken]).exit_code == 6
    assert ManifestError([plain]).exit_code == 2
    assert ManifestError([plain, broken, plain]).exit_code == 6


def test_exit_codes_are_those_promised():
    promised = {"DONE": 0, "FAILED": 1, "USAGE": 2, "REFUSED": 3, "UNDECIDED": 4, "INTEGRITY": 5, "PLUGIN": 6}
    assert {code.name: code.value for code in ExitCode} == promised | {
        "BUG": 70,
        "HUNG_UP": 129,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }


def test_the_tree_of_errors():
    assert {type_.exit_code for type_ in (PtpipeError, StageError)} == {ExitCode.FAILED}
    assert IntegrityError.exit_code == ExitCode.INTEGRITY
    assert UsageError.exit_code == ExitCode.USAGE
    for users_mistake in (ManifestError, StageError, UsageError):
        assert issubclass(users_mistake, ValueError)
        assert issubclass(users_mistake, PtpipeError)
    assert not issubclass(Terminated, Exception), "no stage may swallow it by accident"


class OwnError(StageError):
    """Of a plugin, with a constructor of its own."""

    def __init__(self, layer, *, reason):
        super().__init__(f"{layer}: {reason}")
        self.layer = layer


class MadeError(StageError):
    """Of a plugin, that is also made in its own way."""

    def __new__(cls, layer, *, reason):
        return super().__new__(cls, layer)

    def __init__(self, layer, *, reason):
        super().__init__(f"{layer}: {reason}")


class FileError(PtpipeError, OSError):
    """Of a plugin, that is an OSError too."""


def subclasses(type_):
    return [type_, *(inner for each in type_.__subclasses__() for inner in subclasses(each))]


def test_every_error_can_go_to_another_process():
    errors = [ManifestError([Problem("a", Location("m.yaml", 1, 2), "b")] * 200), OwnError("conv1", reason="no")]
    ours = [type_ for type_ in subclasses(PtpipeError) if type_.__module__ == "ptpipe.errors"]
    errors += [type_("one line") for type_ in ours if type_ is not ManifestError]
    assert len(errors) == 6
    errors[0].add_note("a note")
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
        assert copy.exit_code is error.exit_code


def test_errors_that_are_made_in_another_way_can_go_to_another_process_too():
    copy = pickle.loads(pickle.dumps(MadeError("conv1", reason="no")))
    assert (type(copy), str(copy)) == (MadeError, "conv1: no")
    copy = pickle.loads(pickle.dumps(FileError(2, "no such file", "a.txt")))
    assert (type(copy), copy.errno, copy.filename) == (FileError, 2, "a.txt")
    assert str(copy) == "[Errno 2] no such file: 'a.txt'"


def test_nearest():
    assert nearest("quant.convrt", ["quant.convert", "quant.prepare"]) == "quant.convert"
    assert nearest("adamW", ["sgd", "adam", "adamw"]) == "adamw"
    assert nearest("zebra", ["quant.convert", "quant.prepare"]) is None
    assert nearest("", []) is None
    assert nearest("noe", [*(f"{number:05}" for number in range(400)), "one"]) == "one"
    assert nearest("x" * 101, ["x" * 101]) is None, "no mistyped word is as long"
