"""What is said inside a host, between its agent, its nursery and its roles. It needs no torch.

    supervisor ── Begin, End ──► agent ── Spawn, End ──► nursery ── forks ──► roles
    supervisor ◄── Born, Ended ── agent ◄── Born, Ended ── nursery
    role ── BufferWanted ──► agent ── Granted or BufferRefused ──► role

The supervisor names roles; what else a process has to know of its host (`Surroundings`) the agent adds.
"""

from __future__ import annotations

import msgspec

from torrential.comm.tls import Identity


class OfProcess(msgspec.Struct, frozen=True, tag=True):
    """About one incarnation of a role. Its pid is known to its own host alone."""

    role: str
    rank: int
    life: int


class Begin(OfProcess, frozen=True):
    """Start it."""

    loaders: int = 0  # processes that prepare a worker's batches
    seat: int = 0  # its number among those of its role on its host
    beside: int = 1  # how many of these the host is meant to have
    identity: Identity | None = None  # what it shows over tcp; None: tcp is in clear


class End(OfProcess, frozen=True):
    """Kill it."""


class Born(OfProcess, frozen=True): ...


class Ended(OfProcess, frozen=True):
    status: int  # exit code, or minus the signal


class Surroundings(msgspec.Struct, frozen=True):
    """What all processes of a host are told alike."""

    parcel: tuple[int, int, int]  # the pid of the process that holds the job, and two of its descriptors
    address: str = ""  # the address of the supervisor
    secret: bytes = b""  # of the run
    transport: str = "shared"
    memory: str = ""  # the address of the agent, which keeps this host's registered memory
    interface: str = "127.0.0.1"  # where this host listens to tcp
    apart: bool = False  # whether other roles of the run are on other hosts
    clock: float = 0.0  # this host's monotonic clock minus the supervisor's, seconds
    host_timeout: float = 0.0  # seconds of silence after which the supervisor's host is lost; 0: it is this one
    labelled: bool = False  # whether lines that a role prints begin with its name: those of many hosts are shown as one


class Spawn(OfProcess, frozen=True):
    around: Surroundings
    loaders: int = 0
    seat: int = 0
    beside: int = 1
    identity: Identity | None = None  # what it shows over tcp; None: tcp is in clear


ToNursery = Spawn | End
FromNursery = Born | Ended


# -- registered memory ------------------------------------------------------------------------------------------------
class Asker(OfProcess, frozen=True):
    """The role that asks for memory, as it greets its agent."""


class BufferWanted(msgspec.Struct, frozen=True):
    key: str
    size: int  # bytes; 0: what it has, if it is there; -1: a file that is empty at first and may grow


class Granted(msgspec.Struct, frozen=True, tag=True):
    pid: int
    fd: int


class BufferRefused(msgspec.Struct, frozen=True, tag=True):
    """The buffer that was asked for cannot be had."""

    reason: str


def ending(address: int, life: int) -> str:
    """The ending of buffers' keys that belong to one incarnation: what its predecessor shared may still be read."""
    return f"~{life}#{address}"
