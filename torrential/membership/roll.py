"""The roll of a run's members: those that are there, those that are being started, and the actions to carry out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torrential.comm.protocol import address_of, role_name, role_of
from torrential.membership.actions import Action, Kill, Note, Show, Start, Tell
from torrential.membership.roles import ROLES, Members, Who

How = str | Callable[[], str]
"""How a member ended, in words; a function where it takes time to find out, to be called only if it is to be said."""


def in_words(how: How) -> str:
    """How a member ended, found out if need be."""
    return how if isinstance(how, str) else how()


@dataclass(frozen=True)
class Rules:
    """The facts about a run that the membership needs, besides its population."""

    timeout: float
    """Seconds without an answer after which a member is taken for hung."""
    replaced: frozenset[str] = frozenset()
    """Roles of which another member is started when one dies, though its death does not mean "restart"."""
    replicas: int | None = None
    """Copies of each range beside the head's; None: one, where there are servers for it."""
    resumed: bool = False
    """Whether the run goes on from a checkpoint."""
    elapsed: float = 0.0
    """Seconds that the run had taken by then."""
    slots: int = 0
    """Snapshots that a worker keeps for the observer, each in a numbered slot that is handed back."""
    going_on: Callable[[], str] = lambda: "no checkpoint was made yet"
    """Says, after a failure, which checkpoint is the last good one and how to go on from it, or that there is none."""


@dataclass(eq=False)
class Member:
    """One incarnation of a member, and what is known of it."""

    who: Who
    heard: float  # when it last said something from where it works
    contact: str = ""  # where letters reach it
    exists: bool = False  # whether whoever starts members has said that it did
    greeted: bool = False  # whether it has said its first word
    left: bool = False
    last: bool = False  # whether it can give the last snapshot
    delayed: bool = False  # it waits for the observer
    quiet: float = 0.0  # seconds without any sign of it
    probed: bool = False  # whether it was asked for one since

    def __post_init__(self) -> None:
        self.address, self.life = self.who
        self.role, self.number = role_of(self.address)
        self.name = role_name(self.address)

    @property
    def worker(self) -> int | None:
        """The rank that an event about it names; only a worker has one."""
        return self.number if self.role == "worker" else None

    def said(self, what: str) -> str:
        """The detail of an event about it: a worker and the observer need not be named again."""
        return what if self.role in ("worker", "observer") else f"{self.name}: {what}"

    def heard_from(self) -> None:
        """Note that a member has given a sign of life."""
        self.quiet, self.probed = 0.0, False


class Roll:
    def __init__(self, population: Iterable[Members]) -> None:
        self.population = {members.name: members for members in population}
        assert "observer" not in self.population or self.population["observer"].count == 1
        assert all(m.name == "worker" or m.death != "regroup" for m in self.population.values()), "only workers regroup"
        self.now = 0.0
        self.here: dict[str, dict[int, Member]] = {role: {} for role in ROLES}  # by role, by number
        self.starting: dict[int, Member] = {}  # by address
        self.lives: dict[int, int] = {}  # by address: of the newest incarnation
        self.actions: deque[Action] = deque()
        self.workers, self.servers = self.here["worker"], self.here["server"]
        self.coordinators = self.here["coordinator"]

    # -- who is there ---------------------------------------------------------------------------------------------
    def count(self, role: str) -> int:
        return self.population[role].count if role in self.population else 0

    def at(self, address: int) -> Member | None:
        """The member that is there, at an address."""
        role, number = role_of(address)
        return self.here[role].get(number)

    def find(self, who: Who) -> Member | None:
        """The member that is this very incarnation, there or being started."""
        for member in (self.at(who.address), self.starting.get(who.address)):
            if member is not None and member.life == who.life:
                return member
        return None

    def is_starting(self, *roles: str) -> bool:
        return any(member.role in roles for member in self.starting.values())

    def everybody(self) -> list[Member]:
        """The members that others exchange letters with: workers, servers and coordinators."""
        return [*self.workers.values(), *self.servers.values(), *self.coordinators.values()]

    # -- comings and goings ---------------------------------------------------------------------------------------
    def start(self, role: str, number: int) -> Member:
        address = address_of(role, number)
        life = self.lives[address] = self.lives.get(address, -1) + 1
        member = self.starting[address] = Member(Who(address, life), self.now)
        self.actions.append(Start(member.who))
        if role == "worker":
            self.show(member, "starting")
        return member

    def arrive(self, member: Member) -> None:
        del self.starting[member.address]
        self.here[member.role][member.number] = member

    def remove(self, member: Member) -> None:
        if self.starting.get(member.address) is member:
            del self.starting[member.address]
        elif self.here[member.role].get(member.number) is member:
            del self.here[member.role][member.number]

    # -- what is to be done ---------------------------------------------------------------------------------------
    def send(self, member: Member, message: Any, tensors: Sequence[Any] = ()) -> None:
        self.actions.append(Tell(member.who, message, tensors))

    def forget_words_to(self, gone: Sequence[Who]) -> None:
        """Drop what members were to be told that are gone by now."""
        for _ in range(len(self.actions)):
            action = self.actions.popleft()
            if not (isinstance(action, Tell) and action.to in gone):
                self.actions.append(action)

    def note(self, event: str, worker: int | None = None, detail: str = "") -> None:
        self.actions.append(Note(event, worker, detail))

    def show(self, worker: Member, state: str) -> None:
        self.actions.append(Show(worker.number, state))

    def end(self, member: Member, why: str) -> None:
        """A member is hung: name it and end it."""
        self.note(f"{member.role}_hung", member.worker, member.said(f"{why}; ended"))
        self.actions.append(Kill(member.who))
