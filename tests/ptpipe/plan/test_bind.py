"""Binding: kinds, options, wiring, the plugins' own rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ptpipe import ExitCode, ManifestError

TWO = """
one: {uses: toy.make}
two: {uses: toy.make, with: {value: 2}}
"""


def problems_of(project, stages, **keywords):
    path = project.write(stages, **keywords)
    with pytest.raises(ManifestError) as raised:
        project.plan()
    return [str(problem).replace(f"{path}:", "") for problem in raised.value.problems]


def wiring(plan, stage_id):
    return {port: [str(r) for r in references] for port, references in plan[stage_id].wiring.items()}


def test_inputs_are_bound_by_name_and_by_type(project):
    project.write(
        TWO + "sum: {uses: toy.add, needs: {a: one, b: two}}\ntext: {uses: toy.total, needs: {numbers: [two, sum]}}"
    )
    plan = project.plan()
    assert wiring(plan, "sum") == {"a": ["one"], "b": ["two"]}
    assert wiring(plan, "text") == {"numbers": ["two", "sum"]}
    assert plan["text"].upstream == ("two", "sum")
    project.write("one: {uses: toy.make}\nsum: {uses: toy.add}\n")
    assert wiring(project.plan(), "sum") == {"a": ["one"], "b": ["one"]}
    assert project.plan()["sum"].upstream == ("one",)


def test_one_of_several_outputs(project):
    project.write(
        "one: {uses: toy.make}\npair: {uses: toy.split}\nsum: {uses: toy.add, needs: {a: pair.low, b: pair.high}}"
    )
    assert wiring(project.plan(), "sum") == {"a": ["pair.low"], "b": ["pair.high"]}


def test_an_optional_input_is_bound_by_name_only(project):
    project.write("one: {uses: toy.make}\npair: {uses: toy.split}")
    assert wiring(project.plan(), "pair") == {"a": ["one"]}
    project.write("one: {uses: toy.make}\npair: {uses: toy.split, needs: {a: one, bias: one}}")
    assert wiring(project.plan(), "pair") == {"a": ["one"], "bias": ["one"]}


def test_defaults_are_filled_in(project):
    project.write("one: {uses: toy.make}")
    assert project.plan()["one"].options == {"value": 1.0, "note": "", "mode": "plain"}


@pytest.mark.parametrize(
    ("stages", "problems"),
    [
        ("one: {uses: toy.mak}", ["5:15: one: unknown stage kind 'toy.mak' (did you mean 'toy.make'?)"]),
        (
            "one: {uses: toy.make, with: {valu: 3}}",
            ["5:32: one: unknown option 'valu' of toy.make (did you mean 'value'?)"],
        ),
        (
            "one: {uses: toy.make, with: {value: -3}}",
            ["5:39: one: value: should be greater than or equal to 0, not -3"],
        ),
        (
            "one: {uses: toy.make, with: {mode: lound}}",
            ["5:38: one: mode: should be 'plain' or 'loud', not \"lound\" (did you mean 'loud'?)"],
        ),
        (
            "gate: {uses: toy.gate}",
            [
                "5:9: gate: option 'least' of toy.gate is required",
                "5:9: gate: input a: no stage above has an output of type Number",
            ],
        ),
        (
            "sum: {uses: toy.add, needs: {a: two, b: sum}}\n" + TWO,
            [
                "5:35: sum: 'two' comes later; needs refer to stages above only",
                "5:43: sum: a stage cannot need itself",
            ],
        ),
        (
            TWO + "sum: {uses: toy.add, needs: {a: ona, b: tow}}",
            [
                "7:35: sum: there is no stage 'ona' (did you mean 'one'?)",
                "7:43: sum: there is no stage 'tow' (did you mean 'two'?)",
            ],
        ),
        (
            TWO + "sum: {uses: toy.add}",
            [
                "7:8: sum: input a (Number) fits several stages above: one, two; name one, such as `needs: {a: two}`",
                "7:8: sum: input b (Number) fits several stages above: one, two; name one, such as `needs: {b: two}`",
            ],
        ),
        (
            TWO + "pair: {uses: toy.split, needs: {c: one}}",
            [
                "7:35: pair: toy.split has no input 'c'; it has a, bias",
                "7:9: pair: input a (Number) fits several stages above: one, two; "
                "name one, such as `a: two` in `needs`",
            ],
        ),
        (
            "gate: {uses: toy.gate, with: {least: 1}}\n" + TWO.strip(),
            ["5:9: gate: input a: no stage above has an output of type Number; one comes later (line 6): move it up"],
        ),
        ("one: {uses: toy.make, needs: {x: y}}", ["5:33: one: toy.make has no input 'x'; it has none"]),
        (
            "one: {uses: toy.make}\ngate: {uses: toy.gate, with: {least: 1}}\n"
            "sum: {uses: toy.add, needs: {a: one, b: gate}}",
            [
                "7:43: sum: b takes a Number; gate (toy.gate) has output: Strict",
            ],
        ),
        (
            "one: {uses: toy.make}\npair: {uses: toy.split}\nsum: {uses: toy.add, needs: {a: pair, b: pair.lo}}",
            [
                "7:35: sum: 'pair' is ambiguous for a: low: Number, high: Number; name one, such as pair.low",
                "7:44: sum: pair (toy.split) has no output 'lo'; it has low, high (did you mean 'low'?)",
            ],
        ),
        (TWO + "sum: {uses: toy.add, needs: {a: [one, two], b: one}}", ["7:35: sum: a takes one input, not 2"]),
        (TWO + "text: {uses: toy.total, needs: {numbers: [one, one]}}", ["7:44: text: numbers names 'one' twice"]),
        # What an unknown kind would have given nobody knows: no word about the stages that may need it.
        (
            "one: {uses: toy.nothing_like_it}\nsum: {uses: toy.add}\n"
            "gate: {uses: toy.gate, needs: {a: one}, with: {least: 0}}",
            [
                "5:15: one: unknown stage kind 'toy.nothing_like_it'; `ptpipe stages toy` lists this family",
            ],
        ),
    ],
)
def test_every_mistake_is_told_with_its_place(project, stages, problems):
    assert problems_of(project, stages) == problems


def test_all_at_once(project):
    problems = problems_of(
        project,
        "one: {uses: toy.mak}\ntwo: {uses: toy.make, with: {valu: 3, value: x}}\n"
        "sum: {uses: toy.add, needs: {b: thre}}",
    )
    assert len(problems) == 4


@pytest.mark.parametrize(
    ("stages", "problems"),
    [
        # A stage whose structure is wrong, and mistakes in others: no word about what follows from the first.
        (
            "one: {uses: toy.make}\nsum: {uses: toy.add, needs: one, with: {x: 1}}\n"
            "three: {uses: toy.mak}\ngate: {uses: toy.gate, needs: {a: sum}}",
            [
                "6:31: sum: `needs` holds stages by input name, not a text: `needs: {INPUT: one}`; "
                "`ptpipe stages toy.add` lists the inputs",
                "6:43: sum: unknown option 'x' of toy.add",
                "7:17: three: unknown stage kind 'toy.mak' (did you mean 'toy.make'?)",
                "8:9: gate: option 'least' of toy.gate is required",
            ],
        ),
        (
            "one: {use: toy.make}\ntwo: toy.make\nthree: {uses: toy.make, with: [3]}\n"
            "gate: {uses: toy.gate, needs: {a: two}, options: {least: 1}}\nlast: {uses: toy.add, needs: {a: thre}}",
            [
                "5:9: unknown key 'use' in stage one (did you mean 'uses'?)",
                "6:8: two: must be a mapping with `uses`, not a text",
                "7:33: three: `with` holds options by name, not a list",
                "8:43: unknown key 'options' in stage gate",
                "9:36: last: there is no stage 'thre' (did you mean 'three'?)",
            ],
        ),
        (
            "one: {uses: toy.make, with: {value: 1, value: 2}}\ntwo: {uses: toy.make, with: {valu: 3}}",
            ["5:42: 'value' is given twice; first in line 5", "6:32: two: unknown option 'valu' of toy.make ..."],
        ),
    ],
)
def test_a_broken_stage_hides_no_other_mistake(project, stages, problems):
    found = problems_of(project, stages)
    assert [line.replace("(did you mean 'value'?)", "...") for line in found] == problems


@pytest.mark.parametrize("line", ["plugins: x", "version: 2", "plugin: []"])
def test_where_kinds_are_not_known_stages_are_not_judged(project, line):
    text = f"version: 1\n{line}\nstages: {{one: {{uses: toy.nothing}}}}"
    text = text.removeprefix("version: 1\n") if line.startswith("version") else text
    project.manifest.write_text(text)
    with pytest.raises(ManifestError) as error:
        project.plan()
    assert len(error.value.problems) == 1


RULE = """
@hookimpl
def ptpipe_check(plan):
    yield from (plan.problem(stage.id, "a rule") for stage in plan.stages)
    yield Problem("the manifest has no gate")
    yield plan.problem("one", "a warning", severity="warning")
    plan["broken"]
