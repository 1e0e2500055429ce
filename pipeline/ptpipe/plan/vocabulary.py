"""Plugin loading: the vocabulary of stage kinds, and hook calls that isolate a failing plugin."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

from ptpipe import hookspecs
from ptpipe.errors import MAX_PROBLEMS, ExitCode, Location, Problem, Terminated, nearest
from ptpipe.manifest.manifest import is_file_name
from ptpipe.plan.frames import describe_error, package_folder
from ptpipe.plan.module_files import ImportLog, no_bytecode
from ptpipe.stages import Stage

if TYPE_CHECKING:
    from ptpipe.config import StageConfig

BUILT_IN = (
    "ptpipe_torch",
    "ptpipe_data",
    "ptpipe_zoo",
    "ptpipe_train",
    "ptpipe_quant",
    "ptpipe_onnx",
    "ptpipe_executorch",
    "ptpipe_prune",
    "ptpipe_eval",
    "ptpipe_report",
    "ptpipe_elastic",
)
ENTRY_POINT_GROUP = "ptpipe"
FILE_PREFIX = "ptpipe_file_"


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin: its name for display, its module, where it came from."""

    name: str
    module: ModuleType
    source: str
    """`built in`, `entry point` or `manifest`."""

    @property
    def is_built_in(self) -> bool:
        return self.source == "built in"


@dataclass(frozen=True)
class Vocabulary:
    """Everything that the loaded plugins offer."""

    manager: pluggy.PluginManager
    plugins: tuple[Plugin, ...]
    stages: Mapping[str, Stage[..., object]]
    owners: Mapping[str, Plugin]
    """Kind to the plugin that offers it."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Built-in and installed plugins that failed to load, and why; fatal only to a manifest that needs them."""
    problems: tuple[Problem, ...] = ()
    """Plugins named in the manifest that failed to load, and duplicate kinds."""
    imports: ImportLog = field(default_factory=ImportLog)
    """What was imported since loading began."""
    without_named: bool = False
    """Whether the manifest names plugins that were not loaded."""

    @property
    def broken_lines(self) -> list[str]:
        """A line for each broken plugin."""
        return [f"plugin {name} failed to load: {reason}" for name, reason in self.broken.items()]

    @property
    def built_in_folders(self) -> tuple[str, ...]:
        """The folders of the packages of built-in plugins, with a slash at the end."""
        folders = (package_folder(plugin.module) for plugin in self.plugins if plugin.is_built_in)
        return tuple(f"{folder}/" for folder in folders if folder)

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """Let plugins of one file import the files beside them inside the `with`."""
        before = list(sys.path)
        for plugin in self.plugins:
            if plugin.module.__name__.startswith(FILE_PREFIX):
                _add_to_path(Path(plugin.module.__file__ or "").parent)
        try:
            yield
        finally:
            sys.path[:] = before


class HookResult(NamedTuple):
    """One plugin's result of a hook."""

    plugin: str
    items: list[Any]
    error: str = ""
    """Why it has none; empty where the hook succeeded."""


