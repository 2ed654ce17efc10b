"""The population of a run: its roles, and what the death of a member means to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torrential.comm.protocol import role_name

Death = Literal["regroup", "view", "restart", "fail"]
"""What a death means. regroup: the workers meet again, in a new generation. view: the next view says so, and no member
is interrupted. restart: the same, and another member is started in its place, from its saved state. fail: the run ends
with a line that names it."""

ROLES = ("worker", "server", "coordinator", "observer")


@dataclass(frozen=True)
class Members:
    """One role of a run."""

    name: str
    """The role: "worker", "server", "coordinator" or "observer"."""
    count: int
    death: Death


class Who(NamedTuple):
    """One incarnation of a member: its address, and how many members had that address before it."""

    address: int
    life: int

    def __str__(self) -> str:
        return role_name(self.address)