"""


def test_rules_are_checked_for_the_stages_that_are_sound(project):
    source = (project.folder / "toy.py").read_text()
    (project.folder / "toy.py").write_text(source + "\nfrom ptpipe import Problem, hookimpl" + RULE)
    stages = "one: {uses: toy.make}\nbroken: {uses: toy.make, with: {valu: 1}}\ntwo: {uses: toy.make}\n"
    stages += "sum: {uses: toy.add, needs: {a: one, b: broken}}"
    found = problems_of(project, stages)
    assert found[0].endswith("broken: unknown option 'valu' of toy.make (did you mean 'value'?)")
    assert [line.partition(" ")[2] for line in found[1:]] == []
    (project.folder / "toy.py").write_text(
        source + "\nfrom ptpipe import Problem, hookimpl" + RULE.replace('    plan["broken"]\n', "")
    )
    assert [line.partition(" ")[2] for line in problems_of(project, stages)[1:]] == ["one: a rule", "two: a rule"]


RENAMED = """
from ptpipe import Artifact, Context, StageConfig, hookimpl, stage

class Given(Artifact):
    pass

class GiveConfig(StageConfig):
    value: int = 1

@stage("ours.give", renamed_from="ours.make")
def give(config: GiveConfig, ctx: Context) -> Given: ...

