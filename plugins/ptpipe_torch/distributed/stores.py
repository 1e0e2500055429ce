"""The key-value stores in which worker processes find each other, and the network interfaces on which they listen.

On one machine the store is a file, and connections stay on the loopback interface: no other machine reaches anything.
On several machines the store listens on one address alone. No store holds pickles.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ptpipe import StageError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public

STORE = "PTPIPE_STORE"
"""Variable with the URL of a worker's store: `file:///path` or `tcp://host:port/prefix`."""
_TIMEOUT = timedelta(minutes=30)
"""Workers may be started long after each other, where a cluster does it."""
_LOOPBACK = ("lo", "lo0")
_SIOCGIFADDR = 0x8915  # linux/sockios.h: IPv4 address of an interface
_IFREQ = "16s H 2x 4s 232x"  # netdevice(7): name, family, port, address


@cache
def worker_store(rank: int, world_size: int) -> Store:
    """Return the store of this process's worker group; it lives as long as the process.

    It is the one of the launcher's URL, else that of MASTER_ADDR and MASTER_PORT (set by torchrun and for SLURM), where
    rank 0 listens unless torchrun does. Raises StageError where the variables are missing or malformed.
    """
    from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # public

    if url := os.environ.get(STORE):
        parts = urlsplit(url)
        if parts.scheme == "file":
            file = FileStore(unquote(parts.path), world_size)
            file.set_timeout(_TIMEOUT)
            return file
        assert parts.hostname and parts.port, url
        store = TCPStore(parts.hostname, parts.port, timeout=_TIMEOUT, wait_for_workers=False)
        return PrefixStore(parts.path, store)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise StageError(f"MASTER_ADDR and MASTER_PORT must be a host and its port, not {host!r} and {port!r}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun listens
        return TCPStore(host, int(port), world_size, timeout=_TIMEOUT)
    host = "localhost" if is_one_machine(os.environ) else host
    if rank == 0:
        return listening_store(host, int(port), _TIMEOUT, "MASTER_ADDR")
    return TCPStore(host, int(port), timeout=_TIMEOUT, wait_for_workers=False)


def listening_store(host: str, port: int, timeout: timedelta, option: str) -> Store:
    """Return a store that listens on the address of `host` alone, which must be one of this machine's.

    `option`: what `host` was given by, for messages. Raises StageError where it can't listen there, or where the name
    is the loopback address here, although other machines are to use it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public

    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        assert isinstance(address, str)
        if ipaddress.ip_address(address).is_loopback and not _means_loopback(host):
            raise StageError(
                f"{option}: {host} is {address} on this machine itself (see /etc/hosts), where no other machine can "
                "reach it; give the address by which the others do"
            )
        # torch would listen on all addresses of the machine.
        listening = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except (OSError, UnicodeError) as error:
        raise StageError(f"{option}: this machine can't listen on {host}:{port}: {describe(error)}") from error
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def describe(error: OSError | UnicodeError) -> str:
    """Return what is wrong with an address; a name that is no host name at all is a UnicodeError."""
    return str(getattr(error, "strerror", None) or error)


def is_one_machine(variables: Mapping[str, str]) -> bool:
    """Return whether all workers are on this machine."""
    return variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE")


def interfaces_to_use(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which gloo and nccl listen on one interface alone.

    It is the loopback interface where all workers are on this machine, else the one that leads to their store, unless
    the user chose another.
    """
    if is_one_machine(variables):
        name = loopback_interface()
    else:
        host = urlsplit(variables.get(STORE, "")).hostname or variables.get("MASTER_ADDR", "localhost")
        name = interface_towards(host)
    found = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    return {key: name for key, name in found.items() if is_one_machine(variables) or key not in variables}


def loopback_interface() -> str:
    """Return the name of the loopback interface; empty if there is none."""
    return next((name for _, name in socket.if_nameindex() if name in _LOOPBACK), "")


def interface_towards(host: str) -> str:
    """Return the name of the interface from which this machine reaches a host; empty where that is unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
            probe.connect(address)
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except (OSError, UnicodeError) as error:
        raise StageError(f"{host} can't be reached: {describe(error)}") from error
    if own.is_loopback:
        return loopback_interface()
    return _interfaces_v4().get(own.packed, "") if own.version == 4 else _interfaces_v6().get(own.packed, "")


def _interfaces_v4() -> dict[bytes, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                request = struct.pack(_IFREQ, name.encode(), socket.AF_INET, bytes(4))
                found[struct.unpack(_IFREQ, fcntl.ioctl(probe, _SIOCGIFADDR, request))[2]] = name
    return found


def _interfaces_v6() -> dict[bytes, str]:
    with suppress(OSError):  # no Linux, or no IPv6
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        return {bytes.fromhex(line.split()[0]): line.split()[-1] for line in lines}
    return {}


def _means_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
