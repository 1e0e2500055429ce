"""What others can do who reach a run's ports: they find none on one machine, and can run no code on several."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import pickle
import re
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from ptpipe import StageError
from ptpipe.launching import Nodes
from ptpipe_elastic.rendezvous import Rendezvous
from ptpipe_torch.distributed.stores import interface_towards, interfaces_to_use, listening_store

PLUGIN = '''
"""Workers that connect with each other, and wait for the test to look at them."""
import time
from pathlib import Path

from ptpipe import Context, StageConfig, hookimpl, stage
from ptpipe_torch import Ranges, init_worker_group

HERE = Path(__file__).parent


@stage("workers.meet", workers=lambda config: 2)
def meet(config: StageConfig, ctx: Context) -> Ranges:
    """Meet."""
    with init_worker_group(ctx, on_cuda=False) as workers:
        assert workers.all_reduce([1.0]) == [2.0]
        (HERE / f"ready-{ctx.rank}").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
        assert workers.all_reduce([2.0]) == [4.0]
    return Ranges({}, 0)


@hookimpl
def ptpipe_stages():
    return [meet]
'''
MANIFEST = """
version: 1
name: meeting
plugins: [./meet.py]
stages:
  meet: {uses: workers.meet}
"""
LISTENS = "0A"  # of /proc/net/tcp


class Bomb:
    """Runs a command wherever it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """The addresses on which a process and its descendants listen."""
    sockets = {}
    for file in ("tcp", "tcp6"):
        for line in Path("/proc/net", file).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                sockets[f"socket:[{fields[9]}]"] = address(fields[1])
    links = []
    for each in (process, *process.children(recursive=True)):
        for descriptor in Path(f"/proc/{each.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                links.append(str(descriptor.readlink()))
    return {sockets[link] for link in links if link in sockets}


def address(text: str) -> tuple[str, int]:
    """An address of /proc/net/tcp: words of 32 bits in the machine's own order, in hexadecimal."""
    host, _, port = text.partition(":")
    words = [struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), int(port, 16)


def test_the_test_sees_what_listens() -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert ("0.0.0.0", everywhere.getsockname()[1]) in listening(psutil.Process())


def attack(host: str, port: int, keys: list[str], marker: Path) -> None:
    """Write a pickle into keys of a store that may be listening there, in the protocol of torch's TCPStore."""

    def packed(content: bytes) -> bytes:
        return struct.pack("=Q", len(content)) + content

    bomb = base64.b64encode(pickle.dumps(Bomb(marker)))
    names = [prefix + key for key in keys for prefix in ("", "/")]  # TCPStore puts a slash before each
    sets = b"".join(b"\x01" + packed(name.encode()) + packed(bomb) for name in names)
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(b"\x00" + struct.pack("=I", 0x3C85F7CE) + sets)
        time.sleep(0.1)


def test_the_attack_reaches_a_store(free_port: int, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    attack("127.0.0.1", free_port, ["one", "two"], tmp_path / "marker")
    assert [pickle.loads(base64.b64decode(store.get(key))) for key in ("one", "two")] == [0, 0]
    assert (tmp_path / "marker").exists()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are looked up in /proc")
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_nothing_listens_beyond_loopback_and_no_pickle_is_read(run_cli, free_port: int, num_nodes: int) -> None:
    folder, marker = run_cli.folder, run_cli.folder / "marker"
    (folder / "meet.py").write_text(PLUGIN, encoding="utf-8")
    (folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    outer = [name for _, name in socket.if_nameindex() if name != "lo"]  # perhaps set for a cluster
    variables = {"GLOO_SOCKET_IFNAME": outer[-1]} if outer and num_nodes == 1 else {}
    options = ["--nnodes", num_nodes, "--rdzv-endpoint", f"localhost:{free_port}"] if num_nodes > 1 else []
    runs = [
        run_cli.start("run", "m.yaml", *options, *(("--node-rank", rank) if rank else ()), **variables)
        for rank in range(num_nodes)
    ]
    try:
        while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
            assert all(run.poll() is None for run in runs), [run.communicate() for run in runs]
            time.sleep(0.05)
        found = set().union(*(listening(psutil.Process(run.pid)) for run in runs))
        assert len(found) >= 2, "gloo listens in each worker"
        assert all(ipaddress.ip_address(host).is_loopback for host, _ in found), found
        (scratch,) = folder.glob("artifacts/scratch/*")
        keys = [f"torch.rendezvous.{scratch.name[:16]}"]  # by which torch elastic's own rendezvous could be attacked
        if num_nodes > 1:
            store = TCPStore("localhost", free_port, is_master=False, wait_for_workers=False)
            keys += store.list_keys()
            assert len(keys) > 1, "several machines meet in a store that listens"
        for host, port in found:
            with contextlib.suppress(OSError):  # the attack ended the run
                attack(host, port, keys, marker)
        (folder / "go").touch()
        errors = [run.communicate(timeout=60)[1].decode() for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stderr.close()
            run.stdout.close()
    assert not marker.exists()
    if num_nodes == 1:  # of several, whoever reaches the port can end the run
        assert runs[0].returncode == 0, errors
        assert not list(folder.glob("artifacts/scratch/*")), "nothing of the attempt stays"


def test_a_store_of_several_machines_listens_on_the_address_that_was_named_alone(free_port: int) -> None:
    store = listening_store("127.0.0.1", free_port, timedelta(seconds=5), "--rdzv-endpoint x")
    assert ("127.0.0.1", free_port) in listening(psutil.Process())
    client = TCPStore("127.0.0.1", free_port, is_master=False, wait_for_workers=False)
    client.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("host", ["203.0.113.7", "nosuch.invalid", "a" * 300])
def test_an_endpoint_that_is_not_of_this_machine_is_named(host: str, free_port: int) -> None:
    with pytest.raises(StageError, match=f"--rdzv-endpoint x: this machine can't listen on {host}:{free_port}: "):
        listening_store(host, free_port, timedelta(seconds=5), "--rdzv-endpoint x")


def test_a_program_that_listens_in_the_place_of_node_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for its answer for good, and hear no signal."""
    monkeypatch.setattr("ptpipe_elastic.rendezvous._ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        endpoint = f"127.0.0.1:{stranger.getsockname()[1]}"
        words = f"--rdzv-endpoint {endpoint}: what listens there does not answer within 0.5 s; is it node 0?"
        with pytest.raises(StageError, match=re.escape(words)):
            Rendezvous.of(Nodes(2, 1, endpoint))


def test_a_machine_that_knows_its_name_as_loopback_only(free_port: int) -> None:
    """As Debian's /etc/hosts has it: other machines could not reach that address."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if ipaddress.ip_address(socket.gethostbyname(name)).is_loopback and name != "localhost":
            with pytest.raises(StageError, match=f"{name} is 127.0.* on this machine itself"):
                listening_store(name, free_port, timedelta(seconds=5), "--rdzv-endpoint x")
            return
    pytest.skip("this machine's name is not a loopback address")


def test_the_interfaces_of_one_machine_and_of_several() -> None:
    one, several = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    loopback = interface_towards("127.0.0.1")
    expected = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    assert interfaces_to_use({**one, "GLOO_SOCKET_IFNAME": "eth9"}) == expected
    assert interfaces_to_use({**several, "MASTER_ADDR": "localhost"}) == expected
    assert interfaces_to_use({**several, "PTPIPE_STORE": "tcp://[::1]:1/x", "MASTER_ADDR": "203.0.113.7"}) == expected
    chosen = {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "eth9"}
    assert interfaces_to_use({**several, "MASTER_ADDR": "localhost", **chosen}) == {}, "the user's choice"
    outer = [
        (found.address, name)
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if found.family == socket.AF_INET and not ipaddress.ip_address(found.address).is_loopback
    ]
    for own, name in outer:
        assert interface_towards(own) == name
