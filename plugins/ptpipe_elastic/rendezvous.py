"""How the agents of a stage's nodes agree on each start of its workers: a rendezvous for torch elastic without pickles.

torch's own unpickles what it finds in its store, so that anyone who reaches the store's port runs code. Here each node
writes an arrival, a random word, whenever it is about to start its workers. When all nodes have arrived again, node 0
writes the round: the list of their words. A node's word that is not in the round tells the others to restart.
"""

from __future__ import annotations

import gc
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # public
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ptpipe import StageError
from ptpipe.launching import Nodes
from ptpipe_torch.distributed.stores import describe, listening_store

BACKEND = "ptpipe"
_TIMEOUT_S = 600
_POLL_S = 0.05
_ANSWER_S = 20.0
"""How long a node waits for the answer of a store that it has reached."""
_CLOSED = "closed"
_ROUND = "round"


@dataclass
class Rendezvous:
    """The nodes of a stage, seen from one of them, and the key-value store in which they meet."""

    nodes: Nodes = field(default_factory=Nodes)
    store: Store = field(default_factory=HashStore)

    @classmethod
    def of(cls, nodes: Nodes) -> Rendezvous:
        """Open the store: in this process for a single node, else at node 0's endpoint, which listens nowhere else.

        Raises StageError where node 0 can't listen there, or another node can't reach it within 10 minutes.
        """
        if nodes.num == 1:
            return cls(nodes)
        host, port = _host_and_port(nodes.endpoint)
        timeout, option = timedelta(seconds=_TIMEOUT_S), f"--rdzv-endpoint {nodes.endpoint}"
        if nodes.rank == 0:
            return cls(nodes, listening_store(host, port, timeout, option))
        _wait_for_server(host, port, option)
        return cls(nodes, _connected_store(host, port, timeout, option))

    def close(self) -> None:
        """End the store, so that node 0 can listen for the next stage: torch does so once nothing refers to it."""
        self.store = HashStore()
        if self.nodes.num > 1:
            gc.collect()  # torch elastic's agent refers to itself

    def worker_url(self, folder: Path) -> str:
        """Return the URL of the workers' store, without its last part. `folder`: for the file of a single node."""
        if self.nodes.num == 1:
            return folder.absolute().as_uri()
        host, port = _host_and_port(self.nodes.endpoint)
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def agree(self, key: str, value: str) -> str:
        """Return node 0's value on all nodes, as text that any host that reaches the store may have written."""
        if self.nodes.rank == 0:
            self.store.set(key, value)
            return value
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            while not self.store.check([key]):
                _sleep_until(deadline, "node 0 did not start the stage")
            return self.store.get(key).decode(errors="replace")
        except (DistError, RendezvousTimeoutError) as error:
            raise StageError(f"the rendezvous at {self.nodes.endpoint} failed: {error}") from error


class WorkerRendezvous(RendezvousHandler):
    """torch elastic's view of a rendezvous. A node's rank is its own: worker 0 is on node 0."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._nodes, self._rendezvous = rendezvous.nodes, rendezvous
        self._keys = [f"arrival/{node}" for node in range(self._nodes.num)]
        self._round: list[str] = []
        """The arrivals of the nodes whose workers run together now."""

    def get_backend(self) -> str:
        """Return the name by which torch elastic finds this handler."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have arrived. Raises RendezvousError where one gives up or does not come."""
        arrival = secrets.token_hex(8)
        self._rendezvous.store.set(self._keys[self._nodes.rank], arrival)
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            if self._nodes.rank == 0:
                self._begin_round()
            found = self._read_round()
            if found and found[self._nodes.rank] == arrival:
                break
            if self.is_closed():
                raise RendezvousClosedError("another node has given up")
            _sleep_until(deadline, "not all nodes came")
        self._round = found
        # The address is never used: workers find their store by its URL.
        info = RendezvousStoreInfo("localhost", 0)
        return RendezvousInfo(PrefixStore(found[0], self._rendezvous.store), self._nodes.rank, self._nodes.num, info)

    def _begin_round(self) -> None:
        arrivals = self._arrivals()
        if arrivals and not set(arrivals) & set(self._round):
            self._rendezvous.store.set(_ROUND, ",".join(arrivals))

    def _read_round(self) -> list[str]:
        """The arrivals of the latest round; nothing where there is none, or another program wrote something else."""
        if not self._rendezvous.store.check([_ROUND]):
            return []
        found = self._rendezvous.store.get(_ROUND).decode(errors="replace").split(",")
        is_ours = len(found) == self._nodes.num and all(re.fullmatch("[0-9a-f]{16}", arrival) for arrival in found)
        return found if is_ours else []

    def _arrivals(self) -> list[str]:
        """The last arrival of each node; nothing before all have come for the first time."""
        if not self._rendezvous.store.check(self._keys):
            return []
        return [arrival.decode(errors="replace") for arrival in self._rendezvous.store.multi_get(self._keys)]

    def num_nodes_waiting(self) -> int:
        """Return how many nodes have arrived since this round began."""
        if self._nodes.num == 1:
            return 0
        return sum(found != expected for found, expected in zip(self._arrivals(), self._round, strict=True))

    def get_run_id(self) -> str:
        """Return the name of this round, by which its workers find each other in their store."""
        return self._round[0] if self._round else ""

    def is_closed(self) -> bool:
        """Return whether a node has ended its part."""
        return bool(self._rendezvous.store.check([_CLOSED]))

    def set_closed(self) -> None:
        """Let nodes that wait for another round end."""
        with suppress(DistError):  # node 0 has left
            self._rendezvous.store.set(_CLOSED, "")

    def shutdown(self) -> bool:
        """End this node's part."""
        self.set_closed()
        return True


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler that the launcher was given, as torch elastic's registry expects."""
    handler: RendezvousHandler = parameters.config["handler"]
    return handler


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _wait_for_server(host: str, port: int, option: str) -> None:
    """Wait for node 0 to listen. Unlike torch's own waiting, signals end it, and nothing is printed."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except (socket.gaierror, UnicodeError) as error:
            raise StageError(f"{option}: {describe(error)}") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise StageError(f"{option}: node 0 can't be reached: {error.strerror or error}") from error
            time.sleep(_POLL_S)


def _connected_store(host: str, port: int, timeout: timedelta, option: str) -> Store:
    """Return the store that listens there. Raises StageError for a program that accepts connections and is none.

    In a thread: torch waits for the first answer however long it takes, and hears no signal.
    """
    found: list[Store | DistError] = []

    def connect() -> None:
        try:
            found.append(TCPStore(host, port, timeout=timeout, wait_for_workers=False))
        except DistError as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if not found:
        raise StageError(f"{option}: what listens there does not answer within {_ANSWER_S:g} s; is it node 0?")
    if isinstance(found[0], DistError):
        raise StageError(f"{option}: {str(found[0]).partition(chr(10))[0]}") from found[0]
    return found[0]


def _sleep_until(deadline: float, reason: str) -> None:
    if time.monotonic() > deadline:
        raise RendezvousTimeoutError(f"{reason} within {_TIMEOUT_S} s")
    time.sleep(_POLL_S)
