"""What a run's record says at a glance: overrides, options, primary metrics and verdicts.

A comparison is any output whose summary has `rows` (objects with a `name` and `metrics`) and `metrics` (objects with a
`name`, the primary one first); a verdict one whose summary has a `decision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ptpipe.artifact import JSON
from ptpipe.errors import ManifestError


def comparisons(record: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield stage and summary of every comparison of models in `record`, a run's."""
    for stage, output in _outputs(record):
        summary = output.get("summary")
        if isinstance(summary, dict) and _are_objects(summary.get("rows")) and _are_objects(summary.get("metrics")):
            yield stage, summary


def primary_metrics(record: Mapping[str, Any]) -> dict[str, JSON]:
    """Return the primary metric of every model that the run of `record` compared, by `model.metric`."""
    found: dict[str, JSON] = {}
    for _, summary in comparisons(record):
        name = next((metric.get("name") for metric in summary["metrics"]), None)
        for row in summary["rows"]:
            metrics = row.get("metrics")
            if isinstance(metrics, dict) and name in metrics:
                found[f"{row.get('name')}.{name}"] = metrics[name]
    return found


def verdicts(record: Mapping[str, Any]) -> dict[str, Mapping[str, JSON]]:
    """Return the summary of every verdict in `record`, a run's, by its stage."""
    return {
        stage["stage_id"]: output["summary"]
        for stage, output in _outputs(record)
        if isinstance(output.get("summary"), dict) and isinstance(output["summary"].get("decision"), str)
    }


def options(record: Mapping[str, Any]) -> dict[str, JSON]:
    """Return every option that decided a result, defaults included, and the seed, by `stage.option`.

    `record`: the run's.
    """
    found: dict[str, JSON] = {"seed": record["seed"]}
    for stage in record["stages"]:
        config = stage["parts"].get("config")
        found |= dict(_flat(stage["stage_id"], config)) if isinstance(config, dict) else {}
    return found


def written_options(folder: Path, record: Mapping[str, Any]) -> set[str]:
    """Return the names in `options` that a run's manifest or overrides write: others have defaults, or the machine's.

    `folder`, `record`: the run's. Empty but for the overrides where its manifest can't be read.
    """
    from ptpipe.manifest.manifest import load

    found = {"seed", *record["overrides"]}
    try:
        stages = load(folder / "manifest.yaml").stages
    except ManifestError:
        return found
    return found | {name for stage in stages for name, _ in _flat(stage.id, dict(stage.options))}


def _outputs(record: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    for stage in record["stages"]:
        for output in stage["outputs"].values():
            yield stage, output


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _flat(name: str, value: JSON) -> Iterator[tuple[str, JSON]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value