@stage("ours.take")
def take(config: StageConfig, ctx: Context, given: Given) -> Given: ...

@hookimpl
def ptpipe_stages():
    return [give, take]
"""


def test_the_former_name_of_a_kind_is_told_and_the_rest_is_checked_as_of_the_new_one(project):
    (project.folder / "ours.py").write_text(RENAMED)
    head = "plugins: [./ours.py]"
    stages = "one: {uses: ours.make, with: {valu: 3}}\ntwo: {uses: ours.take, needs: {given: one.other}}"
    assert problems_of(project, stages, head=head) == [
        "4:15: one: ours.make was renamed to ours.give",
        "4:33: one: unknown option 'valu' of ours.give (did you mean 'value'?)",
        "5:41: two: one (ours.give) has no output 'other'; it has output",
    ]
    project.write("one: {uses: ours.give, with: {value: 3}}\ntwo: {uses: ours.take}", head=head)
    assert wiring(project.plan(), "two") == {"given": ["one"]}


def test_a_kind_that_has_a_name_again_is_that_kind(project):
    """The former name may be given to another kind."""
    (project.folder / "ours.py").write_text(RENAMED.replace("ours.make", "ours.take"))
    project.write("one: {uses: ours.give}\ntwo: {uses: ours.take}", head="plugins: [./ours.py]")
    assert project.plan()["two"].kind == "ours.take"


TAKER = """
from ptpipe import Context, StageConfig, Verdict, stage

class Number(Verdict):
    pass

@stage("taker.take")
def take(config: StageConfig, ctx: Context, given: Number) -> Verdict:
    "Take."
"""


def test_a_class_of_the_same_name_in_another_plugin_is_explained(project):
    (project.folder / "taker.py").write_text(TAKER)
    hint = "; there are two classes Number, of plugin toy.py and of plugin taker.py: "
    hint += "define it in one module that both import"
    stages = "one: {uses: toy.make}\nnamed: {uses: taker.take, needs: {given: one}}\nfound: {uses: taker.take}"
    assert problems_of(project, stages, head="plugins: [./toy.py, ./taker.py]") == [
        f"5:44: named: given takes a Number; one (toy.make) has output: Number{hint}",
        f"6:10: found: input given: no stage above has an output of type Number{hint}",
    ]


def test_an_overridden_option_is_told_as_such(project):
    project.write("one: {uses: toy.make}")
    with pytest.raises(ManifestError) as raised:
        project.plan({"one.value": "x", "one.valu": 3, "one.note": "fine"})
    assert sorted(str(problem) for problem in raised.value.problems) == [
        "-s one.valu: unknown option 'valu' of toy.make (did you mean 'value'?)",
        '-s one.value: value: should be a number, not "x"',
    ]


RULES = """
from ptpipe import Problem, hookimpl, stage, StageConfig, Context, Verdict
from pydantic import field_validator

@hookimpl
def ptpipe_check(plan):
    {body}
