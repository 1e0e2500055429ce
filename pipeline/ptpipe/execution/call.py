"""A call: one stage of a run, serialized so that any process can execute it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ptpipe.artifact import JSON, Artifact
from ptpipe.config import read_options
from ptpipe.context import Context, NamedCode
from ptpipe.errors import StageError
from ptpipe.events import Event, ModulesImported
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.vocabulary import Vocabulary
from ptpipe.stages import Stage
from ptpipe.store.store import Store


@dataclass(frozen=True)
class StoredInput:
    """An object in the store, and the stage output that it is: the output's type loads it."""

    kind: str
    output: str
    digest: str
    reference: str
    """Its name in the manifest."""
    options: Mapping[str, JSON] = field(default_factory=dict)
    """Options of the stages that it comes from that are in no key: see `Artifact.with_options`."""
    source_functions: tuple[str, ...] = ()
    """Functions that these stages' options name: see `Artifact.with_source_functions`."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StoredInput:
        """Return the input whose fields are `content`."""
        return cls(**{**content, "source_functions": tuple(content["source_functions"])})


@dataclass(frozen=True)
class Nodes:
    """The machines that execute stages together, seen from one of them."""

    num: int = 1
    rank: int = 0
    """Of this node; node 0 runs the plan, and the others take part in its calls with several workers."""
    endpoint: str = ""
    """`host:port` of node 0, for the rendezvous."""
    max_restarts: int = 0
    """How often a stage's workers may be restarted from their last checkpoint after one has failed."""
    started: bool = False
    """The workers are running already, one per node: each is a process that runs this same manifest."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options of `ptpipe run` that describe this node; none of what a cluster's launcher decides."""
        restarts = ("--max-restarts", str(self.max_restarts)) if self.max_restarts else ()
        if self.num == 1 or self.started:
            return restarts
        place = ("--nnodes", str(self.num), "--node-rank", str(self.rank), "--rdzv-endpoint", self.endpoint)
        return (*place, *restarts)


ONE_NODE = Nodes()


@dataclass(frozen=True)
class Call:
    """Everything that a process needs to execute one stage. All of it is JSON."""

    stage_id: str
    kind: str
    options: Mapping[str, JSON]
    seed: int
    key: str
    inputs: Mapping[str, tuple[StoredInput, ...]]
    artifacts: str
    """The store's root folder."""
    plugins: tuple[str, ...]
    """The manifest's `plugins:`."""
    folder: str
    """The manifest's folder, which plugins' file names are relative to."""
    workers: int = 1
    """How many processes execute it together, on all nodes."""
    nodes: Nodes = ONE_NODE

    @property
    def source_folders(self) -> frozenset[Path]:
        """The folders of the files of the user's functions that its inputs come from."""
        functions = (name for items in self.inputs.values() for stored in items for name in stored.source_functions)
        return frozenset(Path(name.rpartition(":")[0]).parent for name in functions)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Call:
        """Return the call whose `to_json` is `text`."""
        content: dict[str, Any] = json.loads(text)
        inputs = {port: tuple(map(StoredInput.from_json, items)) for port, items in content["inputs"].items()}
        nodes = Nodes(**content["nodes"])
        return cls(**{**content, "inputs": inputs, "plugins": tuple(content["plugins"]), "nodes": nodes})


def make_call(
    plan: Plan, stage: PlannedStage, key: str, digests: Mapping[str, Sequence[str]], store: Store, nodes: Nodes
) -> Call:
    """Return the call of a plan's stage.

    `key`: the stage's. `digests`: of the objects that it reads, by input port, as many as are connected. `store`: holds
    them. `nodes`: the machines that execute it together.
    """
    inputs = {
        port: tuple(
            StoredInput(
                plan[reference.stage].kind,
                reference.output,
                digest,
                str(reference),
                plan.unkeyed_values[reference.stage],
                plan.source_functions[reference.stage],
            )
            for reference, digest in zip(references, digests[port], strict=True)
        )
        for port, references in stage.wiring.items()
    }
    manifest = plan.manifest
    return Call(
        stage_id=stage.id,
        kind=stage.kind,
        options=stage.options,
        seed=manifest.seed,
        key=key,
        inputs=inputs,
        artifacts=str(store.root),
        plugins=manifest.plugins,
        folder=str(manifest.path.parent.absolute()),
        workers=_num_workers(stage),
        nodes=nodes,
    )


def _num_workers(stage: PlannedStage) -> int:
    number: object = stage.stage.workers(stage.config) if stage.stage.workers else 1
    if type(number) is not int or number < 1:
        raise StageError(f"workers() of {stage.kind} returned {number!r}, not a number of processes: 1 or more")
    return number


def execute(
    call: Call, vocabulary: Vocabulary, store: Store, tell: Callable[[Event], None], rank: int = 0
) -> dict[str, Artifact]:
    """Load the inputs, call the stage's function and return its outputs by name.

    `vocabulary`: has the plugin of `call.kind`. `store`: holds the inputs. `tell`: receives the stage's events.
    `rank`: of this process among `call.workers`.
    Raises TypeError if the function returns something other than its signature promises.
    """
    stage = vocabulary.stages[call.kind]
    config = read_options(stage.config_type, call.options)
    input_names = {port: tuple(stored.reference for stored in items) for port, items in call.inputs.items()}
    digests = {port: tuple(stored.digest for stored in items) for port, items in call.inputs.items()}
    scratch = store.scratch(call.key)
    functions = {name: None for items in call.inputs.values() for stored in items for name in stored.source_functions}
    code = NamedCode(call.plugins, call.folder, tuple(functions))
    ctx = Context(call.stage_id, call.kind, call.seed, scratch, input_names, tell, rank, call.workers, digests, code)
    vocabulary.imports.update()
    outputs = stage.named(stage.function(config, ctx, **_read_inputs(call, stage, vocabulary, store)))
    tell(ModulesImported(call.stage_id, vocabulary.imports.update()))
    return outputs


def _read_inputs(
    call: Call, stage: Stage[..., object], vocabulary: Vocabulary, store: Store
) -> dict[str, Artifact | list[Artifact]]:
    values: dict[str, Artifact | list[Artifact]] = {}
    for port in stage.inputs:
        items = [
            store.get(stored.digest, _type_of(stored, vocabulary))
            .with_options(stored.options)
            .with_source_functions(stored.source_functions)
            for stored in call.inputs.get(port.name, ())
        ]
        if port.several:
            values[port.name] = items
        elif items:
            values[port.name] = items[0]
    return values


def _type_of(stored: StoredInput, vocabulary: Vocabulary) -> type[Artifact]:
    outputs = vocabulary.stages[stored.kind].outputs
    return next(port.type for port in outputs if port.name == stored.output)
