"""What the arguments of `ptpipe compare` name: runs, their stages, stored artifacts, ONNX files, model folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptpipe import JSON, PtpipeError, Store, UsageError, nearest
from ptpipe.commands import comparisons, find_run, list_runs, past_plan, read_record

_DIGITS = re.compile(r"[0-9a-f]{6,64}")
"""Of a digest, as many as make it unlikely that they are meant as anything else."""
_KINDS = {"Model": "model.torch", "OnnxFile": "model.onnx"}
"""The kinds that take a stored artifact of a type."""
_RECIPE, _ONNX = "recipe.json", "model.onnx"
_BUILT_IN, _PLUGIN_FILE = "ptpipe_", "ptpipe_file_"


@dataclass(frozen=True)
class Subject:
    """One model to measure, and the stage that takes it."""

    text: str
    """As on the command line."""
    name: str
    """What to call it; others may have the same name."""
    qualifier: str
    """What tells it from others of its name: the number of its run, the name of its folder."""
    kind: str
    options: Mapping[str, JSON]
    plugins: tuple[str, ...] = ()
    """That have the network's code."""


def find_subjects(store: Store, text: str) -> list[Subject]:
    """Return the models that an argument names. Raises UsageError where there are none, suggesting what may be meant.

    `text`: the path of an `.onnx` file or a model's folder; `RUN:STAGE`; a run: the models that it compared, its
    baseline first, or where it compared none, all that it delivered; the first digits of an artifact's digest.
    """
    path = Path(text).expanduser()
    if path.suffix == ".onnx" or path.exists():
        return [_in_path(text, path)]
    run, colon, stage = text.rpartition(":")
    if colon and run:
        return [_output(store, text, find_run(store, run)[0], stage)]
    if _DIGITS.fullmatch(text) and (found := _by_digest(store, text)):
        return [found]
    try:
        record, _ = find_run(store, text)
    except UsageError as error:
        raise UsageError(f"{text!r} is no file, no folder and no artifact's digest, and {error}") from error
    return [_output(store, text, record, name) for name in _compared(record) or _delivered(record)]


def _in_path(text: str, path: Path) -> Subject:
    path = path.absolute()
    if not path.exists():
        near = nearest(path.name, [each.name for each in path.parent.glob("*.onnx")])
        raise UsageError(f"there is no file {text}{f' (did you mean {near!r}?)' if near else ''}")
    if not path.is_dir():
        if path.suffix != ".onnx":
            raise UsageError(f"{text} is no .onnx file, and no folder of a model")
        return Subject(text, path.stem, path.parent.name, "model.onnx", {"file": str(path)})
    if (path / _RECIPE).exists():
        return Subject(text, path.name, path.parent.name, "model.torch", {"folder": str(path)})
    files = [path / _ONNX] if (path / _ONNX).exists() else sorted(path.glob("*.onnx"))
    if len(files) != 1:
        raise UsageError(f"{text} is no model's folder: it has {len(files) or 'no'} .onnx files, and no {_RECIPE}")
    return Subject(text, path.name, path.parent.name, "model.onnx", {"file": str(files[0])})


def _compared(record: Mapping[str, Any]) -> list[str]:
    """Return the references of the models that a run compared, the baseline first."""
    found = [(row["name"], row["name"] != of.get("baseline")) for _, of in comparisons(record) for row in of["rows"]]
    names = dict.fromkeys(str(name) for name, _ in sorted(found, key=lambda pair: pair[1]))
    outputs = {name for stage in record["stages"] for name in _output_names(stage)}
    return [name for name in names if name in outputs]


def _delivered(record: Mapping[str, Any]) -> list[str]:
    """Return the references of all models that a run delivered. Raises UsageError where it delivered none."""
    stages = [stage for stage in record["stages"] if stage["deliverables"]]
    found = [stage["stage_id"] for stage in stages if any(of["type"] in _KINDS for of in stage["outputs"].values())]
    if not found:
        raise UsageError(f"run {record['run_id']} delivered no model")
    return found