"""


def with_rules(project, body):
    (project.folder / "rules.py").write_text(RULES.format(body=body))
    return {"head": "plugins: [./toy.py, ./rules.py]"}


def test_a_plugin_may_have_rules_of_its_own(project):
    head = with_rules(project, "yield plan.problem('one', 'too small', 'value', suggestion='2')")
    project.write("one: {uses: toy.make, with: {value: 1}}", **head)
    with pytest.raises(ManifestError) as raised:
        project.plan()
    assert str(raised.value) == f"{project.manifest}:4:39: one: too small (did you mean '2'?)"
    assert raised.value.exit_code == ExitCode.USAGE


def test_a_warning_stops_nothing(project):
    body = "yield plan.problem('one', 'rather small', 'value', severity='warning')"
    project.write("one: {uses: toy.make, with: {value: 1}}", **with_rules(project, body))
    (warning,) = project.plan().warnings
    assert str(warning) == f"{project.manifest}:4:39: warning: one: rather small"
    assert project.plan().subplan("one").warnings == (warning,)


def test_beside_an_error_there_is_no_word_of_warnings(project):
    body = "return [plan.problem('one', 'small', severity='warning'), plan.problem('one', 'wrong')]"
    project.write("one: {uses: toy.make}", **with_rules(project, body))
    with pytest.raises(ManifestError, match=r"m\.yaml:4:8: one: wrong$"):
        project.plan()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return [1 / 0]", "ZeroDivisionError: division by zero (rules.py:7)"),
        ("return ['words']", "it returned 'words', which is not a Problem"),
        ("return 3", "TypeError: 'int' object is not iterable"),
        ("raise SystemExit(0)", "SystemExit: 0 (rules.py:7)"),
    ],
)
def test_rules_that_break_are_the_plugins_fault(project, body, reason):
    project.write("one: {uses: toy.make}", **with_rules(project, body))
    with pytest.raises(ManifestError) as raised:
        project.plan()
    assert str(raised.value) == f"plugin ./rules.py failed in ptpipe_check: {reason}"
    assert raised.value.exit_code == ExitCode.PLUGIN


@pytest.mark.parametrize(
    ("kinds", "code", "severity"),
    [
        (["toy.mak"], ExitCode.USAGE, "warning"),
        (["acme.prune"], ExitCode.PLUGIN, "error"),
        (["toy.mak", "acme.prune", "toy.ad"], ExitCode.PLUGIN, "error"),
    ],
)
def test_installed_plugins_that_may_have_an_unknown_kind_are_named_once(project, monkeypatch, kinds, code, severity):
    broken = SimpleNamespace(name="acme", value="acme_that_is_not_there")
    monkeypatch.setattr("ptpipe.plan.vocabulary._entry_points", lambda: [broken])
    project.write("\n".join(f"s{number}: {{uses: {kind}}}" for number, kind in enumerate(kinds)))
    with pytest.raises(ManifestError) as raised:
        project.plan()
    *unknown, last = raised.value.problems
    assert len(unknown) == len(kinds)
    assert last.message == "plugin acme failed to load: ModuleNotFoundError: No module named 'acme_that_is_not_there'"
    assert (last.severity, raised.value.exit_code) == (severity, code)


VALIDATOR = """
from pydantic import field_validator
class GateConfig(StageConfig):
    @field_validator("least")
    @classmethod
    def _check(cls, value):
        return {}["a"]
"""


def test_a_validator_that_breaks_is_the_plugins_fault(project):
    project.edit("class GateConfig(StageConfig):", VALIDATOR)
    project.write("one: {uses: toy.make}\ngate: {uses: toy.gate, with: {least: 1}}")
    message = r"checking the options of toy\.gate failed: KeyError: 'a' \(toy\.py:\d+\)"
    with pytest.raises(ManifestError, match=message) as raised:
        project.plan()
    assert raised.value.exit_code == ExitCode.PLUGIN


HALVED = VALIDATOR.replace('return {}["a"]', "return value / 2")


def test_options_that_their_stage_would_not_get_are_the_plugins_fault(project):
    project.edit("class GateConfig(StageConfig):", HALVED)
    project.write("one: {uses: toy.make}\ngate: {uses: toy.gate, with: {least: 1}}")
    message = r"m.yaml:6:32: gate: option 'least' of toy.gate is 0.5, and validated again in the stage it is 0.25: its"
    with pytest.raises(ManifestError, match=message) as raised:
        project.plan()
    assert raised.value.exit_code == ExitCode.PLUGIN
    project.plan({"gate.least": 0})


def test_the_plan_of_a_stage_has_what_it_needs_and_no_more(project):
    project.write("""
        one: {uses: toy.make}
        other: {uses: toy.make}
        two: {uses: toy.split, needs: {a: one}}
        three: {uses: toy.add, needs: {a: two.low, b: one}}
        four: {uses: toy.total, needs: {numbers: [other, three]}}
    """)
    whole = project.plan()
    part = whole.subplan("three")
    assert [stage.id for stage in part.stages] == ["one", "two", "three"]
    assert part["three"] is whole["three"]
    assert [stage.id for stage in whole.subplan("four").stages] == ["one", "other", "two", "three", "four"]
    assert [stage.id for stage in whole.subplan("other").stages] == ["other"]


def test_a_problem_of_a_stage_that_is_not_bound(project):
    project.write("one: {uses: toy.make}")
    assert project.plan().problem("two", "is gone").message == "two: is gone"
