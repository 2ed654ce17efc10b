"""Which tcp sockets processes listen on, as the kernel says."""

import contextlib
import ipaddress
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

LISTEN = "0A"


class Listening(NamedTuple):
    pid: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


def family(pid: int) -> list[int]:
    """A process and all that it has started, those included that have not ended yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def listening(pids: Iterable[int]) -> list[Listening]:
    open_now = dict(_listening_inodes())
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    where = open_now.get(os.readlink(f"/proc/{pid}/fd/{name}"))
                    if where is not None:
                        found.append(Listening(pid, *where))
    return found


def _listening_inodes() -> Iterator[tuple[str, tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]]:
    """The columns of these tables: number, local address, remote address, state, ..., the tenth is the inode. Addresses
    are hexadecimal, each word of four bytes in this machine's order."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTEN:
                raw, port = columns[1].split(":")
                words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
                yield f"socket:[{columns[9]}]", (ipaddress.ip_address(b"".join(words)), int(port, 16))
