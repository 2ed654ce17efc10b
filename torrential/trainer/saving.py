"""Checkpoints of a run with servers: when the first worker asks for one, and what it makes of the answer.

It asks when an epoch is over (or so many steps), goes on, and hands the copies that come (server/copies.py) to the
observer: parameters, the servers' optimizer state, the dealer of samples, and its own module buffers as they were when
it asked. The last one is asked for when all workers are finished, by whichever of them the world names.

What a resumed run goes on from is what a run could have come to: every push is on all ranges or on none (but that of a
worker that died in the middle of it), and the samples of updates that are not in it are dealt again, each once. With
one worker, and for any number of them where a clock's pushes become one update (`bsp`, `ssp` without staleness, `easgd`
that waits), it is what this run had come to: the resumed one takes the same steps as one that was not interrupted.
There every worker gives the states that are its own, as they are when it comes to the checkpoint's clock. Otherwise
workers come in another order, as they would in any other run; what a replica of `downpour` or `easgd` had moved on by
itself is not kept, nor are module buffers of other workers than the one that asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from torrential.comm.protocol import Comm
from torrential.params.base import dtype_name
from torrential.server.client import LAST, Client, PendingRequest
from torrential.server.copies import Saved, join_copies
from torrential.trainer.snapshot import Outlet, Snapshot
from torrential.trainer.state import NamedStates

if TYPE_CHECKING:
    from torrential.trainer.own_parts import OwnParts
    from torrential.trainer.replica import ModelReplica


class Saving:
    def __init__(
        self,
        comm: Comm,
        client: Client,
        outlet: Outlet,
        replica: ModelReplica,
        states: Sequence[str],
        named: NamedStates,
        parts: OwnParts | None,
        workers: int,
    ) -> None:
        """`states`: the names of the vectors that servers keep beside the parameters; `named`: the named states of this
        worker; `parts`: what each of the run's `workers` adds of its own."""
        self._named, self._parts, self._workers = named, parts, workers
        self._comm, self._client, self._outlet, self._replica, self._states = comm, client, outlet, replica, states
        self._layout = replica.whole_layout
        self._pending: PendingRequest | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None

    def begin(self, at_once: bool = False) -> None:
        self._vectors = [torch.empty(self._client.numel, dtype=self._client.dtype) for _ in ("", *self._states)]
        replica = self._replica
        self._untrained = {name: t.clone() for name, t in (replica.frozen() | replica.buffers()).items()}
        self._everybodys = {f"state/{name}": t.clone() for name, t in self._named.tensors("everybody").items()}
        self._asked = self._complained = self._comm.now()
        self._givers = list(self._comm.view.workers)
        replica.want_buffers()
        self._pending = self._client.save(self._vectors, at_once=at_once)

    def poll(self) -> None:
        """Hand the copies over if they are here; ask again if one is lost; complain if they do not come."""
        if self._pending is None:
            return
        if self._pending.done():
            if not self._hand_over(self._pending, final=False):
                self.begin()
        elif self._comm.now() - self._complained >= self._client.timeout:
            self._complained = self._comm.now()
            self._client.complain(self._pending, self._complained - self._asked)

    def at_once(self, snapshot: Snapshot) -> None:
        """Save the state of the servers, which no worker changes meanwhile, as this role knows."""
        whole = None
        while whole is None:  # a server may die
            self.begin(at_once=True)
            assert self._pending is not None
            whole = join_copies(self._pending.wait().metadata, self._client.numel)
        self._pending = None
        self._give(snapshot, {})

    def give_up(self) -> None:
        if self._pending is not None:
            self._client.forget(self._pending)
            self._pending = None

    def last(self) -> None:
        """Save the last checkpoint: all workers are finished."""
        self.begin()
        while self._pending is not None and not self._hand_over(self._pending, final=True):
            self.begin()

    def _hand_over(self, pending: PendingRequest, final: bool) -> bool:
        whole = join_copies(pending.wait().metadata, self._client.numel)
        self._pending = None
        if whole is None:
            return False
        snapshot = self._snapshot(whole, final)
        if self._parts:
            number, givers = pending.options["number"], self._givers
            snapshot = msgspec.structs.replace(
                snapshot,
                parts=True,
                number=LAST if final else number,
                givers=list(range(self._workers)) if final else givers,
            )
        self._give(snapshot, self._numbers(whole))
        return True

    def _give(self, snapshot: Snapshot, numbers: Mapping[str, Tensor]) -> None:
        names = [dtype_name(self._client.dtype), *(f"{dtype_name(self._client.dtype)}/{s}" for s in self._states)]
        flat = dict(zip(names, self._vectors, strict=True))
        own = {f"buffers/{name}": self._untrained[name] for name in self._replica.buffers()}
        if own and not (self._parts is not None and self._parts.in_step):
            self._outlet.own_states(snapshot.parts_under, own)
        rest = {f"rest/{name}": tensor for name, tensor in (self._replica.received | self._untrained).items()}
        self._outlet.snapshot(snapshot, flat, dict(numbers) | rest | self._everybodys)
        self._vectors, self._untrained, self._everybodys = [], {}, {}

    def _snapshot(self, whole: Saved, final: bool) -> Snapshot:
        dealer = whole.dealer
        assert dealer is not None
        found = [whole.scalars.get(e.index) for e in self._layout.entries]  # None: it was not stepped yet
        steps = [0 if numbers is None else numbers.get("step", whole.version) for numbers in found]
        return Snapshot(
            step=whole.version,
            epoch=dealer.epoch,
            cursor=dealer.cursor,
            samples=sum(dealer.used.values()),
            time=self._asked,
            members=[self._comm.rank],
            counts={e.name: int(step) for e, step in zip(self._layout.entries, steps, strict=True)},
            final=final,
            parts=bool(self._replica.buffers()),
            dealer=dealer,
        )

    def _numbers(self, whole: Saved) -> dict[str, Tensor]:
        """The optimizer's states that are one number for each parameter."""
        return {
            f"extra/{entry.name}/{name}": torch.tensor(value, dtype=torch.float32 if name == "step" else torch.float64)
            for entry in self._layout.entries
            for name, value in whole.scalars.get(entry.index, {}).items()
        }
