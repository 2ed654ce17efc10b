"""The Comm protocol: everything a role may ask of the world it runs in.

A strategy is written against this and nothing else, so that the same file runs on processes, on a cluster, or in
simulation. Concurrency is by handles: a call that moves data starts it and returns; `wait` finishes it.

`rank` is a worker's number for life. `members` are the ranks that form the current group, in ascending order; when one
dies or joins, `generation` grows by one and every wait in flight raises `Regrouped`.

Besides collectives there are letters, between any two roles. An `address` is a worker's rank, SERVERS + a server's
number, COORDINATORS + a coordinator's number, or OBSERVER. A role that only exchanges letters is not interrupted by
deaths: the newest `view` says which members are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.distributed import ProcessGroup

    from torrential.server.messages import View

T = TypeVar("T")

SERVERS = 1 << 16  # the address of server 0
COORDINATORS = 2 << 16  # the address of coordinator 0
OBSERVER = 3 << 16


def role_of(address: int) -> tuple[str, int]:
    """The role at an address, and its number among the members of that role."""
    if address >= OBSERVER:
        return "observer", address - OBSERVER
    if address >= COORDINATORS:
        return "coordinator", address - COORDINATORS
    return ("server", address - SERVERS) if address >= SERVERS else ("worker", address)


def address_of(role: str, number: int) -> int:
    """The address of a role's member; the inverse of `role_of`."""
    first = {"worker": 0, "server": SERVERS, "coordinator": COORDINATORS, "observer": OBSERVER}
    return first[role] + number


def role_name(address: int) -> str:
    """The name by which people know the role at an address: "worker 3", "server 0", "coordinator 0", "observer"."""
    role, number = role_of(address)
    return role if role == "observer" else f"{role} {number}"


class Handle(Protocol):
    """The handle of an operation under way."""

    def wait(self, timeout: float | None = None) -> Any:
        """Finish it. Raises WaitedTooLong (naming who), or Regrouped."""

    def done(self) -> bool: ...


class Complaints(Protocol):
    """Receives overdue waits, to find out which worker is hung, where a wait has no time limit of its own."""

    def overdue(self, rank: int, what: str, seconds: float) -> None:
        """Report that a wait for a worker (-1: for some worker) has lasted for so long; called again and again. `what`
        completes a sentence such as "worker 1 waits for worker 0 to send a tensor"."""

    def relieved(self) -> None:
        """Report that a wait that was overdue has ended."""


class Letter(NamedTuple):
    """A message from one role to another, with tensors. These may lie in the memory of the sender: they are not to be
    written to, and what is to be kept must be copied."""

    source: int  # an address; -1: the world itself, about a new view
    message: Any
    tensors: list[Tensor]


class Mail(Protocol):
    """The clock, the memory and the letters of a role."""

    address: int
    view: View  # the newest known; a change also arrives as a letter
    shares_memory: bool
    resend: float | None  # seconds of silence after which to ask again; None where only the dead lose letters
    meter: Meter

    def now(self) -> float:
        """Seconds since the run's first touch of data, on the world's clock."""

    def sleep(self, seconds: float) -> None: ...

    def buffer(self, name: str, numel: int, dtype: dtype, *, common: bool = False, rank: int | None = None) -> Tensor:
        """A registered tensor, zero at first. `common`: one copy that all roles of a host see (only where
        `shares_memory`, and for strategies with `one_memory`)."""

    def post(self, to: int, message: Any, tensors: Sequence[Tensor] = ()) -> Handle:
        """Send a letter; one that is lost is not reported. Letters of one role to another arrive in order. The handle
        is done when `tensors` may be changed, but a piece of a registered buffer may be read where it lies
        (`shares_memory`): it must stay as it is until the other one has answered."""

    def land(self, where: Callable[[Any], Sequence[Tensor] | None]) -> None:
        """Say where tensors that come as bytes shall be written: `where(message)` names tensors, or None. If they fit,
        they are those of the letter, and nothing has to be copied. Said again, it takes back what was said before:
        what is on its way by then is not written there any more."""

    def receive(self, timeout: float | None = None) -> Letter | None:
        """The next letter from any role, in order of arrival; None after `timeout` seconds. To a server that is to stop
        it gives None, too, when no letter is left."""

    def read(self, handle: Callable[[Letter], bool | None], timeout: float | None = None) -> bool:
        """Give every letter to `handle`, which must not wait, until it returns that this was enough; False when
        `receive` would give None instead of the next one."""

    def stop_requested(self) -> bool: ...


def letter_by_letter(mail: Mail, handle: Callable[[Letter], bool | None], timeout: float | None = None) -> bool:
    """Read letters one by one until `handle` has enough: the plain way to implement `Mail.read`."""
    while (letter := mail.receive(timeout)) is not None:
        enough = handle(letter)
        letter = None  # its memory is free for the next
        if enough:
            return True
    return False


