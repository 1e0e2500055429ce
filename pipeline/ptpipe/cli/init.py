"""`ptpipe init`: write a starter manifest, or a starter plugin with its test."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import click

from ptpipe.cli.common import echo, existing_files
from ptpipe.errors import UsageError
from ptpipe.manifest.yaml import scalar


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--plugin", metavar="NAME", help="Write NAME.py, a plugin with a network of your own, and its test.")
@click.option("--force", is_flag=True, help="Replace existing files.")
def init(path: Path | None, plugin: str | None, force: bool) -> None:
    """Write a commented starter manifest to PATH (ptpipe.yaml), or with --plugin a starter plugin into folder PATH."""
    if plugin is None:
        target = path or Path("ptpipe.yaml")
        _write({target: _filled("manifest.yaml", file=str(target), name=_name(target))}, force)
        echo(f"wrote {target}; next: ptpipe run {target}")
        return
    module = re.sub(r"\W", "_", plugin.removesuffix(".py").lower(), flags=re.ASCII)
    if not module[:1].isalpha() or keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise click.BadParameter(f"{plugin!r} can't name a Python module of your own", param_hint="--plugin")
    folder = path or Path()
    installed = find_spec(module)
    if installed and installed.origin and Path(installed.origin).resolve().parent != folder.resolve():
        message = (
            f"{module} is installed here, and {folder / module}.py would be imported in its place: choose another name"
        )
        raise click.BadParameter(message, param_hint="--plugin")
    plugin_file, test_file = folder / f"{module}.py", folder / f"test_{module}.py"
    contents = {plugin_file: "plugin.py.txt", test_file: "test_plugin.py.txt"}
    _write({target: _filled(template, module=module) for target, template in contents.items()}, force)
    echo(f"wrote {plugin_file} and {test_file}; next:")
    echo(f"  pytest {test_file}")
    echo(f"  plugins: [./{plugin_file.name}]   # in a manifest beside it, then `uses: model.{module}`")


def _name(path: Path) -> str:
    """Return a manifest's name after its file, as YAML: in quotes where it would be read as a number."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-")[:64] or "starter"
    return name if isinstance(scalar(name), str) else f'"{name}"'


def _filled(template: str, **words: str) -> str:
    text = (files("ptpipe") / "templates" / template).read_text(encoding="utf-8")
    for name, word in words.items():
        text = text.replace("{" + name + "}", word)
    return text


def _write(contents: dict[Path, str], force: bool) -> None:
    """Write all of the files, or none where one exists."""
    existing = [str(path) for path in contents if path.exists()]
    if existing and not force:
        raise existing_files(existing)
    for path, content in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
