"""`ptpipe schema`: the manifest's JSON Schema."""

from __future__ import annotations

import click

from ptpipe.cli.common import plugin_option, print_json, read_vocabulary


@click.command()
@plugin_option
def schema(named: tuple[str, ...]) -> None:
    """Print the JSON Schema of manifests, every kind's options included.

    Name it in a manifest's first line, and editors complete and check as you type:
    `# yaml-language-server: $schema=schema.json`.
    """
    from ptpipe.plan.schema import manifest_schema

    print_json(manifest_schema(read_vocabulary(named)))
