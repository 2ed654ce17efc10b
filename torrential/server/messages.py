"""What workers and servers say to each other. Tensors travel beside the message; see comm/protocol.py.

A request is for one range, which its `start` names; one that spans several goes to each of them under the same `seq`.
A worker never uses a number for another request, so that one sent again after a server's death is known for what it
is; `floor` tells servers what they may forget. `clock` counts a worker's own iterations.
"""

from __future__ import annotations

from typing import Any

import msgspec

Span = tuple[int, int]  # [start, stop) of the key space
LIFE_BITS = 32  # of a request's number; the bits above say in which life of its worker it was made


class Range(msgspec.Struct, frozen=True, array_like=True):
    start: int
    stop: int
    chain: tuple[int, ...]  # addresses of servers: the head, then its replicas
    heir: int | None = None  # the member that is to be the head as soon as it is filled (server/ring.py)


class View(msgspec.Struct, frozen=True, tag=True):
    """The members that are there, and the server that answers for each range. A higher version replaces a lower one."""

    version: int
    workers: tuple[int, ...]  # ranks that take part
    table: tuple[Range, ...]  # covers the key space in order, without gaps; empty where there are no servers
    coordinators: tuple[int, ...] = ()  # addresses of the coordinators that take part

    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({address for r in self.table for address in r.chain}))


# -- requests of workers ------------------------------------------------------------------------------------------
class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    seq: int
    clock: int
    view: int  # the version of the view it was addressed by
    spans: tuple[Span, ...] = ()  # in the order of the tensors
    start: int = 0  # the first key of the range it is for
    floor: int = 0  # every request of this worker below this number has been answered


class Put(Request, frozen=True, kw_only=True):
    """Set values; tensors: one per span."""


class Add(Request, frozen=True, kw_only=True):
    """Add to values; tensors: one per span, or, with `keys`, one of values and one of int64 keys inside the spans."""

    keys: bool = False


class Push(Request, frozen=True, kw_only=True):
    """Gradients for the server's optimizer; tensors as for Add. With `pull` the answer carries the parameters."""

    lr: float
    rates: tuple[dict[str, float | tuple[float, ...]], ...] = ()  # as in optim/rates.py: options by group, if moved
    scale: float = 1.0  # the factor of the gradient; 0: the update that it would be part of is left out
    used: tuple[int, ...] | None = None  # entries of the layout that backward reached; None: all
    version: int = 0  # the version of the parameters it was computed on, for staleness
    lease: int = 0  # the batch it was computed on; 0: none
    keys: bool = False
    pull: bool = False
    packed: str = ""  # the dtype of values that are packed with their keys (compression/sparse.py), or half precision


class Pull(Request, frozen=True, kw_only=True):
    """Parameters, as soon as consistency lets a worker at this clock read them."""


class Take(Request, frozen=True, kw_only=True):
    """The next samples to train on."""

    count: int
    after: int = 0  # updates that must have been applied before


class GiveBack(Request, frozen=True, kw_only=True):
    """Samples that this worker has taken and will not train on; nor does it want those that it has asked for."""

    lease: int = 0  # 0: it has none


class Save(Request, frozen=True, kw_only=True):
    """The copy that belongs to checkpoint `number`, as soon as it is complete (server/copies.py); spans: one for the
    parameters and one for each of the optimizer's states. The answer has no `metadata` where the copy is lost. With
    `at_once` it is the range as it is now: the sender knows that no worker changes it meanwhile."""

    number: int
    at_once: bool = False


class Mark(Request, frozen=True, kw_only=True):
    """All this worker has sent before belongs to checkpoint `number`, and nothing after."""

    number: int
    cut: int = -1  # as in Marking


class Call(Request, frozen=True, kw_only=True):
    """Run a registered handler on the spans."""

    name: str
    options: dict[str, Any] = {}


# -- answers ------------------------------------------------------------------------------------------------------
class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    seq: int
    start: int = 0  # as in the request, so is `view`
    view: int = 0
    version: int = 0  # updates applied to these spans so far; of the parameters, where tensors are parameters
    clock: int = 0  # the number of clocks that all workers have completed
    dropped: bool = False  # a gradient that came too late
    staleness: int = 0  # the updates between the read and the push of a gradient
    lease: int = 0
    indices: Span = (0, 0)  # the leased samples: places in the epoch's order
    epoch: int = 0
    total: int = 0  # samples that all workers together were given at this clock
    finished: bool = False  # nothing is left to take; also said to whoever reads the range of key 0
    metadata: bytes = b""  # everything about a copy besides its tensors, encoded by server/copies.py


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    seq: int
    reason: str
    start: int = 0
    view: int = 0


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Somebody else answers for these spans by now, as a newer view says."""

    seq: int
    start: int = 0
    view: int = 0


class Marking(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Mark this checkpoint now. Where a clock's pushes become one update, it is made of the clocks before `cut`."""

    number: int
    cut: int = -1  # -1: only those who know need to say it
    view: int = 0


# -- between servers ----------------------------------------------------------------------------------------------
class Replicate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operation, for the next in the chain; tensors are its operands."""

    start: int  # the first key of the range
    number: int  # the number of the operation on that range
    operation: bytes  # encoded by server/shard.py
    view: int
    stop: int = 0  # the end of the range, as the sender sees it


class Replicated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The operation is on this server and all after it. With `empty`: this server needs a ShardState to go on from."""

    start: int
    number: int
    view: int = 0
    empty: bool = False


class ShardState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything about a span, for a server that is to hold it; tensors: parameters, then optimizer states by name."""

    start: int
    stop: int
    number: int  # operations applied so far
    names: tuple[str, ...]
    metadata: bytes  # clocks, sequence numbers, dealer: encoded by server/shard.py
    view: int


Message = (
    View | Put | Add | Push | Pull | Take | GiveBack | Save | Mark | Call
    | Done | Refused | Moved | Marking | Replicate | Replicated | ShardState
)  # fmt: skip
