"""MkDocs hooks: collect the repository's pages under their own paths, generate the reference, set the navigation.

A page's address on the site is its path in the repository (`plugins/README.md` is `plugins/index.html`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

    from ptpipe.stages import Port, Stage

ROOT = Path(__file__).parent.parent
GUIDES = {
    "Your first stage": "plugins/README.md",
    "Your own script": "docs/own_script.md",
    "Your data": "docs/data.md",
    "Networks": "docs/networks.md",
    "Training": "docs/training.md",
    "Quantization": "docs/quantization.md",
    "ONNX files": "docs/onnx.md",
    "Comparisons": "docs/compare.md",
    "Gates": "docs/gates.md",
    "In CI": "docs/ci.md",
    "Parallel training": "docs/parallel.md",
    "Latency": "docs/latency.md",
    "Reports": "docs/report.md",
    "Sweeps": "docs/sweep.md",
    "Trackers": "docs/trackers.md",
    "Provenance": "docs/provenance.md",
}
API = {
    "ptpipe": "pipeline/ptpipe/__init__.py",
    "ptpipe.commands": "pipeline/ptpipe/commands.py",
    "ptpipe.host": "pipeline/ptpipe/host.py",
    "ptpipe.launching": "pipeline/ptpipe/launching.py",
    "ptpipe.sections": "pipeline/ptpipe/sections.py",
    "ptpipe.testing": "pipeline/ptpipe/testing.py",
    "ptpipe_torch": "plugins/ptpipe_torch/__init__.py",
}
PROJECT = {
    "Measurements": "docs/measurements.md",
    "Guarantees": "docs/guarantees.md",
    "The core": "pipeline/README.md",
    "Benchmarks": "benchmarks/README.md",
    "Security": "SECURITY.md",
    "Contributing": "CONTRIBUTING.md",
    "Changelog": "CHANGELOG.md",
}
STAGES, COMMANDS = "reference/stages.md", "reference/command_line.md"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
"""The target of a relative link, without its anchor."""
TABLE_ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")
"""In a table, Python-Markdown takes the backslash before a pipe in code literally; others need it."""
BEGINS_BLOCK = re.compile(r"[-*] |\d+\. |\|")


def decisions() -> list[str]:
    """Return the pages of `pipeline/decisions/`, the overview first."""
    pages = sorted(
        (ROOT / "pipeline" / "decisions").glob("*.md"), key=lambda path: (path.name != "README.md", path.name)
    )
    return [path.relative_to(ROOT).as_posix() for path in pages]


def api() -> dict[str, str]:
    """Return each public module that exists, with its page."""
    return {module: f"reference/{module}.md" for module, path in API.items() if (ROOT / path).is_file()}


def pages() -> list[str]:
    """Return every page that a person wrote, as a path from the root."""
    return ["README.md", *GUIDES.values(), *PROJECT.values(), *decisions()]


def linked_files() -> set[str]:
    """Return the files of the repository that pages link to and that are no pages: pictures, scripts to copy."""
    found = set()
    for page in pages():
        for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = (ROOT / page).parent / target
            if path.is_file() and path.suffix != ".md":
                found.add(path.resolve().relative_to(ROOT).as_posix())
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = [
        {"Home": "README.md"},
        {"Guides": [{title: path} for title, path in GUIDES.items()]},
        {
            "Reference": [
                {"Stages": STAGES},
                {"Command line": COMMANDS},
                *({module: path} for module, path in api().items()),
            ]
        },
        {"Project": [*({title: path} for title, path in PROJECT.items()), {"Decisions": decisions()}]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what lies in docs/ by the pages, what they link to, and the generated reference."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            files.remove(file)
    for path in [*pages(), *sorted(linked_files()), "docs/site.css"]:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    generated = {STAGES: stages_page(), COMMANDS: commands_page()}
    generated |= {path: module_page(module) for module, path in api().items()}
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Read a page as code hosting sites do: a link to a folder leads to its page, blocks need no blank line before."""
    linked = LINK.sub(lambda match: match[1] + "README.md" if match[1].endswith("/") else match[1], markdown)
    return with_blank_lines(
        TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), linked)
    )


def with_blank_lines(markdown: str) -> str:
    """Put a blank line before each list and table that follows a paragraph, where Python-Markdown needs one."""
    lines: list[str] = []
    in_fence = False
    for line in markdown.splitlines():
        in_fence ^= line.startswith("```")
        begins = None if in_fence else BEGINS_BLOCK.match(line)
        before = lines[-1] if lines else ""
        if begins and before.strip() and not before.startswith((begins[0][0], " ")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def module_page(module: str) -> str:
    """Return the page of a public module, its members' docstrings rendered by mkdocstrings."""
    return f"# {module}\n\n::: {module}\n"


def core_on_path() -> None:
    """Let the sources be imported, in an environment too where the package is not installed."""
    for folder in ("pipeline", "plugins"):
        if str(ROOT / folder) not in sys.path:
            sys.path.insert(0, str(ROOT / folder))


def stages_page() -> str:
    """Return a section for each built-in stage kind: its help, ports and options."""
    core_on_path()
    from ptpipe.plan.vocabulary import load_vocabulary

    vocabulary = load_vocabulary()
    lines = ["# Stages", "All built-in stage kinds. `ptpipe stages KIND` prints the same, for your own kinds too.", ""]
    family = ""
    for kind in sorted(vocabulary.stages):
        if kind.partition(".")[0] != family:
            family = kind.partition(".")[0]
            lines += [f"## {family}", ""]
        lines += stage_section(vocabulary.stages[kind])
    return "\n".join(lines)


def stage_section(stage: Stage[..., object]) -> Iterator[str]:
    """Yield the lines of one kind's section."""
    from ptpipe.plan.schema import option_rows

    yield f"### `{stage.kind}`\n\n{stage.help}\n"
    ports = [f"- **{direction}** {ports_in_words(each)}" for direction, each in ports_of(stage).items()]
    yield "\n".join(ports) + "\n"
    rows = [[f"`{row['name']}`", row["type"], f"`{row['default']}`", row["help"]] for row in option_rows(stage)]
    if rows:
        yield "| option | type | default | description |\n| --- | --- | --- | --- |"
        yield from (f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    yield ""


def ports_of(stage: Stage[..., object]) -> Mapping[str, Sequence[Port]]:
    """Return the inputs and the outputs, where there are any."""
    return {name: each for name, each in (("Inputs:", stage.inputs), ("Outputs:", stage.outputs)) if each}


def ports_in_words(ports: Sequence[Port]) -> str:
    """Return `model: Model, data: Data (optional)`, as Markdown."""
    words = []
    for port in ports:
        note = " (optional)" if port.optional else " (several)" if port.several else ""
        words.append(f"`{port.name}`: `{port.type.__name__}`{note}")
    return ", ".join(words)


def commands_page() -> str:
    """Return the help of every command, as `--help` prints it."""
    core_on_path()
    import click

    from ptpipe.cli import cli

    root = click.Context(cli, info_name="ptpipe", max_content_width=100, terminal_width=100)
    lines = ["# Command line", f"```text\n{cli.get_help(root)}\n```", ""]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        help_ = command.get_help(
            click.Context(command, root, info_name=name, max_content_width=100, terminal_width=100)
        )
        lines += [f"## `ptpipe {name}`", f"```text\n{help_}\n```", ""]
    return "\n".join(lines)
