"""`ptpipe schema`: the JSON Schema of manifests and of other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe.cli.common import plugin_option, print_json, read_vocabulary
from ptpipe.errors import Problem, UsageError, nearest

if TYPE_CHECKING:
    from ptpipe.plan.vocabulary import Vocabulary

_MANIFEST, _SUFFIX = "manifest", ".schema.json"


@click.command()
@click.argument("name", default=_MANIFEST)
@plugin_option
def schema(name: str, named: tuple[str, ...]) -> None:
    """Print the JSON Schema of manifests, every kind's options included, or of another file.

    Name it in a manifest's first line, and editors complete and check as you type:
    `# yaml-language-server: $schema=schema.json`.

    NAME is `manifest`, or a file that a plugin writes: `verdict` is `verdict.json` in a run's folder. A plugin has
    the schema beside its module, as `NAME.schema.json`.
    """
    from ptpipe.plan.schema import manifest_schema

    vocabulary = read_vocabulary(named)
    if name == _MANIFEST:
        print_json(manifest_schema(vocabulary))
        return
    files = _schema_files(vocabulary)
    if name not in files:
        known = [_MANIFEST, *sorted(files)]
        message = f"there is no schema {name!r}, but {', '.join(known)}"
        raise UsageError(str(Problem(message, suggestion=nearest(name, known))))
    print_json(json.loads(files[name].read_text(encoding="utf-8")))


def _schema_files(vocabulary: Vocabulary) -> dict[str, Path]:
    """Return the schemas that lie beside the plugins' modules, by name; of two with one name, that of the first."""
    modules = [Path(str(plugin.module.__file__)).parent for plugin in vocabulary.plugins]
    files = [file for folder in modules for file in sorted(folder.glob(f"*{_SUFFIX}"))]
    return {file.name.removesuffix(_SUFFIX): file for file in reversed(files)}
