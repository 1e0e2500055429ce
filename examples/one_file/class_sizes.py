"""A section of the report in one file: how many samples of each class a data set has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ptpipe import Artifact, Plan, RunFinished, Section, hookimpl
from ptpipe.sections import Dot, DotPlot, DotSeries
from ptpipe_torch import Classification, Data


@hookimpl
def ptpipe_report_sections(plan: Plan, run: RunFinished, load: Callable[[str, str], Artifact]) -> Iterable[Section]:
    """Plot the classes of every data set that the run has."""
    for stage in run.stages:
        for output in stage.outputs:
            port = next(port for port in plan[stage.stage_id].stage.outputs if port.name == output)
            if issubclass(port.type, Data):
                yield class_sizes(stage.stage_id, load(stage.stage_id, output))


def class_sizes(stage_id: str, data: Artifact) -> Section:
    """Return the section of one data set."""
    if not (isinstance(data, Data) and isinstance(data.info.task, Classification)):
        return Section(f"Classes of {stage_id}", ())
    names, splits = data.info.task.class_names, ("train", "test")
    labels = {split: data.splits[split].targets["labels"].values().tolist() for split in splits}
    series = [DotSeries(split, tuple(Dot(labels[split].count(k)) for k in range(len(names)))) for split in splits]
    return Section(f"Classes of {stage_id}", (DotPlot("Samples of each class", "samples", names, tuple(series)),))
