"""The command `ptpipe check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptpipe import ExitCode, UsageError
from ptpipe.commands import echo, json_option, print_json, print_table, stdout_for_results

if TYPE_CHECKING:
    from ptpipe_onnx.reproduction import OutputDifference, Reproduction


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--vectors",
    "vectors_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Its test vectors (default: beside it, MODEL with .vectors.npz).",
)
@json_option
@stdout_for_results()
def check(model: Path, vectors_path: Path | None, as_json: bool) -> int:
    """Run an ONNX file on its test vectors here, and compare its outputs with those of the export.

    MODEL and its test vectors are what export.onnx wrote. It takes NumPy and onnxruntime, and neither torch nor a
    manifest. Outputs are usually equal, or those of int8 files off by one step; the stored tolerances allow for
    processors that round all sums otherwise. The exit code is 0 if the outputs are within them, 1 if they are not or
    the file can't be run, 5 if a file is damaged or MODEL is not the one that the vectors were made for.
    """
    from ptpipe_onnx.reproduction import reproduce
    from ptpipe_onnx.vectors import SUFFIX, Vectors

    vectors_path = vectors_path or model.with_suffix(SUFFIX)
    for path, remedy in ((model, ""), (vectors_path, "; name them with --vectors")):
        if not path.is_file():
            raise UsageError(f"{path}: no such file{remedy}")
    result = reproduce(model, Vectors.load(vectors_path))
    if as_json:
        print_json({"model": str(model), "vectors": str(vectors_path), **result.to_json()})
    else:
        _print(model, result)
    return int(ExitCode.DONE if result.is_reproduced else ExitCode.FAILED)


def _print(model: Path, result: Reproduction) -> None:
    verdict = "reproduces" if result.is_reproduced else "does not reproduce"
    echo(f"{model.name} {verdict} its {result.num_samples} test vectors on this machine")
    headings = ("output", "max difference", "allowed", "rms difference", "allowed", "top-1 agreement", "")
    print_table(headings, [_row(name, output) for name, output in result.outputs.items()])
    rows = [(name, value, result.made_with.get(name, "")) for name, value in result.here.items()]
    print_table(("", "here", "made with"), rows)
    if result.hint:
        echo(result.hint)


def _row(name: str, output: OutputDifference) -> tuple[str, ...]:
    figures = (output.max_abs, output.tolerance.max_abs, output.rms, output.tolerance.rms)
    agreement = "" if output.top1_agreement is None else f"{output.top1_agreement:.2%}"
    return (name, *(f"{value:.4g}" for value in figures), agreement, output.match)
