"""Finding plugins and collecting what they offer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pluggy

from ptpipe import hookspecs
from ptpipe.errors import ExitCode, Problem
from ptpipe.stage import Stage

BUILT_IN = (
    "ptpipe_torch",
    "ptpipe_data",
    "ptpipe_zoo",
    "ptpipe_train",
    "ptpipe_quant",
    "ptpipe_onnx",
    "ptpipe_eval",
    "ptpipe_report",
)
ENTRY_POINT_GROUP = "ptpipe"
FILE_PREFIX = "ptpipe_file_"


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin: its name for people, its module, where it was named."""

    name: str
    module: ModuleType
    source: str
    """`built in`, `entry point` or `manifest`."""


@dataclass(frozen=True)
class Vocabulary:
    """All that the loaded plugins offer."""

    manager: pluggy.PluginManager
    plugins: tuple[Plugin, ...]
    stages: Mapping[str, Stage[..., object]]
    owners: Mapping[str, Plugin]
    """Kind to the plugin that offers it."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Plugins nobody asked for by name that failed to load, and why; fatal only to a manifest that needs them."""
    problems: tuple[Problem, ...] = ()
    """Plugins asked for by name that failed, and duplicate kinds."""


def load_vocabulary(named: Sequence[str] = (), folder: Path | None = None) -> Vocabulary:
    """Load the built-in plugins, the installed ones, and those a manifest names (files relative to `folder`).

    Loading runs the plugins' module code and nothing else. Files are loaded anew at each call.
    """
    return _Loader().load(named, folder or Path())


class _Loader:
    """One walk over all plugins."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager("ptpipe")
        self.manager.add_hookspecs(hookspecs)
        self.plugins: list[Plugin] = []
        self.stages: dict[str, Stage[..., object]] = {}
        self.owners: dict[str, Plugin] = {}
        self.broken: dict[str, str] = {}
        self.problems: list[Problem] = []

    def load(self, named: Sequence[str], folder: Path) -> Vocabulary:
        for name in BUILT_IN:
            self._add_unasked(name, name, "built in")
        for entry_point in _entry_points():
            self._add_unasked(entry_point.name, entry_point.value.partition(":")[0], "entry point")
        for name in named:
            reason = self._attempt(lambda: self._add(Plugin(name, _import_named(name, folder), "manifest")))  # noqa: B023  # called at once
            if reason:
                self.problems.append(Problem(f"plugin {name} failed to load: {reason}", code=ExitCode.PLUGIN))
        return Vocabulary(
            self.manager, tuple(self.plugins), self.stages, self.owners, self.broken, tuple(self.problems)
        )

    def _add_unasked(self, name: str, module: str, source: str) -> None:
        reason = self._attempt(lambda: self._add(Plugin(name, importlib.import_module(module), source)))
        if reason:
            self.broken[name] = reason

    def _attempt(self, add: Callable[[], None]) -> str | None:
        try:
            add()
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # noqa: BLE001  # a stranger's module may raise anything, SystemExit too
            return _reason(error)
        return None

    def _add(self, plugin: Plugin) -> None:
        if any(known.module is plugin.module for known in self.plugins):
            return  # installed and named as well
        self.manager.register(plugin.module, plugin.name)
        try:
            self.manager.check_pending()
            stages = list(self._stages_of(plugin))
        except BaseException:
            self.manager.unregister(plugin.module)
            raise
        self.plugins.append(plugin)
        for stage in stages:
            self._claim(stage, plugin)

    def _stages_of(self, plugin: Plugin) -> Iterator[Stage[..., object]]:
        for implementation in self.manager.hook.ptpipe_stages.get_hookimpls():
            if implementation.plugin is plugin.module:
                offered: Iterable[object] = implementation.function()  # type: ignore[assignment]  # pluggy: object
                for stage in offered:
                    if not isinstance(stage, Stage):
                        raise TypeError(f"ptpipe_stages() offered {stage!r}, which is not made by @stage")
                    yield stage

    def _claim(self, stage: Stage[..., object], plugin: Plugin) -> None:
        owner = self.owners.setdefault(stage.kind, plugin)
        if owner is not plugin:
            message = f"stage kind {stage.kind} is offered twice: by {owner.name} and by {plugin.name}"
            self.problems.append(Problem(message, code=ExitCode.PLUGIN))
        self.stages.setdefault(stage.kind, stage)


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    from importlib.metadata import entry_points

    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry_point: entry_point.name)


def _import_named(name: str, folder: Path) -> ModuleType:
    if not name.endswith(".py") and "/" not in name:
        return importlib.import_module(name)
    path = (folder / name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module_name = FILE_PREFIX + path.stem.replace("-", "_")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import the files beside it, now and inside its stages
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _reason(error: BaseException) -> str:
    """The error in one line, with the line of the plugin that raised it."""
    frame = error.__traceback__
    place = ""
    while frame is not None:
        filename = frame.tb_frame.f_code.co_filename
        if "importlib" not in filename and Path(filename).name != Path(__file__).name:
            place = f" ({Path(filename).name}:{frame.tb_lineno})"
        frame = frame.tb_next
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({Path(error.filename).name}:{error.lineno})"
        text = error.msg or text
    return f"{type(error).__name__}: {text}{place}"
