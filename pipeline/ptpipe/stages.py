"""The `@stage` decorator: a stage is a function, and its signature declares its options, inputs and outputs."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from ptpipe.artifact import JSON, Artifact, Verdict
from ptpipe.context import Context

if TYPE_CHECKING:
    from ptpipe.config import StageConfig

KIND_PATTERN = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
SINGLE_OUTPUT = "output"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Port:
    """A named, typed input or output of a stage kind."""

    name: str
    """The parameter's name; of an output, the field of the NamedTuple, or "output" if there is only one."""
    type: type[Artifact]
    optional: bool = False
    """An input that is bound only if the manifest names it."""
    several: bool = False
    """An input that takes a list."""


@dataclass(frozen=True)
class Stage(Generic[P, R]):
    """A stage kind: what `@stage` makes of a function. It can be called like the function, in a unit test."""

    kind: str
    function: Callable[P, R]
    config_type: type[StageConfig]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    version: int = 1
    per_machine: bool = False
    """Whether the result holds for this machine only (a latency): the machine's fingerprint enters the key."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions enter the key."""
    fingerprint: Callable[[Any], JSON] | None = None
    """`fingerprint(config)` returns digests of the files outside the store that the stage reads."""
    preflight: Callable[[Any], Iterable[str]] | None = None
    """`preflight(config)` returns what is missing on this machine, a line each."""
    workers: Callable[[Any], int] | None = None
    """`workers(config)` returns how many processes execute the stage together."""
    renamed_from: str = ""
    """The kind's former name: the error for a manifest that still uses it names the new one."""
    source_functions: Callable[[Any], Iterable[str]] | None = None
    """`source_functions(config)` returns the functions in Python files that options name: `./mine.py:make_net`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, without a store."""
        return self.function(*args, **kwargs)

    @property
    def help(self) -> str:
        """The function's docstring, as `ptpipe stages` shows it."""
        return inspect.cleandoc(self.function.__doc__ or "")

    @property
    def is_gate(self) -> bool:
        """Whether a Verdict is among the outputs."""
        return any(issubclass(port.type, Verdict) for port in self.outputs)

    def named(self, returned: object) -> dict[str, Artifact]:
        """Return the function's result by output name.

        `returned`: what the function returned. Raises TypeError if it does not match the return annotation.
        """
        values = returned if isinstance(returned, tuple) else (returned,)
        if len(values) != len(self.outputs):
            raise TypeError(f"{self.kind} promised {len(self.outputs)} outputs and returned {type(returned).__name__}")
        for port, value in zip(self.outputs, values, strict=True):
            if not isinstance(value, port.type):
                raise TypeError(
                    f"{self.kind} promised {port.name}: {port.type.__name__}, returned {type(value).__name__}"
                )
        return {port.name: value for port, value in zip(self.outputs, values, strict=True)}


