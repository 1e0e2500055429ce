"""What plugins add to the reports of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ptpipe.artifact import Artifact
from ptpipe.events import RunFinished
from ptpipe.plan.bind import Plan
from ptpipe.plan.vocabulary import call_each
from ptpipe.sections import Section
from ptpipe.store.store import Store


@dataclass(frozen=True)
class OutputLoader:
    """Loads the outputs of a run's stages from the store, when a plugin asks for them."""

    plan: Plan
    store: Store
    run: RunFinished

    def __call__(self, stage_id: str, output: str) -> Artifact:
        """Return a stage's output. Raises KeyError where the stage has none of that name, or didn't finish."""
        outputs = next((stage.outputs for stage in self.run.stages if stage.stage_id == stage_id), {})
        types = {port.name: port.type for port in self.plan[stage_id].stage.outputs}
        return (
            self.store.get(str(outputs[output]["digest"]), types[output])
            .with_options(self.plan.unkeyed_values[stage_id])
            .with_source_functions(self.plan.source_functions[stage_id])
        )


def report_sections(plan: Plan, store: Store, run: RunFinished, notify: Callable[[str], None]) -> tuple[Section, ...]:
    """Return the sections of all plugins. `notify`: called with a line for each plugin that fails."""
    sections: list[Section] = []
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
        load = OutputLoader(plan, store, run)
        results = list(call_each(plan.vocabulary.manager, "ptpipe_report_sections", plan=plan, run=run, load=load))
    for result in results:
        strange = [item for item in result.items if not isinstance(item, Section)]
        error = result.error or (f"it returned {strange[0]!r:.80}, which is no Section" if strange else "")
        if error:
            notify(f"plugin {result.plugin} adds nothing to the report: {error}")
        else:
            sections += result.items
    return tuple(sections)