def load_vocabulary(
    named: Sequence[str] = (), folder: Path | None = None, places: Sequence[Location | None] = ()
) -> Vocabulary:
    """Load the built-in plugins, the installed ones, and those a manifest names.

    `named`: these, modules or files relative to `folder`. `places`: where the manifest names them. Loading runs the
    plugins' module code and nothing else. Files are loaded afresh at each call. After 100 problems the remaining
    plugins are not loaded.
    """
    with gc_paused():
        return _Loader().load(named, folder or Path(), places)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the garbage collector inside the `with`.

    Importing creates hundreds of thousands of objects that stay: traversing them over and over takes a seventh of the
    time that `import torch` takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Loader:
    """Loads all plugins once."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager("ptpipe")
        self.manager.add_hookspecs(hookspecs)
        self.plugins: list[Plugin] = []
        self.stages: dict[str, Stage[..., object]] = {}
        self.owners: dict[str, Plugin] = {}
        self.broken: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.files: dict[str, Path] = {}
        self.imports = ImportLog()
        self.place: Location | None = None
        """Where the manifest names the plugin that is being loaded."""

    def load(self, named: Sequence[str], folder: Path, places: Sequence[Location | None]) -> Vocabulary:
        for name in BUILT_IN:
            self._add_optional(name, name, "built in")
        for entry_point in _entry_points():
            self._add_optional(entry_point.name, entry_point.value.partition(":")[0], "entry point")
        for name, self.place in zip_longest(named, places):
            if len(self.problems) >= MAX_PROBLEMS:
                self.problems.append(Problem("no further plugin was loaded", self.place))
                break
            reason = self._attempt(lambda: self._add_named(name, folder))  # noqa: B023  # called at once
            if reason:
                message = f"plugin {name} failed to load: {reason}"
                self.problems.append(Problem(message, self.place, _similar_file(name, folder), ExitCode.PLUGIN))
        self.imports.update()
        plugins, problems = tuple(self.plugins), tuple(self.problems)
        return Vocabulary(self.manager, plugins, self.stages, self.owners, self.broken, problems, self.imports)

    def _add_optional(self, name: str, module: str, source: str) -> None:
        reason = self._attempt(lambda: self._add(Plugin(name, importlib.import_module(module), source)))
        if reason:
            self.broken[name] = reason

    def _add_named(self, name: str, folder: Path) -> None:
        with no_bytecode():
            module = self._import_file(folder / name) if is_file_name(name) else importlib.import_module(name)
            self._add(Plugin(name, module, "manifest"))
        if not self.manager.get_hookcallers(module) and not _stages_in(module):
            raise TypeError("it has no stage and no hook; is `@stage` or `@hookimpl` missing above a function?")

    def _attempt(self, add: Callable[[], None]) -> str | None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for results: a banner would spoil --json
                add()
        except (KeyboardInterrupt, Terminated, MemoryError):
            raise
        except BaseException as error:  # noqa: BLE001  # a plugin's module may raise anything, SystemExit too
            return describe_error(error)
        return None

    def _import_file(self, path: Path) -> ModuleType:
        path = path.resolve()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        name = FILE_PREFIX + re.sub(r"\W", "_", path.stem)
        known = self.files.setdefault(name, path)
        if known != path:  # keys and recipes name a plugin's code by its module
            raise ImportError(f"{known} has the same module name; rename one of them")
        if name in sys.modules and any(plugin.module is sys.modules[name] for plugin in self.plugins):
            raise ImportError("it is named twice")
        _add_to_path(path.parent)  # so that it can import the files beside it, now and inside its stages
        _refuse_modules_of_others(path)
        return _executed(name, path)

    def _add(self, plugin: Plugin) -> None:
        if any(known.module is plugin.module for known in self.plugins):
            return  # installed, and named in the manifest too
        self.manager.register(plugin.module, plugin.name)
        try:
            self.manager.check_pending()
            stages = list(self._stages_of(plugin))
            if not plugin.is_built_in:  # of these, tests check all
                for stage in stages:
                    check_options(stage.config_type)
        except BaseException:
            self.manager.unregister(plugin.module)
            raise
        self.plugins.append(plugin)
        for stage in stages:
            self._claim(stage, plugin)

    def _stages_of(self, plugin: Plugin) -> Iterator[Stage[..., object]]:
        hooks = [hook for hook in self.manager.hook.ptpipe_stages.get_hookimpls() if hook.plugin is plugin.module]
        if not hooks:
            yield from _stages_in(plugin.module)
        for hook in hooks:
            offered: Iterable[object] = hook.function()  # type: ignore[assignment]  # pluggy: object
            for stage in offered:
                if not isinstance(stage, Stage):
                    raise TypeError(f"ptpipe_stages() offered {stage!r}, which is not made by @stage")
                yield stage

    def _claim(self, stage: Stage[..., object], plugin: Plugin) -> None:
        if self.stages.setdefault(stage.kind, stage) is stage:
            self.owners[stage.kind] = plugin
            return
        owner = self.owners[stage.kind]
        offers = "offers it twice" if owner is plugin else f"and plugin {owner.name} both offer it"
        message = f"plugin {plugin.name} {offers}: stage kind {stage.kind}"
        self.problems.append(Problem(message, self.place, code=ExitCode.PLUGIN))


def check_options(config_type: type[StageConfig]) -> None:
    """Build what pydantic defers to the first use. Raises TypeError for options that no manifest can be checked by."""
    name = config_type.__name__
    try:
        config_type.model_rebuild()
        schema = config_type.model_json_schema()
    except Exception as error:
        raise TypeError(f"options {name}: {error}") from error
    for group, options in {name: schema, **schema.get("$defs", {})}.items():
        if "properties" in options and "additionalProperties" not in options:
            raise TypeError(f"options {name}: the group {group} ignores unknown options; make it a StageConfig")


def _stages_in(module: ModuleType) -> list[Stage[..., object]]:
    """The `@stage` functions that a module or its submodules define, in order; others that it imports are excluded."""
    found = dict.fromkeys(value for value in vars(module).values() if isinstance(value, Stage))
    return [stage for stage in found if f"{stage.function.__module__}.".startswith(f"{module.__name__}.")]


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    from importlib.metadata import entry_points

    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry_point: entry_point.name)


def _executed(name: str, path: Path) -> ModuleType:
    """Execute a file as a new module."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file: a plugin's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    _plugin_folders.add(folder)


_plugin_folders: set[Path] = set()
"""Those that this process has had on its path."""


def _refuse_modules_of_others(path: Path) -> None:
    """Raise ImportError where a plugin would import a file beside another plugin in place of the one beside itself."""
    from ptpipe.plan.source_digest import SourceDigests

    for name, (file, _) in SourceDigests(None, {}).source_file(path).items():
        spec = importlib.util.find_spec(name) if name and "." not in name else None
        found = Path(spec.origin) if spec and spec.origin else file
        folder = found.parent.parent if found.name == "__init__.py" else found.parent
        if found != file and folder in _plugin_folders - {path.parent}:
            raise ImportError(f"it imports {name}, which is {found} in this process, not {file}; rename one of them")


def _similar_file(name: str, folder: Path) -> str | None:
    """Return the file that a plugin name without a file may have meant."""
    parent = (folder / name).parent
    try:
        if (folder / name).is_file():
            return None
        names = [file.name for file in islice(parent.glob("*.py"), 500)] if parent.is_dir() else []
    except OSError:  # a name that is too long for the file system
        return None
    if not is_file_name(name):
        return f"./{name}.py" if f"{name}.py" in names else None
    found = nearest(Path(name).name, names)
    return f"./{Path(name).with_name(found)}" if found else None


def call_each(manager: pluggy.PluginManager, hook: str, **arguments: object) -> Iterator[HookResult]:
    """Call a hook plugin by plugin: one that fails does not affect the results of the others."""
    for name, plugin in manager.list_name_plugin():
        others = [other for other in manager.get_plugins() if other is not plugin]
        if hook not in (caller.name for caller in manager.get_hookcallers(plugin) or []):
            continue
        try:
            results = manager.subset_hook_caller(hook, others)(**arguments)
            yield HookResult(name, [item for result in results for item in result])
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a plugin may raise anything
            yield HookResult(name, [], describe_error(error))
