"""Roles that take their time for what they do in the memory of their host, where a cluster says how long that takes.

    a worker   copies its gradient to where others see it, adds up its slice of theirs, updates its slice; or pushes,
               and copies what it pulls
    a server   looks through what is pushed, adds it up, updates; and answers when that is done

worlds/sim/mail.py says how often each byte crosses the bus for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torrential.comm.protocol import Handle, Letter
from torrential.params.base import CommonParameters, Finished, Update, state_keys
from torrential.server.messages import Done, Request
from torrential.server.server import Server
from torrential.worlds.sim.comm import SimComm
from torrential.worlds.sim.mail import ADD, COPY, LOOK, SimMail


def update(states: int) -> int:
    """An optimizer's step: the gradient is read, parameters and states are read and written."""
    return 1 + 2 * (1 + states)


class TimedParameters:
    """A worker's parameters, whose update takes time."""

    def __init__(self, parameters: CommonParameters, comm: SimComm) -> None:
        self._inner, self._comm = parameters, comm
        self._traffic = self._undo = 0  # bytes, for all parameters
        for dtype, numel in parameters.layout.sizes.items():
            keys = state_keys(parameters.spec, dtype)  # type: ignore[attr-defined]
            states = 1 if keys is None else len(keys)
            self._traffic += update(states) * numel * dtype.itemsize
            self._undo += COPY * (1 + states) * numel * dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, step: Update) -> None:
        """Take the step, and the time for it: where memory is shared, for its own slice, after a copy of what was there
        (params/shared.py)."""
        self._inner.apply(step)
        members = len(self._comm.members)
        if self._comm.together and members > 1:
            self._comm.work_on((self._traffic + self._undo) / members)
        else:
            self._comm.work_on(self._traffic)


class TimedMail(SimMail):
    """A server's mail: what the server sends while it is at work leaves when that is done."""

    held: list[tuple[int, Any, Sequence[Tensor]]] | None = None

    def post(self, to: int, message: Any, tensors: Sequence[Tensor] = ()) -> Handle:
        if self.held is None:
            return super().post(to, message, tensors)
        self.held.append((to, message, tensors))
        return Finished()


class TimedServer(Server):
    comm: TimedMail

    def handle(self, letter: Letter) -> None:
        if self.comm.held is not None:
            return super().handle(letter)  # one that has waited for the letter that is dealt with now
        before, began = self._updates(), self.comm.now()
        said = self.comm.held = []
        super().handle(letter)
        self.comm.held = None
        inside = self.comm.hub.cluster.inside
        asked = inside.request if isinstance(letter.message, Request) else None
        self.comm.work(inside.letter if asked is None else asked)
        self.comm.work_on(LOOK * sum(t.nbytes for t in letter.tensors) + self._traffic(before, said))
        self.comm.span("serve", began)
        for to, message, tensors in said:
            self.comm.post(to, message, tensors)

    def _updates(self) -> dict[int, int]:
        return {start: link.shard.version for start, link in self._links.items() if link.holds}

    def _traffic(self, before: dict[int, int], said: Sequence[tuple[int, Any, Sequence[Tensor]]]) -> int:
        """Bytes read and written for the updates made since, and, where pushes are added up, for that."""
        size, times = self.store.dtype.itemsize, update(len(self.store.states))
        total = 0
        for start, version in self._updates().items():
            link = self._links[start]
            made = version - before.get(start, version)
            total += made * times * (link.stop - link.start) * size
            if made and self._consistency.aggregates:
                answers = sum(
                    isinstance(m, Done) and m.start == start and not m.dropped and bool(t) for _, m, t in said
                )
                total += max(0, answers - 1) * ADD * (link.stop - link.start) * size
        return total
