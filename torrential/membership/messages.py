"""What members and the membership say to each other."""

from __future__ import annotations

import msgspec

from torrential.server.messages import View


class MemberMessage(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages between a member and its supervisor."""


# -- from a member ----------------------------------------------------------------------------------------------------
class Ready(MemberMessage, frozen=True):
    """This member is built and can join."""

    numel: int = 0  # a server's: the length of the key space
    bounds: list[int] | None = None  # a server's: where it may be cut; anywhere by default
    shares: list[int] = []  # a server's: where it must be cut


class Stopped(MemberMessage, frozen=True):
    """I have noticed the new generation and touch nothing shared any more."""

    generation: int


class Standing(MemberMessage, frozen=True):
    """This worker has taken so many steps; -1: none, and it has no state yet."""

    generation: int
    applied: int


class Filled(MemberMessage, frozen=True):
    """This server has all that the view of that version gives it."""

    version: int


class Suspect(MemberMessage, frozen=True):
    """The member at that address has not answered a letter for so long that it, or somebody whom it waits for, must be
    hung."""

    address: int
    seconds: float


class Overdue(MemberMessage, frozen=True):
    """This worker has waited for another for so long that this one, or somebody whom it waits for, must be hung."""

    rank: int  # whom it waits for, as far as it knows; -1: it does not
    what: str  # what it is waited for, as in "worker 1 waits for worker 0 to send a tensor"
    seconds: float


class Relieved(MemberMessage, frozen=True):
    """The wait of this worker that was overdue has ended."""


class Pong(MemberMessage, frozen=True):
    """This role is not hung."""

    waits: list[tuple[int, float]] = []  # a server's: addresses without whom it cannot go on; seconds of their silence


class Alive(MemberMessage, frozen=True):
    """This process runs; whether its role gets on is another matter."""


class Delayed(MemberMessage, frozen=True):
    """This worker waits for the observer (or does not any more); it is not hung."""

    waiting: bool


class Left(MemberMessage, frozen=True):
    """This member's program is finished, as of that generation."""

    generation: int
    last: bool = False  # whether it can give the last snapshot


class OwnStates(MemberMessage, frozen=True):
    """A worker's part of the snapshot of a step; its tensors travel beside it."""

    rank: int
    step: int
    names: list[str]


class SnapshotDone(MemberMessage, frozen=True):
    """The observer is done with what lies in that slot of that rank, which may be used (again)."""

    rank: int
    slot: int


# -- to a member ------------------------------------------------------------------------------------------------------
class Regroup(MemberMessage, frozen=True):
    """Members have changed: stop, and meet the others of that generation."""

    generation: int


class AllStopped(MemberMessage, frozen=True):
    """Every worker of that generation has stopped."""

    generation: int


class Go(MemberMessage, frozen=True):
    """What the workers of a generation have agreed on. Where workers do not regroup: begin."""

    generation: int
    members: list[int]
    source: int
    applied: int
    behind: list[int]
    began: float  # when the run began, on the clock of the world


class Roster(MemberMessage, frozen=True):
    """The members that are there, the server that answers for each range, and the addresses of members."""

    view: View
    contacts: list[tuple[int, str, int]]  # address, where letters reach it, life
    began: float


class Stop(MemberMessage, frozen=True):
    """From the observer: the target is reached. To the others: finish at the next step that all agree on."""


class Finish(MemberMessage, frozen=True):
    """Everybody is finished; give the last snapshot, and leave again."""


class Dismissed(MemberMessage, frozen=True):
    """Everybody is finished."""


class Gone(MemberMessage, frozen=True):
    """To the observer: a worker has died, and nothing more will come from it."""

    rank: int


class Back(MemberMessage, frozen=True):
    """To the observer: a worker of that rank has joined."""

    rank: int


class Ping(MemberMessage, frozen=True):
    """Asks a member to answer with Pong, from the place where it works."""


class Probe(MemberMessage, frozen=True):
    """Asks a member to answer with Alive at once, also while it computes."""
