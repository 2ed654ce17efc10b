"""What the supervisor and its children say to each other."""

from __future__ import annotations

import msgspec

from torrential.records import Evaluation, Event, Step
from torrential.server.messages import View
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.failure import Failure


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# -- from a child ---------------------------------------------------------------------------------------------------
class Hello(_Message, frozen=True):
    role: str  # "worker", "server" or "observer"
    rank: int
    life: int
    pid: int
    address: str  # where peers can reach it
    letters: str = ""  # where letters can


class BufferWanted(_Message, frozen=True):
    key: str
    size: int  # bytes; 0: what it has, if it is there; -1: a file that is empty at first and may grow


class Stopped(_Message, frozen=True):
    """I have noticed the new generation and touch nothing shared any more."""

    generation: int


class Standing(_Message, frozen=True):
    generation: int
    applied: int


class Recorded(_Message, frozen=True):
    record: Step | Evaluation | Event


class SnapshotTaken(_Message, frozen=True):
    """Lies in the buffers `snapshot<slot>/<name>` of that rank; the rest of it is in the frame."""

    rank: int
    slot: int
    snapshot: Snapshot
    vectors: list[tuple[str, int, str]]  # name, numel, dtype
    rest: list[str]  # names of the frame's tensors


class OwnBuffers(_Message, frozen=True):
    rank: int
    step: int
    names: list[str]


class SnapshotDone(_Message, frozen=True):
    """That slot of that rank may be used (again)."""

    rank: int
    slot: int


class Suspect(_Message, frozen=True):
    """Worker `rank` (-1: one of the others) has not answered for so long that it must be hung. A server's address: it,
    or somebody whom it waits for."""

    rank: int
    seconds: float  # 0, with -1: not any more


class Ready(_Message, frozen=True):
    """This worker or server is built and can join."""

    numel: int = 0  # a server's: the length of the key space
    bounds: list[int] | None = None  # a server's: where it may be cut; anywhere by default


class Filled(_Message, frozen=True):
    """This server has all that the view of that version gives it."""

    version: int


class Pong(_Message, frozen=True):
    """This role is not hung."""

    waits: list[tuple[int, float]] = []  # a server's: addresses without whom it cannot go on; seconds of their silence


class Alive(_Message, frozen=True):
    """This process runs; whether its role gets on is another matter."""


class Left(_Message, frozen=True):
    """This role's program is finished, as of that generation."""

    generation: int
    last: bool = False  # whether it can give the last snapshot


class Delayed(_Message, frozen=True):
    """This worker waits for the observer (or does not any more); it is not hung."""

    waiting: bool


class Failed(_Message, frozen=True):
    failure: Failure


# -- from the supervisor --------------------------------------------------------------------------------------------
class Granted(_Message, frozen=True):
    key: str
    pid: int
    fd: int


class Refused(_Message, frozen=True):
    key: str
    reason: str


class Regroup(_Message, frozen=True):
    generation: int


class AllStopped(_Message, frozen=True):
    generation: int


class Go(_Message, frozen=True):
    generation: int
    members: list[int]
    addresses: list[str]
    lives: list[int]
    source: int
    applied: int
    behind: list[int]
    began: float  # on the monotonic clock that all processes of a host share
    meeting: str  # the path of the file in which the members of torch.distributed find one another, if it is used


class Roster(_Message, frozen=True):
    """Who is there, who answers for what, and where they are."""

    view: View
    contacts: list[tuple[int, str, int]]  # address, where letters reach it, life
    began: float


class Stop(_Message, frozen=True):
    """Finish at the next step that all agree on."""


class Gone(_Message, frozen=True):
    """A worker has died: nothing more will come from it."""

    rank: int


class Back(_Message, frozen=True):
    """A worker of that rank has joined."""

    rank: int


class Noted(_Message, frozen=True):
    """The record that you sent is in the file."""


class Ping(_Message, frozen=True):
    """Answer with Pong, from where you work."""


class Probe(_Message, frozen=True):
    """Answer with Alive, at once and whatever you are at."""


class Finish(_Message, frozen=True):
    """Everybody is finished; give the last snapshot, and leave again."""


class Dismissed(_Message, frozen=True):
    """Everybody is finished."""


FromChild = (
    Hello
    | BufferWanted
    | Stopped
    | Standing
    | Recorded
    | SnapshotTaken
    | OwnBuffers
    | SnapshotDone
    | Suspect
    | Ready
    | Filled
    | Pong
    | Alive
    | Left
    | Delayed
    | Failed
    | Stop
)
ToChild = (
    Granted
    | Refused
    | Regroup
    | AllStopped
    | Go
    | Roster
    | Stop
    | Gone
    | Back
    | Noted
    | Ping
    | Probe
    | Finish
    | Dismissed
    | SnapshotTaken
    | OwnBuffers
    | SnapshotDone
)
Any = FromChild | ToChild