def stage(  # noqa: PLR0913  # one parameter for each thing a stage may declare
    kind: str,
    *,
    version: int = 1,
    per_machine: bool = False,
    packages: Sequence[str] = (),
    fingerprint: Callable[[Any], JSON] | None = None,
    preflight: Callable[[Any], Iterable[str]] | None = None,
    workers: Callable[[Any], int] | None = None,
    renamed_from: str = "",
    source_functions: Callable[[Any], Iterable[str]] | None = None,
) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """Declare a function `(config, ctx, *inputs) -> output` as a stage kind.

    The first two parameters are `config: <StageConfig subclass>` and `ctx: Context`. Each further one is an input
    port: `x: X`, `x: X | None = None` (optional) or `x: Sequence[X]` (several), where X is an Artifact. The return
    annotation is an Artifact or a NamedTuple of Artifacts. The docstring is the help that `ptpipe stages` shows.

    `kind`: the word after `uses:` in a manifest, `family.thing` in lower case.
    `version`: increase it when the meaning of the result changes although neither source nor options do.
    `per_machine`: the result holds only for the machine that measured it, such as a latency.
    `packages`: distributions whose versions the result depends on.
    `fingerprint`: `fingerprint(config)` returns, as JSON, digests of the files outside the store that the stage reads.
    Called for every plan: must be fast and not import torch. Called again after the stage: a result is kept only if it
    returns the same, so it must not tell the time.
    `preflight`: `preflight(config)` returns what is missing on this machine, a line each. Called before the first stage
    runs, unless the stage is cached; may import torch, and may download files that `fingerprint` reads.
    `workers`: `workers(config)` returns how many processes execute the stage together; 1 without it.
    `renamed_from`: the kind's former name, which the error for a manifest that still uses it explains.
    `source_functions`: `source_functions(config)` returns the functions in Python files that options name, as
    `FILE:FUNCTION`, `./mine.py:make_net`: code that is no plugin. A stored result may call these, in this stage and in
    those below it, and nothing else: see `Artifact.with_source_functions`.

    `version`, `packages`, `fingerprint`, the source of the function's plugin, of `source_functions` and of what they
    import, and the options enter the key of the result: `StageConfig.unkeyed_options` are the exception.
    Raises TypeError, when the plugin is imported, if the signature breaks these rules.
    """
    if not KIND_PATTERN.fullmatch(kind):
        raise TypeError(f"stage kind {kind!r} is not of the form family.thing (lower case)")

    def decorate(function: Callable[P, R]) -> Stage[P, R]:
        config_type, inputs, outputs = _read_signature(kind, function)
        return Stage(
            kind,
            function,
            config_type,
            inputs,
            outputs,
            version,
            per_machine,
            tuple(packages),
            fingerprint,
            preflight,
            workers,
            renamed_from,
            source_functions,
        )

    return decorate


def _read_signature(
    kind: str, function: Callable[..., object]
) -> tuple[type[StageConfig], tuple[Port, ...], tuple[Port, ...]]:
    from ptpipe.config import StageConfig

    hints = _type_hints(kind, function)
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    if names[:2] != ["config", "ctx"] or hints.get("ctx") is not Context:
        raise TypeError(f"{kind}: the first two parameters must be config and ctx: Context, not {names[:2]}")
    config_type = hints.get("config")
    if not (isinstance(config_type, type) and issubclass(config_type, StageConfig)):
        raise TypeError(f"{kind}: config must be annotated with a StageConfig subclass, not {config_type!r}")
    inputs = tuple(_input_port(kind, parameter, hints.get(parameter.name)) for parameter in parameters[2:])
    return config_type, inputs, _output_ports(kind, hints.get("return"))


def _type_hints(kind: str, function: Callable[..., object]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError as error:
        raise TypeError(
            f"{kind}: the annotation {error.name!r} is not known when the plugin is loaded; "
            "import it at the top of the module, not under `if TYPE_CHECKING`"
        ) from error


def _input_port(kind: str, parameter: inspect.Parameter, annotation: object) -> Port:
    if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        raise TypeError(f"{kind}: {parameter} can't be an input, which is passed by its name")
    optional = parameter.default is not inspect.Parameter.empty
    if get_origin(annotation) in (Union, types.UnionType):
        choices = [choice for choice in get_args(annotation) if choice is not type(None)]
        annotation = choices[0] if len(choices) == 1 else annotation
    several = get_origin(annotation) is Sequence
    if several:
        (annotation,) = get_args(annotation)
    if not (isinstance(annotation, type) and issubclass(annotation, Artifact)):
        raise TypeError(f"{kind}: port {parameter.name} must be an Artifact, Artifact | None or Sequence[Artifact]")
    return Port(parameter.name, annotation, optional, several)


def _output_ports(kind: str, annotation: object) -> tuple[Port, ...]:
    if isinstance(annotation, type) and issubclass(annotation, Artifact):
        return (Port(SINGLE_OUTPUT, annotation),)
    fields = get_type_hints(annotation) if hasattr(annotation, "_fields") else {}
    if not fields or not all(isinstance(t, type) and issubclass(t, Artifact) for t in fields.values()):
        raise TypeError(f"{kind}: the return annotation must be an Artifact or a NamedTuple of Artifacts")
    return tuple(Port(name, type_) for name, type_ in fields.items())
