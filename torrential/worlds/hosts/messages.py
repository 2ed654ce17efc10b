"""What the supervisor and the agents of other hosts say to each other. It needs no torch, and nothing is unpickled.

agent ── Come ──────────────────► supervisor     who it is, and with which versions
agent ── AskTime, eight times ──► supervisor     the difference of their clocks
agent ◄── RunPlan ────────────────── supervisor     the run, as its configuration
agent ── Prepared ──────────────► supervisor     the job is made of the host's own files, or why not
agent ◄── Begin, End ──────────── supervisor
agent ── Born, Ended ───────────► supervisor
agent ◄── RunOver ────────────────── supervisor
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from torrential.version import __version__
from torrential.worlds.local.orders import Begin, Born, End, Ended


class Come(msgspec.Struct, frozen=True, tag=True):
    """A host is there."""

    host: int
    name: str
    versions: dict[str, str]


class AskTime(msgspec.Struct, frozen=True, tag=True):
    """What does your clock say?"""


class TimeIs(msgspec.Struct, frozen=True, tag=True):
    now: float


class RunPlan(msgspec.Struct, frozen=True, tag=True):
    """All that a host needs to know of a run to make its job, and the surroundings of its roles, by itself."""

    config: bytes  # RunConfig, as msgpack
    directory: str
    manifest: str  # the digest of the manifest that lies there
    files: dict[str, str]  # digests by what they are of: "task", "strategy"
    checkpoint: int | None  # the step to go on from
    cut: bool  # whether a whole model is built, of which workers take parts
    salt: bytes  # the run's secret follows from it and what all hosts know
    address: str  # of the supervisor, for roles
    transport: str
    host_timeout: float


class Prepared(msgspec.Struct, frozen=True, tag=True):
    problem: str = ""  # why it cannot be; "": it is


class RunOver(msgspec.Struct, frozen=True, tag=True):
    """The run has ended."""

    problem: str = ""  # why it failed; "": it is finished


class JobRequest(msgspec.Struct, frozen=True):
    """What an agent asks a process with torch in it to make, in the place where the job is to lie afterwards."""

    plan: RunPlan
    task: str | None  # as this host was told to load it; None: as the supervisor did
    data: str | None  # where this host has data sets
    model: tuple[int, int, int]  # where the whole model goes: a pid, two descriptors
    packed: tuple[int, int, int] | None = None  # where the supervisor's job lies; None: it is made of files


ToAgent = TimeIs | RunPlan | Begin | End | RunOver
FromAgent = AskTime | Prepared | Born | Ended


def versions() -> dict[str, str]:
    """The versions that all hosts of a run must have alike."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return {"torrential": __version__, "torch": torch, "Python": platform.python_version()}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
