"""A stage is a function; its signature is its contract."""

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
    """A named, typed input or output of a kind."""

    name: str
    type: type[Artifact]
    optional: bool = False
    """Bound only where the manifest names it."""
    several: bool = False
    """Takes a list of references."""


@dataclass(frozen=True)
class Stage(Generic[P, R]):
    """A kind: what `@stage` makes of a function. Still callable, so a unit test calls it like one."""

    kind: str
    function: Callable[P, R]
    config_type: type[StageConfig]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    version: int = 1
    per_machine: bool = False
    """The result holds for this machine only (a latency): its fingerprint enters the key."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions enter the key."""
    fingerprint: Callable[[Any], JSON] | None = None
    """`fingerprint(config)`: digests of the files outside the store that the stage reads. Fast, without torch."""
    preflight: Callable[[Any], Iterable[str]] | None = None
    """`preflight(config)`: what this machine lacks, a line each, before the first stage works. May import torch,
    may download what `fingerprint` looks at; runs only where the stage isn't cached."""
    workers: Callable[[Any], int] | None = None
    """`workers(config)`: how many processes do the stage together (1 where absent)."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself: a unit test's way in."""
        return self.function(*args, **kwargs)

    @property
    def help(self) -> str:
        """The docstring."""
        return inspect.cleandoc(self.function.__doc__ or "")

    @property
    def is_gate(self) -> bool:
        """Whether the stage may refuse."""
        return any(issubclass(port.type, Verdict) for port in self.outputs)

    def named(self, returned: object) -> dict[str, Artifact]:
        """What the function returned, by output name. A wrong type is the plugin's mistake: TypeError."""
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
) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """Make a stage kind of a function `(config, ctx, *inputs) -> output`.

    The first two parameters are `config: <StageConfig subclass>` and `ctx: Context`. Each further one is an input
    port: `x: X`, `x: X | None = None` (optional) or `x: Sequence[X]` (several), X an Artifact. The return annotation
    is an Artifact or a NamedTuple of them. Raise `version` when the meaning of the result changes and the source
    alone would not show it. A signature that breaks these rules raises TypeError at import.
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
