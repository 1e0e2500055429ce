"""`ptpipe stages`: list the stage kinds, or describe one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import (
    echo,
    echo_warnings,
    json_option,
    plugin_option,
    print_json,
    print_table,
    read_vocabulary,
)
from ptpipe.errors import Problem, UsageError, nearest

if TYPE_CHECKING:
    from ptpipe.plan.vocabulary import Vocabulary
    from ptpipe.stages import Port, Stage


@click.command()
@click.argument("kind", required=False)
@plugin_option
@json_option
def stages(kind: str | None, named: tuple[str, ...], as_json: bool) -> None:
    """List the stage kinds; with KIND, its help, inputs, outputs and every option; with a family, its kinds."""
    from ptpipe.plan.hints import kind_hint

    vocabulary = read_vocabulary(named)
    family = [name for name in vocabulary.stages if kind is None or name.startswith(f"{kind}.")]
    if kind is None or family:
        _list_stages(vocabulary, sorted(family), as_json)
        return
    if kind not in vocabulary.stages:
        suggestion, hint = kind_hint(kind, vocabulary.stages)
        if suggestion is None and not hint:
            families = {name.partition(".")[0] for name in vocabulary.stages}
            suggestion = nearest(kind, sorted(families))
        if not (suggestion or hint or named):
            hint = "; name the plugin that has it: --plugin ./my_plugin.py"
        # One of these may have the kind.
        echo_warnings([Problem(line, severity="warning") for line in vocabulary.broken_lines])
        raise UsageError(str(Problem(f"there is no stage kind {kind!r}{hint}", suggestion=suggestion)))
    _describe(vocabulary, vocabulary.stages[kind], as_json)


def _list_stages(vocabulary: Vocabulary, names: list[str], as_json: bool) -> None:
    kinds = [vocabulary.stages[kind] for kind in names]
    if as_json:
        print_json([_facts(vocabulary, stage) for stage in kinds])
        return
    rows = [(stage.kind, stage.help.partition("\n")[0], vocabulary.owners[stage.kind].name) for stage in kinds]
    print_table(("kind", "what it does", "plugin"), rows)


def _describe(vocabulary: Vocabulary, stage: Stage[..., object], as_json: bool) -> None:
    from ptpipe.plan.schema import option_rows

    facts = _facts(vocabulary, stage)
    if as_json:
        print_json(facts)
        return
    echo(f"{stage.kind}  (plugin {facts['plugin']}, version {stage.version})\n\n{stage.help}\n")
    echo(f"inputs:   {', '.join(map(_port_words, stage.inputs)) or 'none'}")
    echo(f"outputs:  {', '.join(map(_port_words, stage.outputs))}\n")
    rows = [(row["name"], row["type"], row["default"], row["help"]) for row in option_rows(stage)]
    if rows:
        print_table(("option", "type", "default", "help"), rows)
    else:
        echo("options:  none")


def _facts(vocabulary: Vocabulary, stage: Stage[..., object]) -> dict[str, object]:
    from ptpipe.plan.schema import option_rows

    return {
        "kind": stage.kind,
        "version": stage.version,
        "plugin": vocabulary.owners[stage.kind].name,
        "help": stage.help,
        "inputs": [_port_facts(port) for port in stage.inputs],
        "outputs": [_port_facts(port) for port in stage.outputs],
        "options": option_rows(stage),
        "per_machine": stage.per_machine,
    }


def _port_facts(port: Port) -> dict[str, object]:
    return {"name": port.name, "type": port.type.__name__, "optional": port.optional, "several": port.several}


def _port_words(port: Port) -> str:
    kind = f"several {port.type.__name__}" if port.several else port.type.__name__
    return f"{port.name}: {kind}{' (optional)' if port.optional else ''}"
