"""What the carriers of collectives have in common: operations in flight, and how to wait for them.

Every member starts the same operations in the same order, so the n-th operation of one is the n-th of all. An
operation is a small state machine: `start` publishes what others need, `advance` does what has become possible and
never blocks. They finish in order, unless a carrier lets them overtake. `progress` may be called from autograd hooks;
only `wait` blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torrential.comm.protocol import Complaints, Meter
from torrential.errors import RunFailed, WaitedTooLong


class Operation:
    """One collective under way on this member; also the handle that the caller gets."""

    what = "operation"

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.number = carrier.issue()
        self.finished = False
        self.result: Any = None

    def start(self) -> None: ...

    def advance(self) -> bool:
        """Do what can be done now; True when the operation is finished on this member."""
        raise NotImplementedError

    def lagging(self) -> int:
        """The rank that keeps this operation from going on; it may itself be waiting for another member."""
        raise NotImplementedError

    def in_words(self) -> str:
        """What a member does that waits here, as in "worker 1 waits for worker 0 in an all-gather"."""
        vote = " (a vote is one)" if self.what == "all-gather" and not self.carrier.among else ""
        return f"in {with_article(self.what)}{vote}{self.carrier.among}"

    def done(self) -> bool:
        self.carrier.progress()
        return self.finished

    def wait(self, timeout: float | None = None) -> Any:
        self.carrier.finish(self, timeout)
        return self.result


class Carrier:
    """A queue of operations in flight. Subclasses say how to sleep until something has changed."""

    def __init__(self, rank: int, meter: Meter, check: Callable[[], None], timeout: float) -> None:
        self.rank, self.meter, self.timeout = rank, meter, timeout
        self.check = check  # raises Regrouped when membership has changed
        self.complaints: Complaints | None = None  # what is told of long waits, instead of giving up
        self.among = ""  # the members in words, where they are not all that there are
        self.members: tuple[int, ...] = ()
        self.index = 0
        self._issued = 0
        self._queue: deque[Operation] = deque()

    def regroup(self, generation: int, members: tuple[int, ...]) -> None:
        """Forget what was in flight; number operations anew, above all numbers of earlier generations."""
        self.members, self.index = members, members.index(self.rank)
        self._issued = generation << 32
        self._queue.clear()

    def issue(self) -> int:
        self._issued += 1
        return self._issued

    def launch(self, operation: Operation) -> Operation:
        start = self.meter.clock()
        operation.start()
        self._queue.append(operation)
        self._advance()
        self.meter.communicate += self.meter.clock() - start
        return operation

    def progress(self) -> None:
        if self._queue:
            start = self.meter.clock()
            self._advance()
            self.meter.communicate += self.meter.clock() - start

    def _advance(self) -> None:
        while self._queue and self._queue[0].advance():
            self._queue.popleft().finished = True

    def finish(self, operation: Operation, timeout: float | None) -> None:
        if operation.done():
            return
        limit = self.timeout if timeout is None else timeout
        began = now = self.meter.clock()
        late = False
        try:
            while not operation.finished:
                self.check()
                head = self._queue[0]
                if now - began > limit:
                    if self.complaints is None or timeout is not None:
                        raise WaitedTooLong(f"worker {head.lagging()}", now - began, head.what)
                    late = True
                    self.complaints.overdue(head.lagging(), head.in_words(), now - began)
                    limit += self.timeout
                self.idle(head, now - began)
                now = self.meter.clock()
                before = self.meter.communicate
                self.progress()
                self.meter.wait -= self.meter.communicate - before  # work done while waiting is not waiting
        finally:
            if late and self.complaints is not None:
                self.complaints.relieved()
        self.meter.wait += self.meter.clock() - began

    def idle(self, head: Operation, waited: float) -> None:
        """Sleep until `head` may be able to go on, a few milliseconds at the most."""
        raise NotImplementedError


def with_article(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def members_of_group(rank: int, ranks: Iterable[int], members: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a group that a worker asks for, ascending. Raises RunFailed if it is not itself one of them, or if
    one of them is no member."""
    group = tuple(sorted(set(ranks)))
    strangers = [other for other in group if other not in members]
    if rank not in group:
        remedy = f"in which it is not itself; put {rank} among them"
    elif strangers:
        remedy = f"of which {_listed(strangers)} is no member; the members are {_listed(members)}"
    else:
        return group
    raise RunFailed(f"worker {rank} asks for a group of workers {_listed(group)}, {remedy}")


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
