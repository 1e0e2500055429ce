"""The manifest of a run that measures models together: data stages of another manifest, models, one comparison."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, UsageError, nearest
from ptpipe_eval.comparing.subjects import Subject
from ptpipe_torch import Data

if TYPE_CHECKING:
    from ptpipe import Plan

COMPARE = "compare"
_MAX_ID = 64


@dataclass(frozen=True)
class DataStage:
    """The stage of a manifest whose data set is predicted."""

    plan: Plan
    """Of this stage and those above it."""
    reference: str


def split_data_argument(text: str) -> tuple[Path, str | None]:
    """Return manifest and stage of `MANIFEST[:STAGE]`."""
    manifest, colon, stage = text.rpartition(":")
    if colon and manifest and not Path(text).exists():
        return Path(manifest), stage
    return Path(text), None


def select_data(plan: Plan, wanted: str | None) -> DataStage:
    """Return the data stage of a plan: the one of that name, else the only one. Raises UsageError."""
    found = {
        own.id if len(own.stage.outputs) == 1 else f"{own.id}.{port.name}": own.id
        for own in plan.stages
        for port in own.stage.outputs
        if issubclass(port.type, Data)
    }
    path, names = plan.manifest.path, ", ".join(found) or "none"
    if wanted is None and len(found) != 1:
        raise UsageError(f"{path} has {len(found)} data stages, {names}: name one, --data {path}:STAGE")
    reference = wanted or next(iter(found))
    if reference not in found:
        close = nearest(reference, found)
        hint = f"did you mean {close!r}?" if close else f"it has {names}"
        raise UsageError(f"{path} has no data stage {reference!r} ({hint})")
    return DataStage(plan.subplan(found[reference]), reference)


def compose(
    data: DataStage, subjects: Sequence[Subject], baseline: str | None, kind: str, options: Mapping[str, JSON]
) -> dict[str, JSON]:
    """Return the manifest's content. `baseline`: as on the command line, or a model's name; None: the first one.

    `kind`, `options`: of the comparison. Raises UsageError for a baseline that is not compared.
    """
    names = stage_ids(subjects, {stage.id for stage in data.plan.stages})
    stages: dict[str, JSON] = dict(_data_stages(data))
    for name, subject in zip(names, subjects, strict=True):
        needs: dict[str, JSON] = {"needs": {"data": data.reference}} if subject.kind == "model.onnx" else {}
        stages[name] = {"uses": subject.kind, **needs, "with": dict(subject.options)}
    stages[COMPARE] = {
        "uses": kind,
        "needs": {"models": [*names], "data": data.reference},
        "with": {"baseline": _baseline(baseline, names, subjects), **options},
    }
    named = [plugin for plugin in data.plan.manifest.plugins for plugin in [_beside(data.plan.manifest.path, plugin)]]
    plugins: list[JSON] = [*dict.fromkeys([*named, *(plugin for subject in subjects for plugin in subject.plugins)])]
    return {"version": 1, "name": COMPARE, "seed": data.plan.manifest.seed, "plugins": plugins, "stages": stages}


def stage_ids(subjects: Sequence[Subject], taken: set[str]) -> list[str]:
    """Return a stage id for each model: its name, with its qualifier and a number as far as needed to be unique."""
    short = [_as_id(subject.name) for subject in subjects]
    counts = Counter(short)
    ids: list[str] = []
    for name, subject in zip(short, subjects, strict=True):
        wanted = name if counts[name] == 1 else _as_id(f"{name[:40]}-{subject.qualifier}")
        unique, number = wanted, 1
        while unique in {*ids, *taken, COMPARE}:
            number += 1
            unique = f"{wanted[: _MAX_ID - 5]}-{number}"
        ids.append(unique)
    return ids


def _as_id(name: str) -> str:
    """Return a name that a stage may have: lower-case letters, digits, `_` and `-`, beginning with a letter."""
    words = re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-") or "model"
    return (words if words[0].isalpha() else f"model-{words}")[:_MAX_ID]


def _baseline(wanted: str | None, names: Sequence[str], subjects: Sequence[Subject]) -> str:
    if wanted is None:
        return names[0]
    found = [name for name, subject in zip(names, subjects, strict=True) if wanted in (name, subject.text)]
    if not found:
        close = nearest(wanted, [*names, *(subject.text for subject in subjects)])
        hint = f"did you mean {close!r}?" if close else f"they are {', '.join(names)}"
        raise UsageError(f"--baseline {wanted} is none of the models ({hint})")
    return found[0]


def _data_stages(data: DataStage) -> Mapping[str, JSON]:
    """Return the data stage and those above it, with the options of the manifest and its overrides."""
    wanted = {stage.id: stage for stage in data.plan.stages}
    stages: dict[str, JSON] = {}
    for entry in data.plan.manifest.stages:
        if entry.id in wanted:
            wiring = wanted[entry.id].wiring
            several = {port.name for port in wanted[entry.id].stage.inputs if port.several}
            needs: dict[str, JSON] = {
                port: [*map(str, found)] if port in several else str(found[0]) for port, found in wiring.items()
            }
            stages[entry.id] = {"uses": wanted[entry.id].kind, "needs": needs, "with": dict(entry.options)}
    return stages


def _beside(manifest: Path, plugin: str) -> str:
    """Return the absolute name of a plugin's file that a manifest names; a module's as it is."""
    is_file = plugin.endswith(".py") or "/" in plugin
    return str((manifest.parent / plugin).resolve()) if is_file else plugin
