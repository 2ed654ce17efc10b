"""What the supervisor and its children say to each other: what the membership has to say, and what is of processes."""

from __future__ import annotations

from torrential.membership.messages import Alive as Alive
from torrential.membership.messages import AllStopped as AllStopped
from torrential.membership.messages import Back as Back
from torrential.membership.messages import Delayed as Delayed
from torrential.membership.messages import Dismissed as Dismissed
from torrential.membership.messages import Filled as Filled
from torrential.membership.messages import Finish as Finish
from torrential.membership.messages import Go as Go
from torrential.membership.messages import Gone as Gone
from torrential.membership.messages import Left as Left
from torrential.membership.messages import MemberMessage
from torrential.membership.messages import Overdue as Overdue
from torrential.membership.messages import OwnStates as OwnStates
from torrential.membership.messages import Ping as Ping
from torrential.membership.messages import Pong as Pong
from torrential.membership.messages import Probe as Probe
from torrential.membership.messages import Ready as Ready
from torrential.membership.messages import Regroup as Regroup
from torrential.membership.messages import Relieved as Relieved
from torrential.membership.messages import Roster as Roster
from torrential.membership.messages import SnapshotDone as SnapshotDone
from torrential.membership.messages import Standing as Standing
from torrential.membership.messages import Stop as Stop
from torrential.membership.messages import Stopped as Stopped
from torrential.membership.messages import Suspect as Suspect
from torrential.records import Evaluation, Event, Step, Work
from torrential.worlds.failure import Failure
from torrential.worlds.observing import SnapshotTaken as SnapshotTaken


# -- from a child ---------------------------------------------------------------------------------------------------
class Hello(MemberMessage, frozen=True):
    role: str  # "worker", "server", "coordinator" or "observer"
    rank: int
    life: int
    contact: str  # where letters reach it; "": nowhere


class Recorded(MemberMessage, frozen=True):
    record: Step | Evaluation | Event | Work
    report: int = 0  # of a script: the first with a number counts


class StopAsked(MemberMessage, frozen=True):
    """A script wants the run to end."""


class Failed(MemberMessage, frozen=True):
    failure: Failure


# -- from the supervisor --------------------------------------------------------------------------------------------
class Noted(MemberMessage, frozen=True):
    """The record that you sent is in the file."""


FromChild = (
    Hello | Stopped | Standing | Recorded | SnapshotTaken | OwnStates | SnapshotDone | Suspect | Overdue
    | Relieved | Ready | Filled | Pong | Alive | Left | Delayed | Failed | Stop | StopAsked
)  # fmt: skip
ToChild = (
    Regroup | AllStopped | Go | Roster | Stop | Gone | Back | Noted | Ping | Probe | Finish
    | Dismissed | SnapshotTaken | OwnStates | SnapshotDone
)  # fmt: skip
Any = FromChild | ToChild