class Group(Protocol):
    """Members that sum, gather and wait together. Every one of them starts the same operations in the same order."""

    members: tuple[int, ...]

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum over the members, in place; the same bits everywhere. `tensor` is part of a registered buffer."""

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Handle:
        """Sum the members' `parts`, which together cover `region`; afterwards this member's slice of `region` holds
        its slice of the sum, and the rest of `region` is scratch."""

    def all_gather(self, vector: Tensor) -> Handle:
        """Waits for a (members, numel) tensor of everyone's vector, and so is a barrier too. One that is not small is
        part of a registered buffer."""

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """Copy the root's tensor to all others. `tensor` is part of a registered buffer."""

    def barrier(self) -> Handle:
        """Waits until all members have come here."""


class Comm(Mail, Group, Protocol):
    """The communication of a worker: letters, tensors, collectives of all members or of a group of them."""

    rank: int
    generation: int
    lives: dict[int, int]  # by address: how many have been there before whoever is there now

    def group(self, ranks: Sequence[int]) -> Group:
        """Some of the members, this one among them; to be asked for anew when members have changed."""

    def process_group(self) -> ProcessGroup:
        """All workers of the run as a group of torch.distributed, over NCCL where each has a GPU of its own, else over
        Gloo; of real processes only. Waits until all of them have asked for it, so it is best asked for before the
        first round, when time has not begun. It does not outlive any of them."""

    def send(self, tensor: Tensor, to: int, tag: str = "") -> Handle:
        """Send a tensor to another member; done when it may be changed. Those of one tag arrive in order."""

    def recv(self, into: Tensor, source: int, tag: str = "") -> Handle:
        """Receive the next tensor that a member sends under this tag; waits for `into`."""

    def pass_on(self, tensor: Tensor, to: int, tag: str, room: int) -> Handle:
        """Send a tensor to another member, which takes it over by `take`. All that are passed on under one tag are of
        one size. Where memory is shared it is copied once. `room`: how many of them the other one may have at a time
        before more are copied twice."""

    def take(self, sizes: Sequence[int], kind: dtype, source: int, tag: str, room: int) -> Handle:
        """Take over the next tensor that a member passes on under this tag; waits for it. Its memory goes back to the
        sender when this role has no reference to it any more."""

    def compute(self, samples: float, work: Callable[[], T], *, waits: bool = False) -> T:
        """Do forward and backward over so many samples, or a share of that work. In simulated time it takes as long as
        the cluster says. `waits`: the work waits for other members in between, by `within_work`."""

    def within_work(self, wait: Callable[[], T]) -> T:
        """Wait for other members in the middle of the work of `compute`, in forward or in backward."""

    def reached(self, share: float, then: Callable[[], None]) -> None:
        """Call `then` when this share of `work` is done; from within `work`. Where time is simulated: when that time
        has come."""

    def join(self, members: Sequence[int], era: int, check: Callable[[], None]) -> None:
        """Exchange tensors with these workers from now on, where workers do not regroup. `era` is a growing number:
        only workers that give the same one exchange tensors, and tensors of earlier eras are thrown away. Waits call
        `check`, which raises Regrouped if one of them is gone."""

    @property
    def traced(self) -> bool:
        """Whether the run is traced; if not, `span` does nothing."""

    def span(self, what: str, began: float, about: Mapping[str, float] = ...) -> None:
        """Put into the trace what this role did from `began` until now. `about`: numbers that are shown with it; among
        them `waited`, the seconds in which it waited for another role."""

    def check(self) -> None:
        """Raise Regrouped if membership has changed. Waits do this; a role that never waits must."""

    def regroup(self, stand: Callable[[], int]) -> Agreement:
        """Meet the other members of the newest generation. `stand` is called once all of them have stopped; it
        returns how many steps this one has taken (-1: none, and it has no state yet)."""

    def suspect(self, address: int, seconds: float) -> None:
        """Report that a server has not answered for so long; the world finds out whether it is hung, or which member it
        waits for."""

    def leave(self, last: Callable[[], None] | None = None) -> None:
        """Report that this worker's program is finished; returns when the programs of all members are. Raises Regrouped
        if a member dies before. When all are finished, one of the members that have given a `last` function calls it,
        and the others wait for that."""


class Part(NamedTuple):
    """A piece of a flat region that lies somewhere else in memory."""

    start: int
    stop: int
    data: Tensor | None  # (stop - start,) flat; None stands for zeros


@dataclass(frozen=True)
class Agreement:
    """The outcome of a regrouping: the members, and the member whose state is the furthest."""

    generation: int
    members: tuple[int, ...]
    source: int  # the lowest rank among those that had applied the most steps
    applied: int  # how many steps that one has applied
    behind: tuple[int, ...]  # members whose state must come from `source`


@dataclass
class Meter:
    """The account of a role: where its time went, and how much it sent."""

    communicate: float = 0.0  # copying, summing, handing to the transport
    wait: float = 0.0  # blocked on somebody else
    bytes_sent: int = 0
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.wait += self.clock() - start


ALIGNMENT = 16  # elements; slices begin on cache lines for 4-byte types


def slices(numel: int, members: int) -> list[tuple[int, int]]:
    """The slices of a vector that is cut over the members: near-equal, contiguous, on aligned bounds."""
    cuts = [min(numel, (i * numel // members + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT) for i in range(members)]
    return list(zip(cuts, [*cuts[1:], numel], strict=True))