def _output_names(stage: Mapping[str, Any]) -> Iterator[str]:
    """Yield the references that name a model among a stage's outputs: `qat`, `train.best`."""
    models = [name for name, output in stage["outputs"].items() if output["type"] in _KINDS]
    yield from (f"{stage['stage_id']}.{name}" for name in models)
    if len(models) == 1:
        yield stage["stage_id"]


def _output(store: Store, text: str, record: Mapping[str, Any], reference: str) -> Subject:
    """Return an output of a run's stage, by `STAGE` or `STAGE.OUTPUT`."""
    references = {name: stage for stage in record["stages"] for name in _output_names(stage)}
    if reference not in references:
        near = nearest(reference, references)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(_shortest(references)) or 'none'}"
        raise UsageError(f"run {record['run_id']} has no model {reference!r} ({hint})")
    stage = references[reference]
    models = {name: of for name, of in stage["outputs"].items() if of["type"] in _KINDS}
    output = models[reference.partition(".")[2]] if "." in reference else next(iter(models.values()))
    return _stored(store, text, record["run_id"], reference, output)


def _shortest(references: Mapping[str, object]) -> list[str]:
    return [name for name in references if name.partition(".")[0] not in references or "." not in name]


def _stored(store: Store, text: str, run_id: str, reference: str, output: Mapping[str, Any]) -> Subject:
    """Return a stored artifact, its bytes verified."""
    digest, number = output["digest"], run_id.rpartition("-")[2]
    if not store.has(digest):
        raise UsageError(f"{reference} of run {run_id} is no longer in {store.root}: run its manifest again")
    store.verify(digest)
    files, kind = store.files(digest), _KINDS[output["type"]]
    if kind == "model.onnx":
        return Subject(text, reference, number, kind, {"file": str(files / _ONNX)})
    functions, plugins = _code(store, run_id, reference.partition(".")[0], files / _RECIPE)
    options: dict[str, JSON] = {"folder": str(files), **({"functions": [*functions]} if functions else {})}
    return Subject(text, reference, number, kind, options, plugins)


def _code(store: Store, run_id: str, stage_id: str, recipe: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the functions and plugins of the user's own that a stored network is built by.

    They are those that the run's manifest names: what is stored does not choose what is loaded.
    """
    content = json.loads(recipe.read_text(encoding="utf-8"))
    references = [content["builder"], *content["prepare"], *content["convert"]]
    roots = [own["address"] for own in references if "source" not in own]
    is_built_in = all(root.startswith(_BUILT_IN) and not root.startswith(_PLUGIN_FILE) for root in roots)
    if is_built_in and len(roots) == len(references):
        return (), ()
    plan = past_plan(store, run_id)
    named = [plugin for plugin in plan.vocabulary.plugins if plugin.source == "manifest"]
    plugins = (str(own.module.__file__ if own.module.__name__.startswith(_PLUGIN_FILE) else own.name) for own in named)
    return plan.source_functions[stage_id], tuple(plugins)


def _by_digest(store: Store, digits: str) -> Subject | None:
    """Return the stored model whose digest, or whose stage's key, begins with these digits.

    Raises UsageError where several do, or what does is no model.
    """
    found: dict[str, Subject] = {}
    for run in list_runs(store):
        try:
            record = read_record(run.folder)
        except PtpipeError:
            continue
        for stage in record["stages"]:
            for name, output in stage["outputs"].items():
                is_meant = output["digest"].startswith(digits)
                is_meant = is_meant or (stage["key"].startswith(digits) and output["type"] in _KINDS)
                if is_meant and output["digest"] not in found:
                    found[output["digest"]] = _of_digest(store, digits, record, stage, name)
    if len(found) > 1:
        raise UsageError(f"{digits} begins the digests of {len(found)} artifacts; give more digits")
    return next(iter(found.values()), None)


def _of_digest(store: Store, digits: str, record: Mapping[str, Any], stage: Mapping[str, Any], output: str) -> Subject:
    names = list(_output_names(stage))
    reference = stage["stage_id"] if stage["stage_id"] in names else f"{stage['stage_id']}.{output}"
    if reference not in names:
        type_ = stage["outputs"][output]["type"]
        raise UsageError(f"artifact {digits} is a {type_}, of {stage['stage_id']} of run {record['run_id']}: no model")
    return _stored(store, digits, record["run_id"], reference, stage["outputs"][output])
