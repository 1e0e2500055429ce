"""What a stage may use beyond its options and inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ptpipe.artifact import JSON
from ptpipe.events import Attachment, Event, FilesRead, LogLine, Metric, Notice, Progress
from ptpipe.reads import ReadLog

_T = TypeVar("_T")


@dataclass(frozen=True)
class NamedCode:
    """The code that a manifest names: what a process that the stage starts may load beside the installed plugins.

    That process calls `ptpipe.launching.load_vocabulary(plugins, Path(folder))` before it loads an artifact, and the
    artifact's `with_source_functions(source_functions)`.
    """

    plugins: tuple[str, ...] = ()
    """The manifest's `plugins:`."""
    folder: str = "."
    """The manifest's folder, which plugins' file names are relative to."""
    source_functions: tuple[str, ...] = ()
    """The functions of the user's that the stage's inputs may call: see `Artifact.with_source_functions`."""


@dataclass(frozen=True)
class Context:
    """The second parameter of every stage function: its surroundings, and the way to report.

    What a stage reports reaches all reporters. Metrics and notices are kept with the stage's result, so that a cached
    stage reports them again. A test can construct one: `Context("net", "model.mlp", seed=7, scratch=tmp_path)`.
    """

    stage_id: str
    """The stage's name in the manifest."""
    kind: str
    seed: int
    """The manifest's; seed every random generator from it."""
    scratch: Path
    """A folder for checkpoints: survives a kill, is handed to the next attempt at the same work (the same key), and is
    deleted once the stage is done."""
    input_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each port, the references that it is bound to, as in the manifest: `{"models": ("pretrain", "onnx")}`."""
    _tell: Callable[[Event], None] = lambda event: None
    rank: int = 0
    """This worker's rank; the outputs of rank 0 are the stage's."""
    num_workers: int = 1
    """How many processes execute the stage together."""
    input_digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each port, the digests of the stored objects that it is bound to, in the order of `input_names`. What is kept
    in `scratch` belongs to these: an input that was rerun may differ under the same key."""
    code: NamedCode = NamedCode()

    def progress(self, done: int, total: int | None, unit: str, **facts: float | int | str) -> None:
        """Report how far the work is. Call it a few times per second, not thousands of times.

        `done`, `total`: in units of `unit` ("images"); `total` is None if unknown. `facts`: shown beside the progress
        bar (`loss=0.31`). Reporters compute rate and remaining time. Raises TypeError for other types than these.
        """
        done = _whole("done", done)
        total = _whole("total", total) if total is not None else None
        unit = _checked("progress(unit=...)", unit, str)
        given = {name: _fact(f"progress({name}=...)", fact) for name, fact in facts.items()}
        self._tell(Progress(self.stage_id, done, total, unit, given))

    def metric(self, **values: JSON) -> None:
        """Record `values`, facts about the result (`accuracy=0.991`). A name's later value replaces its earlier one."""
        for name, value in values.items():
            self._tell(Metric(self.stage_id, name, value))

    def notice(self, text: str) -> None:
        """Report what the user must not miss; `text`: one line in the console, the record and the report."""
        self._tell(Notice(self.stage_id, _checked("notice(...)", text, str)))

    def attach(self, file: Path) -> None:
        """Copy `file`, which lies in the scratch folder (a trace, a picture), to the run's folder.

        The file belongs to this run and not to the stage's result: a run that finds the stage cached does not have it.
        """
        self._tell(Attachment(self.stage_id, str(file)))

    def reads(self, log: ReadLog, known: Iterable[Path] = ()) -> None:
        """Make the result depend on the files of `log`: it is stale where one has changed, and the stage is run again.

        For files that the options don't name; `known` are files and folders that the stage's fingerprint covers. Left
        out are the artifacts folder, the system's and libraries' files, and temporary files.
        """
        covered = [path.absolute() for path in known]
        files = {
            path: file
            for path, file in log.files.items()
            if not any(Path(path).is_relative_to(folder) for folder in covered)
        }
        self._tell(FilesRead(self.stage_id, files))

    def log(self, text: str, shown: bool = False) -> None:
        """Write `text`, one line, to the run's log, and to the screen with --verbose, or in any case if `shown`.

        Unlike a notice, it is not part of the stage's result: a run that finds the stage cached does not have it.
        """
        self._tell(LogLine(self.stage_id, _checked("log(...)", text, str), shown))


def _checked(call: str, value: _T, *types: type) -> _T:
    """Return what a stage reports. Raises TypeError here, in the stage: of another type it would break reporters."""
    if isinstance(value, types):
        return value
    words = " or ".join(f"{type_.__name__}(...)" for type_ in types)
    raise TypeError(f"ctx.{call} got a value of type {type(value).__name__}; say {words}")


def _fact(call: str, value: Any) -> float | str:
    if not isinstance(value, str | int | float) and hasattr(type(value), "__float__"):
        return float(value)  # NumPy's and torch's numbers become Python's
    fact: float | str = _checked(call, value, float, int, str)
    return fact


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)  # NumPy's integers become Python's
    except TypeError:
        return _checked(f"progress({name}=...)", value, int)
