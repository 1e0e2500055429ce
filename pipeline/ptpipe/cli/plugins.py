"""`ptpipe plugins`: list the loaded plugins."""

from __future__ import annotations

import click

from ptpipe.cli.common import json_option, plugin_option, print_json, print_table, read_vocabulary


@click.command()
@plugin_option
@json_option
def plugins(named: tuple[str, ...], as_json: bool) -> None:
    """List the loaded plugins with their kinds, and the broken ones with the reason."""
    vocabulary = read_vocabulary(named)
    rows = []
    for plugin in vocabulary.plugins:
        kinds = sorted(kind for kind, owner in vocabulary.owners.items() if owner is plugin)
        rows.append({"name": plugin.name, "source": plugin.source, "kinds": kinds, "problem": ""})
    for name, reason in vocabulary.broken.items():
        rows.append({"name": name, "source": "", "kinds": [], "problem": reason})
    if as_json:
        print_json(rows)
        return
    table = [(str(r["name"]), str(r["source"]), " ".join(r["kinds"]) or str(r["problem"])) for r in rows]
    print_table(("plugin", "source", "kinds"), table)
